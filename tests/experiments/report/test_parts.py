"""The parts of a page."""

from __future__ import annotations

from primum.experiments.report import parts

from .reader import check_alone_and_whole


def test_everything_is_escaped() -> None:
    nasty = '<b>"&'
    page = parts.document(
        nasty,
        parts.paragraph(nasty)
        + parts.bullets([nasty])
        + parts.table([nasty], [("", [nasty, f"{nasty} ± 1"])], label=nasty)
        + parts.definitions({nasty: nasty})
        + parts.commands([nasty]),
    )
    reader = check_alone_and_whole(page)
    assert "b" not in reader.tags
    assert reader.text.count(nasty) == 9


def test_intervals_can_go_below_their_means() -> None:
    html = parts.table(["", "x"], [("primum", ["arm", "1.0 ± 0.5"])])
    assert '1.0<span class="interval"> ± 0.5</span>' in html
    assert '<th scope="row">arm</th>' in html
    assert '<tr class="primum">' in html


def test_commands_once_each_and_nothing_for_nothing() -> None:
    assert parts.commands(["a", "b", "a", ""]).count("a\nb") == 1
    assert parts.commands([""]) == parts.bullets([]) == parts.pictures([]) == ""


def test_page_follows_the_readers_colours_and_width() -> None:
    page = parts.document("t", "")
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page
    assert '<html lang="en">' in page
