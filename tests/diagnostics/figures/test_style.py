"""The common look, and SVG for inside a page."""

import re
from itertools import pairwise

import matplotlib
from matplotlib.colors import to_rgb

from primum.diagnostics.figures.style import INK, LOOKS, NAMED, canvas, looks, styled, to_svg


def test_looks_differ_in_colour_and_in_grey_print():
    assert len({look.colour for look in LOOKS}) == len(LOOKS)
    assert len({look.marker for look in LOOKS}) == len(LOOKS)
    assert len({(look.dashes, look.marker) for look in LOOKS}) == len(LOOKS)
    # No two neighbours share their line style: the first lines of a picture are told apart in grey.
    assert all(a.dashes != b.dashes for a, b in pairwise(LOOKS))


def test_lines_stand_out_from_white_and_from_dark_paper():
    for look in LOOKS:
        red, green, blue = to_rgb(look.colour)
        brightness = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        assert 0.15 < brightness < 0.75


def test_names_keep_their_looks_and_others_take_what_is_free():
    found = looks(["something", "base", "primum", "else"])
    assert list(found) == ["something", "base", "primum", "else"]
    assert found["base"] == NAMED["base"]
    assert len(set(found.values())) == 4
    many = looks(["base", "paper", *(str(n) for n in range(50))])  # more than there are
    assert len(many) == 52
    assert len(set(list(many.values())[:36])) == 36


def test_drawing_leaves_the_users_settings_alone():
    before = dict(matplotlib.rcParams)

    @styled
    def draw():
        assert matplotlib.rcParams["axes.edgecolor"] == INK
        return canvas()[0]

    draw()
    assert dict(matplotlib.rcParams) == before


def figure(title="a < b"):
    found, axes = canvas()
    axes.plot([0, 1], [0, 1], color=LOOKS[1].colour, label="line")
    axes.set_title(title)
    return found


def test_svg_is_for_inside_a_page():
    svg = to_svg(styled(figure)(), 'said "so" & more')
    opening = svg.split(">", 1)[0]
    assert svg.startswith('<svg role="img" aria-label="said &quot;so&quot; &amp; more"')
    assert "width=" not in opening
    assert "viewBox=" in opening
    assert "http" not in svg
    assert INK not in svg
    assert "currentColor" in svg
    assert f"var(--series-2, {LOOKS[1].colour.lower()})" in svg


def test_names_inside_are_the_pictures_own():
    drawn = styled(figure)()
    first, second = to_svg(drawn, "first"), to_svg(drawn, "second")
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for svg, own in zip((first, second), ids, strict=True):
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) <= own


def test_same_figure_same_svg():
    assert to_svg(styled(figure)(), "x") == to_svg(styled(figure)(), "x")
