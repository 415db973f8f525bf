"""Learning curves: mean and 95% band over seeds, one line per arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from primum.diagnostics.figures.style import NAMED, canvas, looks, styled
from primum.experiments.arms import ARMS
from primum.experiments.runs import RunRecord
from primum.experiments.statistics import interval

COLOURS = {arm: NAMED[arm].colour for arm in ARMS}
DASHES = {arm: NAMED[arm].dashes for arm in ARMS}


AXES = {"epoch": "epoch", "step": "step", "seconds": "seconds of training"}


@styled
def curves(
    arms: Mapping[str, Sequence[RunRecord]], which: str, *, by: str = "epoch", title: str = ""
) -> Figure:
    """A column of the runs' `curves`: `test_loss`, `train_loss` or `test_accuracy`.

    Runs that are cut short end the line of their arm; rows without a figure are left out.

    Args:
        arms: Runs by arm.
        which: The column.
        by: `epoch`, `step`, or `seconds`, whose mean over the seeds is taken.
        title: Above.
    """
    figure, axes = canvas()
    for arm, look in looks(list(arms)).items():
        tables = [run.curves for run in arms[arm]]
        count = min(len(table[which]) for table in tables)
        rows = [
            place
            for place in range(count)
            if all(None not in (table[which][place], table[by][place]) for table in tables)
        ]
        places = np.array([np.mean([table[by][place] for table in tables]) for place in rows])
        scale = 100 if which == "test_accuracy" else 1
        bands = [interval([scale * table[which][place] for table in tables]) for place in rows]
        style: Any = {"color": look.colour, "marker": look.marker, "markevery": 0.2}
        axes.plot(places, [b.mean for b in bands], look.dashes, label=arm, **style)
        if len(tables) > 1:
            low, high = [b.low for b in bands], [b.high for b in bands]
            axes.fill_between(places, low, high, color=look.colour, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title)
    axes.set_xlabel(AXES[by])
    axes.set_ylabel(which.replace("_", " ") + (", %" if which == "test_accuracy" else ""))
    axes.legend()
    return figure
