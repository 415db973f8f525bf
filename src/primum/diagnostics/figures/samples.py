"""Plot of a grid of samples with captions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from primum.diagnostics.figures.style import canvas, styled


@styled
def sample_grid(
    images: Sequence[NDArray[np.uint8]], captions: Sequence[str], *, columns: int = 6
) -> Figure:
    """Plot a grid of images with captions, for example the samples most often protected.

    Shapes: images uint8 [H, W, 3] or [H, W] each.
    """
    if not images or len(images) != len(captions):
        raise ValueError(
            f"pass one caption per image, got {len(captions)} captions and {len(images)} images"
        )
    rows = -(-len(images) // columns)
    lines = max(caption.count("\n") for caption in captions) + 1
    figure = canvas(5.2, rows * (0.85 + 0.15 * lines))[0]
    figure.clear()
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, image, caption in zip(grid.flat, images, captions, strict=False):
        axes.imshow(image, cmap="gray" if image.ndim == 2 else None, interpolation="nearest")
        axes.text(
            0.5, -0.06, caption, transform=axes.transAxes, ha="center", va="top", fontsize=7.5
        )
    return figure
