"""What a step reports, against sums done by hand."""

import dataclasses

import pytest
import torch
from torch import Tensor

import primum
from loops import make, report_of, train
from primum import Solution, StepReport

NAN = float("nan")
FIGURES = {
    "harm_before": 5.0,
    "harm_after": 1.5,
    "harmed_before": 0.4,
    "harmed_after": 0.2,
    "mean_extra_weight": 0.6,
    "gap": 0.05,
    "fallbacks": 3.0,
    "discarded": 2.0,
    "applied": 1.0,
}


@pytest.fixture
def report() -> StepReport:
    return StepReport(
        Solution(
            extra_weights=torch.tensor([2.0, 0.0, 0.0, 1.0, 0.0, 0.0]),
            objective=torch.tensor(2.5),
            lower_bound=torch.tensor(2.25),
            drift_after=torch.tensor([1.5, -2.0, -0.5, 0.0, -1.0, 0.0]),
        ),
        drift=torch.tensor([4.0, -3.0, -0.5, 1.0, -1.0, 0.0]),  # the last row has no loss
        fallbacks=torch.tensor(3),
        discarded=torch.tensor(2),
        weighted=True,
    )


def test_figures(report: StepReport) -> None:
    """Harmed is whoever gets worse: no change is no harm."""
    figures = report.as_dict()
    assert figures == pytest.approx(FIGURES)
    assert all(type(value) is float for value in figures.values())
    for name, value in FIGURES.items():
        assert float(getattr(report, name)) == pytest.approx(value)


def test_tensors_until_asked(report: StepReport) -> None:
    for name in FIGURES.keys() - {"applied"}:
        value = getattr(report, name)
        assert isinstance(value, Tensor)
        assert value.shape == ()
    assert report.extra_weights.shape == report.drift.shape == (6,)


def test_frozen(report: StepReport) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.weighted = False
    assert report == report  # by identity: tensors do not compare
    assert len({report, dataclasses.replace(report)}) == 2


def test_gap_without_harm_and_with_rounding(report: StepReport) -> None:
    nothing = dataclasses.replace(report, drift=-report.drift.abs())
    assert nothing.gap == 0
    above = dataclasses.replace(report.solution, lower_bound=report.objective + 1e-6)
    rounded = dataclasses.replace(report, solution=above)
    assert rounded.gap == 0  # never negative


def test_a_step_that_was_not_finite_was_not_applied(report: StepReport) -> None:
    """The host did not know when it put the weights, which are zero then, into the gradients."""
    assert report.applied is True
    assert report.reason == ""
    infinite = dataclasses.replace(report.solution, objective=torch.tensor(float("inf")))
    report = dataclasses.replace(report, solution=infinite)
    assert report.applied is False
    assert report.reason == "the step's values were not finite"
    assert report.as_dict()["applied"] == 0


def test_why_a_step_was_not_weighed(report: StepReport) -> None:
    report = dataclasses.replace(report, weighted=False, why="of no use")
    assert report.applied is False
    assert report.reason == "of no use"
    assert report.as_dict()["applied"] == 0


def test_unknown_is_not_zero(report: StepReport) -> None:
    """A step that fell back says so; it does not claim that nobody was harmed."""
    unknown = torch.full((6,), NAN)
    nothing = Solution(torch.zeros(5), unknown[0], unknown[0], unknown)
    report = dataclasses.replace(report, drift=unknown, solution=nothing)
    figures = report.as_dict()
    for name in ("harm_before", "harm_after", "harmed_before", "harmed_after", "gap"):
        assert figures[name] != figures[name]
    assert figures["fallbacks"] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_real_steps(dtype: torch.dtype) -> None:
    model, optimizer = make(dtype=dtype)
    reducer = primum.attach(model, optimizer)
    for number in range(5):
        train(model, optimizer, 1, first=number)
        report = report_of(reducer)
        figures = report.as_dict()
        assert figures.keys() == FIGURES.keys()
        drift, after = report.drift.tolist(), report.drift_after.tolist()
        # Sums of 24 terms.
        close = 1e-5 if dtype is torch.float32 else 1e-12
        assert figures["harm_before"] == pytest.approx(sum(max(0, d) for d in drift), rel=close)
        assert figures["harm_after"] == pytest.approx(sum(max(0, d) for d in after), rel=close)
        assert figures["harmed_before"] == pytest.approx(sum(d > 0 for d in drift) / 24)
        assert figures["harmed_after"] == pytest.approx(sum(d > 0 for d in after) / 24)
        assert 0 < figures["harm_after"] < figures["harm_before"]
        assert 0 <= figures["gap"] < 0.2
        assert figures["applied"] == 1
        assert figures["fallbacks"] == 0
        assert report.lower_bound <= report.objective * (1 + close)


def test_observed_steps_were_not_applied() -> None:
    model, optimizer = make()
    watcher = primum.observe(model, optimizer)
    train(model, optimizer, 1)
    report = report_of(watcher)
    assert report.applied is False
    assert report.as_dict()["applied"] == 0
    assert report.reason == "observe"
    assert report.extra_weights.max() > 0.01


def test_an_old_report_is_not_changed_by_later_steps() -> None:
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    train(model, optimizer, 1)
    old = report_of(reducer)
    before = {k: v.clone() for k, v in vars(old).items() if isinstance(v, Tensor)}
    optimizer.param_groups[0]["params"] = []
    with pytest.warns(RuntimeWarning, match="no longer holds the head's weight"):
        train(model, optimizer, 2)
    for name, value in before.items():
        assert torch.equal(getattr(old, name), value)
    assert report_of(reducer).fallbacks == 2
