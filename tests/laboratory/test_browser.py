"""The page in a real browser, wide and narrow: no errors, nothing fetched, every picture shown.

Collected only where a browser is found (see conftest.py); other tests check the HTML itself.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

from lab.page import render
from lab.runs import RunRecord
from laboratory.conftest import BROWSERS, MakeRuns

# The page goes into a frame, which may be narrower than a browser's window.
HARNESS = """<!doctype html><body style="margin:0">
<iframe style="border:0;width:{width}px;height:2000px" srcdoc="{page}"></iframe><pre id="out"></pre>
<script>
const frame = document.querySelector("iframe");
frame.onload = async () => {{
  const page = frame.contentDocument, seen = page.defaultView;
  await Promise.all([...page.querySelectorAll("image")].map(i => i.decode ? i.decode() : 0));
  const drawings = [...page.querySelectorAll("figure svg")];
  const boxes = drawings.map(s => s.getBoundingClientRect());
  document.querySelector("#out").textContent = JSON.stringify({{
    pictures: boxes.map(b => [b.width, b.height]),
    images: [...page.querySelectorAll("image")].map(i => i.getBoundingClientRect().width),
    drawn: drawings.map(s => s.querySelectorAll("path,use,image,text").length),
    overflow: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    fetched: seen.performance.getEntriesByType("resource").map(r => r.name),
    paper: seen.getComputedStyle(page.body).backgroundColor,
  }});
}};
</script>"""


def visit(page: str, width: int, folder: Path, *options: str) -> tuple[dict, str]:
    """What the harness measured, and what the browser said on its console."""
    browser = next(found for name in BROWSERS if (found := shutil.which(name)))
    path = folder / "harness.html"
    path.write_text(HARNESS.format(width=width, page=escape(page)), encoding="utf-8")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 500)},2000",
        "--virtual-time-budget=5000", *options, "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None
    assert found[1], done.stderr
    return json.loads(unescape(found[1])), done.stderr


@pytest.mark.parametrize(
    ("width", "dark", "paper"),
    [(390, True, "rgb(20, 23, 26)"), (1280, False, "rgb(255, 255, 255)")],
)
def test_every_picture_is_shown_and_nothing_else_happens(
    width: int, dark: bool, paper: str, full: RunRecord, make_runs: MakeRuns, tmp_path: Path
) -> None:
    runs = [full, *make_runs({"base": 0.0, "primum": 2.0}, name="another")]
    options = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    seen, console = visit(render(runs), width, tmp_path, *options)
    assert len(seen["pictures"]) == 17
    assert all(w > 250 and h > 60 for w, h in seen["pictures"])
    assert all(count > 2 for count in seen["drawn"])
    assert seen["images"]
    assert all(size > 10 for size in seen["images"])
    assert seen["overflow"] == 0
    assert [name for name in seen["fetched"] if not name.startswith("data:")] == []
    assert "CONSOLE" not in console
    assert seen["paper"] == paper
