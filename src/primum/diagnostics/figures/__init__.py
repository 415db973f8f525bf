"""Plots of interference: pure functions from data to a matplotlib `Figure`.

    from primum.diagnostics import figures
    figure = figures.harmed_share({"my run": [meter.table()]})
    figure.savefig("harmed.png")
    svg = figures.to_svg(figure, "share of harmed samples by step")  # to embed in a web page

style.py      colours, dashes, markers; SVG for a web page
training.py   over training: share of harmed samples, the solver's gap, the weights
batch.py      one batch before and after, sorted
network.py    the whole network: error by depth, REOR, first-order accuracy
samples.py    a grid of samples

Colours are the colour-blind-safe Okabe-Ito palette; line styles and markers differ too, for
grayscale print. Needs matplotlib (`pip install matplotlib`).
"""

from primum.diagnostics.figures.batch import one_batch
from primum.diagnostics.figures.network import error_by_depth, first_order_truth, reor_by_weighting
from primum.diagnostics.figures.samples import sample_grid
from primum.diagnostics.figures.style import to_svg
from primum.diagnostics.figures.training import harmed_share, solver_gap, weight_bands

__all__ = [
    "harmed_share",
    "solver_gap",
    "weight_bands",
    "one_batch",
    "error_by_depth",
    "reor_by_weighting",
    "first_order_truth",
    "sample_grid",
    "to_svg",
]
