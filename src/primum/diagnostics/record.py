"""Metrics of several steps, one row each, and increments to the per-sample totals.

Reports are processed together: a few device operations per step instead of thirty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from primum.kernel.report import StepReport

FIGURES = (
    "harm_before",
    "harm_after",
    "harmed_before",
    "harmed_after",
    "mean_extra_weight",
    "extra_weight_p50",
    "extra_weight_p90",
    "extra_weight_max",
    "objective",
    "lower_bound",
    "fallbacks",
    "discarded",
)
TOTALS = ("seen", "harmed_before", "harmed_after", "extra_weight")


def figures_of(reports: Sequence[StepReport]) -> Tensor:
    """Metrics of steps with the same batch size, on their device. [steps, len(FIGURES)].

    The same numbers as the report's properties, except the gap, which `gap_of` computes from
    objective, lower bound and harm.
    """
    before = torch.stack([report.drift for report in reports])
    after = torch.stack([report.drift_after for report in reports])
    drifts = torch.stack((before, after))
    weights = torch.stack([report.extra_weights for report in reports])
    harm = drifts.clamp_min(0).sum(2)
    counted = (before != 0).sum(1)  # rows with a loss, all if none has
    counted = torch.where(counted > 0, counted, before.shape[1])
    harmed = torch.where(harm.isnan(), harm, (drifts > 0).sum(2) / counted)
    ranked = weights.sort(1).values
    last = weights.shape[1] - 1
    columns = (
        *harm,
        *harmed,
        weights.sum(1) / counted,
        ranked[:, last // 2],
        ranked[:, (9 * last) // 10],
        ranked[:, last],
        torch.stack([report.objective for report in reports]),
        torch.stack([report.lower_bound for report in reports]),
        torch.stack([report.fallbacks for report in reports]).to(harm.dtype),
        torch.stack([report.discarded for report in reports]).to(harm.dtype),
    )
    return torch.stack(columns, 1)


def gap_of(columns: Mapping[str, Tensor]) -> Tensor:
    """Certified distance to the optimum, relative to the harm before. [steps]."""
    harm = columns["harm_before"]
    distance = (columns["objective"] - columns["lower_bound"]).clamp_min(0)
    return torch.where(harm == 0, 0.0, distance / harm)


def marks_of(reports: Sequence[StepReport]) -> Tensor:
    """Increments to each sample's totals, in the order of the steps. [samples, len(TOTALS)].

    Fallback steps do not count as seen. On several ranks: this rank's samples only.
    """
    before = torch.cat([_own(report, report.drift) for report in reports])
    after = torch.cat([_own(report, report.drift_after) for report in reports])
    weights = torch.cat([_own(report, report.extra_weights) for report in reports])
    marks = (before == before, before > 0, after > 0, weights)
    return torch.stack([mark.to(torch.float32) for mark in marks], 1)


def own_samples(report: StepReport) -> int:
    """Number of this rank's samples in the step."""
    return len(range(len(report.drift))[report.own])


def _own(report: StepReport, vector: Tensor) -> Tensor:
    return vector if own_samples(report) == len(vector) else vector[report.own]
