"""Plot of the loss change of each sample in one batch, under two steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from primum.diagnostics.figures.style import INK, NAMED, canvas, styled


@styled
def one_batch(
    before: Sequence[float],
    after: Sequence[float],
    *,
    labels: tuple[str, str] = ("plain step", "with weights"),
    change: str = "first-order loss change",
) -> Figure:
    """Plot each sample's loss change under two steps, sorted by the first; above 0 is harmed.

    Args:
        before: `StepReport.drift`, `FirstOrder.drift` or `RealStep.change`. [B].
        after: The same for another step, in the same order. [B].
        labels: Names of the two steps.
        change: Label of the y-axis.
    """
    if len(before) != len(after):
        raise ValueError(
            f"before and after must have the same length, got {len(before)} and {len(after)}"
        )
    figure, axes = canvas()
    first, second = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    order = np.argsort(first, kind="stable")
    first, second = first[order], second[order]
    samples = np.arange(1, len(order) + 1)
    size = 4.0 if len(order) <= 128 else 2.5
    plain, weighted = NAMED["plain"], NAMED["head"]
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.vlines(samples, first, second, color=INK, linewidth=0.8, alpha=0.35)
    for values, look, label, scale in (
        (first, plain, labels[0], 1.0),
        (second, weighted, labels[1], 0.75),
    ):
        axes.plot(
            samples,
            values,
            look.marker,
            color=look.colour,
            markersize=scale * size,
            label=f"{label}: {100 * np.mean(values > 0):.0f}% harmed",
        )
    axes.set_xlabel("samples of the batch, sorted")
    axes.set_ylabel(change)
    axes.legend()
    return figure
