"""Measure what a step does to each sample: per layer, in the whole network, and as observed.

    from primum import diagnostics
    probe = diagnostics.Probe(model, optimizer, loss, inputs, targets)
    diagnostics.compare(probe).table()

Data flows down, imports never point up:

    probe.py         a model about to take a step on a batch
    gradients.py     per-sample losses and gradients, a few samples at a time
    layers.py        the layers in the order in which they run
    interference.py  Gram matrices and drift by layer; the drift under any weights
    depth.py         how well the last layers approximate all layers (paper, Figure 1 top)
    head.py          what `attach` would capture at the head
    weights.py       weightings of a batch, and REOR (paper, Figure 1 bottom)
    real.py          losses before and after a real step, on copies
    shift.py         the part of a step that moves the logits of all samples alike
    compare.py       all weightings of a batch, side by side
    self_check.py    gradients and prediction of the head against slow references
    diagnose.py      whether primum is likely to help: `primum.diagnose`
    record.py        the metrics kept for each step
    meter.py         metrics over a training run, totals per sample
    figures/         plots of all of these (needs matplotlib)
"""

from primum.diagnostics.compare import Comparison, compare
from primum.diagnostics.depth import Depth, by_depth
from primum.diagnostics.gradients import per_sample_gradients
from primum.diagnostics.interference import FirstOrder, Interference, first_order, measure
from primum.diagnostics.meter import InterferenceMeter
from primum.diagnostics.probe import Probe
from primum.diagnostics.real import RealStep, real_steps
from primum.diagnostics.shift import common_shift
from primum.diagnostics.weights import reor, weightings

__all__ = [
    "Probe",
    "per_sample_gradients",
    "measure",
    "Interference",
    "by_depth",
    "Depth",
    "weightings",
    "reor",
    "first_order",
    "FirstOrder",
    "real_steps",
    "RealStep",
    "common_shift",
    "compare",
    "Comparison",
    "InterferenceMeter",
]
