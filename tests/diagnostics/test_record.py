"""What is kept of a step: the report's own figures, in few operations, without waiting."""

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import primum
from primum import Solution, StepReport
from primum.diagnostics.record import FIGURES, figures_of, gap_of, marks_of

SYNCS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select"}
MOST_OPERATIONS = 10  # dispatched per step, where 32 are worked on together
NAN = float("nan")


class Count(TorchDispatchMode):
    """The names of dispatched operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def reports(recipe="primum", kind=optim.SGD, steps=3, rows=32):
    """Of real training."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    reducer = primum.attach(model, optimizer, recipe=recipe)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(torch.randn(rows, 6)), torch.randint(4, (rows,))).backward()
        yield reducer.last
        optimizer.step()


def made(drift, after, weights, objective=1.0, bound=0.5, fallbacks=0) -> StepReport:
    values = (weights, objective, bound, after)
    solution = Solution(*map(torch.tensor, values))
    counts = torch.tensor(fallbacks), torch.tensor(0)
    return StepReport(solution, torch.tensor(drift), *counts, weighted=True)


@pytest.mark.parametrize("recipe", ["primum", "paper"])
@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
def test_the_same_figures_as_the_report(recipe, kind):
    for report in reports(recipe, kind):
        row = dict(zip(FIGURES, figures_of([report])[0], strict=True))
        for name in set(FIGURES) - {f"extra_weight_{q}" for q in ("p50", "p90", "max")}:
            expected = torch.as_tensor(getattr(report, name), dtype=row[name].dtype)
            torch.testing.assert_close(row[name], expected, equal_nan=True)
        torch.testing.assert_close(gap_of(row), report.gap, equal_nan=True)
        assert row["extra_weight_max"] == report.extra_weights.max()
        assert row["extra_weight_p50"] == report.extra_weights.median()


def test_quantiles_are_weights_that_were_given():
    weights = [float(w) for w in range(11)]
    row = dict(
        zip(FIGURES, figures_of([made([1.0] * 11, [0.0] * 11, weights[::-1])])[0], strict=True)
    )
    assert (row["extra_weight_p50"], row["extra_weight_p90"], row["extra_weight_max"]) == (5, 9, 10)
    one = dict(zip(FIGURES, figures_of([made([1.0], [0.5], [2.0])])[0], strict=True))
    assert (one["extra_weight_p50"], one["extra_weight_p90"], one["extra_weight_max"]) == (2, 2, 2)


def test_rows_without_a_loss_do_not_count_and_unknown_stays_unknown():
    report = made([0.0, 1.0, -1.0], [NAN, NAN, NAN], [0.0, 0.0, 1.0])
    row = dict(zip(FIGURES, figures_of([report])[0], strict=True))
    assert row["harmed_before"] == report.harmed_before == 0.5
    assert row["mean_extra_weight"] == report.mean_extra_weight == 0.5
    assert row["harmed_after"].isnan()
    assert row["harm_after"].isnan()


def test_gap_is_zero_where_nothing_was_harmed():
    columns = {
        "harm_before": torch.tensor([2.0, 0.0, 2.0, 2.0]),
        "objective": torch.tensor([1.0, 0.0, 0.9, 1.0]),
        "lower_bound": torch.tensor([0.5, 0.0, 1.0, NAN]),
    }
    assert gap_of(columns)[:3].tolist() == [0.25, 0.0, 0.0]
    assert gap_of(columns)[3].isnan()


def test_marks_of_each_sample():
    report = made([1.0, -1.0, 0.0, 2.0], [-1.0, 1.0, 0.0, 1.0], [2.0, 0.0, 0.5, 1.0])
    assert marks_of([report]).tolist() == [
        [1, 1, 0, 2],
        [1, 0, 1, 0],
        [1, 0, 0, 0.5],
        [1, 1, 1, 1],
    ]
    unknown = made([NAN, NAN], [NAN, NAN], [0.0, 0.0])
    assert not marks_of([unknown]).any()


def test_several_at_once_are_each_alone():
    several = [*reports(steps=4)]
    together = figures_of(several)
    for row, report in zip(together, several, strict=True):
        torch.testing.assert_close(row, figures_of([report])[0])
    uneven = [*several, *reports(steps=1, rows=5)]
    expected = torch.cat([marks_of([report]) for report in uneven])
    assert torch.equal(marks_of(uneven), expected)


def test_few_operations_and_no_wait():
    several = [*reports(steps=32)]
    with Count() as count:
        figures_of(several)
        marks_of(several)
    assert not SYNCS & set(count.names)
    assert len(count.names) <= 32 * MOST_OPERATIONS, count.names
