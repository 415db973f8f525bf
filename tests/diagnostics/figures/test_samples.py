"""A grid of samples."""

import numpy as np
import pytest

from primum.diagnostics.figures import sample_grid, to_svg


def test_one_place_per_image_with_its_caption():
    images = [np.full((4, 4, 3), k, dtype=np.uint8) for k in range(7)]
    figure = sample_grid(images, [f"number {k}" for k in range(7)])
    assert len(figure.axes) == 12  # two rows of six
    shown = [axes for axes in figure.axes if axes.images]
    assert [int(axes.images[0].get_array()[0, 0, 0]) for axes in shown] == list(range(7))
    assert [axes.texts[0].get_text() for axes in shown] == [f"number {k}" for k in range(7)]


def test_images_go_into_the_page_itself():
    svg = to_svg(sample_grid([np.zeros((4, 4), dtype=np.uint8)], ["grey"]), "grid")
    assert svg.count("data:image/png;base64") == 1


@pytest.mark.parametrize(("images", "captions"), [([], []), ([np.zeros((2, 2))], [])])
def test_one_caption_per_image(images, captions):
    with pytest.raises(ValueError, match="caption"):
        sample_grid(images, captions)
