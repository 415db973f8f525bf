"""Every Python snippet of the README and the docs runs, every example too; no link is dead."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Installed by name, or a package that the first cell of a notebook installs.
RELEASED = re.compile(
    r"""(?:pip install|uv add)(?: +-\S+)* +["']?primum\b(?!/)|primum\[\w+"""
    r"""|\\"primum\\": *\\"primum\\\""""
)
SMALL = {"nanogpt.py": ["--steps", "4", "--width", "16", "--depth", "1"]}  # minutes otherwise


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page, tmp_path, monkeypatch):
    """In order, in one namespace: a later snippet may use what an earlier one made."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict = {"__name__": "snippet"}
    for number, code in enumerate(snippets(page)):
        exec(compile(code, f"{page.name}, snippet {number + 1}", "exec"), namespace)


def test_there_are_snippets():
    assert {page.name for page in PAGES if snippets(page)} >= {"README.md", "index.md", "guide.md"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples_run(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example), *SMALL.get(example.name, [])])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


def test_no_page_promises_a_release():
    """No registry has primum: whoever takes the name there would be installed."""
    code = [path for folder in ("src", "lab", "examples") for path in (ROOT / folder).rglob("*.py")]
    notebooks = (ROOT / "examples" / "notebooks").glob("*.ipynb")
    for path in [*PAGES, *OTHERS, *code, *notebooks]:
        promised = RELEASED.findall(path.read_text())
        assert not promised, f"{path.relative_to(ROOT)}: {promised}"


@pytest.mark.parametrize(
    ("text", "promises"),
    [
        ("pip install primum", True),
        ("pip install --quiet 'primum[lab]'", True),
        (r"\"primum\": \"primum\"", True),  # as in a notebook's JSON
        ('pip install ".[lab]"', False),
        ("`pip install .` in a clone; primum needs torch", False),
    ],
)
def test_what_promises_a_release(text, promises):
    assert bool(RELEASED.search(text)) == promises


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of every heading, as the site and GitHub make them, and those set by hand."""
    headings = re.findall(r"^#+ +(.*?) *$", prose(page), flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    by_hand = re.findall(r"""(?:id="|\{ ?#)([\w-]+)""", prose(page))
    return {re.sub(r"[\s-]+", "-", heading) for heading in plain} | set(by_hand)


def links(page: Path) -> list[str]:
    """Targets of links and images, in Markdown and in HTML, that are not on another host."""
    text = prose(page)
    found = re.findall(r"\]\(([^)\s]+)[^)]*\)", text) + re.findall(
        r"""(?:href|src)="([^"]+)""", text
    )
    return [link for link in found if not link.startswith(("http://", "https://", "mailto:"))]


@pytest.mark.parametrize("page", PAGES + OTHERS, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page):
    """To a file or to a page that the site makes of a notebook; the heading is there as well."""
    for link in links(page):
        target, _, anchor = link.partition("#")
        found = page.parent / target if target else page
        if found.parent.name == "notebooks" and found.suffix == ".md":
            found = ROOT / "examples" / "notebooks" / f"{found.stem}.ipynb"
        assert found.exists(), f"{page.name} links to {link}"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{page.name} links to {link}"


def test_every_page_is_in_the_menu():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- .*: (\S+\.md)$", text, flags=re.MULTILINE)
    pages = [page.name for page in PAGES if page.parent.name == "docs"]
    notebooks = (ROOT / "examples" / "notebooks").glob("*.ipynb")
    pages += [f"notebooks/{path.stem}.md" for path in notebooks]
    assert sorted(listed) == sorted(pages)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nothing_is_left_to_be_filled_in(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    left = re.findall(r"^[A-Z_]{3,}$|\bTODO\b|\bTBD\b|\bXXX+\b|\{\{", text, flags=re.MULTILINE)
    assert not left, f"{page.name}: {left}"
