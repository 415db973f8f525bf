"""The meter: what it collects, that it waits for nobody, what it exports, how it resumes."""

import gc
import json
import weakref
from dataclasses import replace

import pandas as pd
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn, optim
from torch.nn.functional import cross_entropy

import primum
from diagnostics.test_record import NAN, SYNCS, Count, made
from primum.diagnostics import InterferenceMeter
from primum.diagnostics.meter import AT_ONCE
from primum.diagnostics.record import FIGURES

COLUMNS = ["step", "batch_size", "applied", *FIGURES, "gap"]


def training(steps=5, recipe="primum", make=primum.attach, rows=(16,)):
    """Yields the reducer, the optimizer and the batch's ids after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reducer = make(model, optimizer, recipe=recipe)
    data, labels = torch.randn(40, 6), torch.randint(4, (40,))
    for number in range(steps):
        ids = torch.randperm(40)[: rows[number % len(rows)]]
        optimizer.zero_grad()
        cross_entropy(model(data[ids]), labels[ids]).backward()
        optimizer.step()
        yield reducer, optimizer, ids


def collected(steps=5, **options):
    meter, seen = InterferenceMeter(num_samples=40), []
    for reducer, _, ids in training(steps, **options):
        meter.update(reducer.last, ids)
        seen.append((reducer.last, ids))
    return meter, seen


# --- what it collects -----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["primum", "paper"])
@pytest.mark.parametrize("make", [primum.attach, primum.observe])
def test_the_table_has_the_reports_own_figures(recipe, make):
    meter, seen = collected(recipe=recipe, make=make, rows=(16, 16, 7))
    table = meter.table()
    assert list(table) == COLUMNS
    assert table["step"] == [0, 1, 2, 3, 4]
    assert table["batch_size"] == [16, 16, 7, 16, 16]
    assert table["applied"] == [make is primum.attach] * 5
    for number, (report, _) in enumerate(seen):
        for name, value in report.as_dict().items():
            assert table[name][number] == pytest.approx(value, rel=1e-6, nan_ok=True)
    frame = pd.DataFrame(table)
    assert len(frame) == meter.steps == 5
    assert (frame.harm_after <= frame.harm_before).all()


def test_totals_of_each_sample():
    meter, seen = collected(steps=20)
    expected = {i: [0, 0, 0, 0.0] for i in range(40)}
    for report, ids in seen:
        for row, i in enumerate(ids.tolist()):
            expected[i][0] += 1
            expected[i][1] += bool(report.drift[row] > 0)
            expected[i][2] += bool(report.drift_after[row] > 0)
            expected[i][3] += float(report.extra_weights[row])
    frame = pd.DataFrame(meter.samples()).set_index("id")
    assert list(frame.columns) == ["seen", "harmed_before", "harmed_after", "extra_weight"]
    assert frame.seen.sum() == 20 * 16
    assert frame.extra_weight.sum() > 0
    for i, (times, before, after, weight) in expected.items():
        assert tuple(frame.loc[i][:3]) == (times, before, after)
        assert frame.extra_weight[i] == pytest.approx(weight, rel=1e-5)


def test_a_sample_that_is_twice_in_a_batch_counts_twice():
    meter = InterferenceMeter(num_samples=3)
    report = made([1.0, 2.0, -1.0], [-1.0, 1.0, -1.0], [1.0, 2.0, 0.0])
    meter.update(report, ids=torch.tensor([1, 1, 2]))
    assert meter.samples() == {
        "id": [0, 1, 2],
        "seen": [0, 2, 1],
        "harmed_before": [0, 2, 0],
        "harmed_after": [0, 1, 0],
        "extra_weight": [0.0, 3.0, 0.0],
    }


def test_steps_may_be_numbered():
    meter = InterferenceMeter()
    for step in (None, 10, None, 40):
        meter.update(made([1.0], [0.0], [1.0]), step=step)
    assert meter.table()["step"] == [0, 10, 11, 40]


def test_nothing_yet():
    meter = InterferenceMeter(num_samples=2)
    meter.update(None)
    assert meter.steps == 0
    assert all(column == [] for column in meter.table().values())
    assert meter.samples()["seen"] == [0, 0]


def test_many_steps():
    meter = InterferenceMeter()
    for number in range(300):
        meter.update(made([float(number)], [0.0], [0.5]))
    assert meter.table()["harm_before"] == [float(n) for n in range(300)]


def test_float64_after_float32_keeps_its_digits():
    meter = InterferenceMeter()
    meter.update(made([0.1], [0.0], [0.5]))
    exact = made([0.1], [0.0], [0.5])
    wide = exact.extra_weights.double(), exact.objective.double()
    solution = primum.Solution(*wide, exact.lower_bound, exact.drift_after)
    drift = torch.tensor([0.1], dtype=torch.float64)
    meter.update(replace(exact, solution=solution, drift=drift))
    assert meter.table()["harm_before"] == [pytest.approx(0.1, rel=1e-6), 0.1]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 1], "one entry per sample"),
        ([0, 1, 3], "between 0 and 2, got 0 to 3"),
        ([-1, 0, 1], "got -1 to 1"),
    ],
)
def test_wrong_ids_are_refused_and_nothing_is_noted(ids, message):
    meter = InterferenceMeter(num_samples=3)
    with pytest.raises(ValueError, match=message):
        meter.update(made([1.0] * 3, [0.0] * 3, [0.0] * 3), ids=torch.tensor(ids))
    assert meter.steps == 0
    assert meter.samples()["seen"] == [0, 0, 0]


def test_construction_errors():
    with pytest.raises(ValueError, match="num_samples must be >= 1, got 0"):
        InterferenceMeter(num_samples=0)
    with pytest.raises(ValueError, match=r"samples\(\) needs a meter made by Interf"):
        InterferenceMeter().samples()
    with pytest.raises(ValueError, match=r"ids= needs a meter made by Interf"):
        InterferenceMeter().update(made([1.0], [0.0], [0.0]), ids=torch.tensor([0]))


def test_over_several_ranks_ids_are_of_this_ranks_samples():
    report = replace(made([1.0, -1.0, 2.0], [0.5, -1.0, -1.0], [0.1, 0.2, 0.3]), own=slice(1, 3))
    meter = InterferenceMeter(num_samples=4)
    meter.update(report, ids=torch.tensor([3, 0]))
    assert meter.samples()["seen"] == [1, 0, 0, 1]
    assert meter.samples()["harmed_before"] == [1, 0, 0, 0]
    assert meter.samples()["extra_weight"] == pytest.approx([0.3, 0, 0, 0.2])
    assert meter.table()["batch_size"] == [3]  # figures are of the global batch
    with pytest.raises(ValueError, match=r"one entry per sample, shape \[2\], got \[3\]"):
        meter.update(report, ids=torch.tensor([0, 1, 2]))


# --- taking part by itself ------------------------------------------------------------------------


def test_following_is_updating_after_each_step():
    by_hand, itself = InterferenceMeter(), None
    for reducer, _, _ in training(6):
        if itself is None:
            itself = InterferenceMeter(reducer)  # after the first step
        else:
            by_hand.update(reducer.last)
    assert itself.steps == by_hand.steps == 5
    assert itself.table() == by_hand.table()


def test_a_step_without_a_new_report_counts_once():
    meter = None
    for reducer, optimizer, _ in training(3):
        meter = meter or InterferenceMeter(reducer)
        optimizer.step()
        optimizer.step()
    assert meter.steps == 3
    meter.remove()
    meter.remove()
    optimizer.step()
    assert meter.steps == 3


def test_a_meter_that_was_removed_can_go():
    for reducer, _, _ in training(2):
        meter = InterferenceMeter(reducer)
        meter.remove()
        gone = weakref.ref(meter)
        del meter
        gc.collect()
        assert gone() is None


def test_training_is_the_same_bit_for_bit():
    def weights(follow):
        meter = None
        for reducer, _, _ in training(4):
            if follow and meter is None:
                meter = InterferenceMeter(reducer)
        return [p.clone() for group in reducer.optimizer.param_groups for p in group["params"]]

    for one, other in zip(weights(True), weights(False), strict=True):
        assert torch.equal(one, other)


# --- cost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_ids", [False, True])
def test_no_wait_in_any_step(with_ids):
    meter, names = InterferenceMeter(num_samples=40), []
    for reducer, _, ids in training(2 * AT_ONCE):
        with Count() as count:
            meter.update(reducer.last, ids if with_ids else None)
        names += count.names
    assert not SYNCS & set(names)
    assert 0 < len(names) <= 2 * AT_ONCE * (12 if with_ids else 9)


@pytest.mark.cuda
def test_no_wait_on_a_real_gpu():
    """The driver's own word for it: it raises on anything that waits."""
    model = nn.Linear(6, 4).cuda()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    reducer, meter = primum.attach(model, optimizer), InterferenceMeter(num_samples=40)
    for _ in range(2 * AT_ONCE):
        cross_entropy(model(torch.randn(8, 6).cuda()), torch.randint(4, (8,)).cuda()).backward()
        ids = torch.randint(40, (8,)).cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            meter.update(reducer.last, ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
    assert len(meter.table()["step"]) == 2 * AT_ONCE


def test_a_meter_keeps_few_reports():
    meter, references = InterferenceMeter(), []
    for reducer, _, _ in training(AT_ONCE + 3):
        meter.update(reducer.last)
        references.append(weakref.ref(reducer.last))
        reducer._recent.reports.clear()  # what the reducer keeps for its own summary
    assert [r() is not None for r in references] == [False] * AT_ONCE + [True] * 3
    meter.table()
    assert [r() is not None for r in references] == [False] * (AT_ONCE + 2) + [True]


def test_ids_may_be_overwritten_by_the_next_batch():
    meter, ids = InterferenceMeter(num_samples=3), torch.tensor([0, 1])
    meter.update(made([1.0, 1.0], [0.0, 0.0], [0.0, 0.0]), ids)
    ids += 1
    meter.update(made([1.0, 1.0], [0.0, 0.0], [0.0, 0.0]), ids)
    assert meter.samples()["seen"] == [1, 2, 1]


# --- exports --------------------------------------------------------------------------------------


def test_json_there_and_back(tmp_path):
    meter, _ = collected(recipe="paper")  # whose lower bound is NaN
    meter.update(made([NAN, NAN], [NAN, NAN], [0.0, 0.0]))
    path = tmp_path / "meter.json"
    meter.to_json(path)
    content = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert content["steps"]["lower_bound"] == [None] * 5 + [0.5]
    again = InterferenceMeter.from_json(path)
    assert again.samples() == meter.samples()
    assert again.num_samples == 40
    for name, column in meter.table().items():
        assert again.table()[name] == pytest.approx(column, nan_ok=True, rel=0, abs=0)
    again.update(made([1.0], [0.0], [0.5]))  # and on
    assert again.table()["step"][-1] == 6


def test_json_without_samples(tmp_path):
    meter = InterferenceMeter()
    meter.to_json(tmp_path / "empty.json")
    again = InterferenceMeter.from_json(tmp_path / "empty.json")
    assert again.steps == 0
    assert again.num_samples is None


def test_tensorboard(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    meter, seen = collected()
    with SummaryWriter(tmp_path) as writer:
        meter.to_tensorboard(writer)
        meter.update(made([NAN], [NAN], [0.25]), step=9)
        meter.to_tensorboard(writer)  # the new step alone
        meter.to_tensorboard(writer)  # nothing
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {f"primum/{name}" for name in (*FIGURES, "gap")}
    harm = events.Scalars("primum/harm_before")
    assert [e.step for e in harm] == [0, 1, 2, 3, 4]  # the last is not a number
    assert [e.value for e in harm] == pytest.approx([float(r.harm_before) for r, _ in seen])
    assert [e.step for e in events.Scalars("primum/mean_extra_weight")] == [0, 1, 2, 3, 4, 9]


class Spy:
    def __init__(self):
        self.tags = []

    def add_scalar(self, tag, scalar_value, global_step):
        assert type(scalar_value) is float
        self.tags.append((tag, global_step))


def test_any_writer_and_prefix():
    meter, spy = InterferenceMeter(), Spy()
    meter.update(made([1.0], [0.0], [0.5]), step=7)
    meter.to_tensorboard(spy, prefix="run/1")
    assert ("run/1/gap", 7) in spy.tags
    assert len(spy.tags) == len(FIGURES) + 1


# --- resuming -------------------------------------------------------------------------------------


def test_resuming_is_never_having_stopped(tmp_path):
    whole, seen = collected(steps=8)
    first = InterferenceMeter(num_samples=40)
    for report, ids in seen[:4]:
        first.update(report, ids)
    first.to_tensorboard(Spy())
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = InterferenceMeter(num_samples=40)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for report, ids in seen[4:]:
        second.update(report, ids)
    assert second.table() == whole.table()
    assert second.samples() == whole.samples()
    assert first.steps == 4
    spy = Spy()
    second.to_tensorboard(spy)
    assert {step for _, step in spy.tags} == {4, 5, 6, 7}


def test_states_that_do_not_fit():
    meter, _ = collected(steps=2)
    state = meter.state_dict()
    with pytest.raises(ValueError, match="totals for 40 samples, but the meter has num_samples=7"):
        InterferenceMeter(num_samples=7).load_state_dict(state)
    with pytest.raises(ValueError, match="this state has columns"):
        InterferenceMeter(num_samples=40).load_state_dict(state | {"columns": ["harm"]})
    with pytest.raises(ValueError, match="'totals'"):
        InterferenceMeter().load_state_dict({k: v for k, v in state.items() if k != "totals"})
