"""One run, from start or checkpoint to its file."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing import active_children

import pytest
import torch

from lab.job import Place, train_run
from lab.runs import RunRecord, commit
from lab.settings import Matched
from lab.store import Store
from laboratory.conftest import numbers, tiny


class Cut(Exception):
    pass


def cut_at(step: int, place: Place, arm: str = "primum") -> None:
    def on_step(done: int, steps: int) -> None:
        if done == step:
            raise Cut

    with pytest.raises(Cut):
        train_run(tiny(arm), Matched(), replace(place, checkpoint_seconds=0), on_step)


def test_a_record_has_everything(place: Place) -> None:
    made = train_run(tiny("primum@radius=0.3", seed=1), Matched(), place)
    assert (made.arm, made.seed, made.complete) == ("primum@radius=0.3", 1, True)
    assert made.settings == tiny().shared()
    assert made.arm_settings["radius"] == 0.3
    assert made.arm_settings["key"] == tiny("primum@radius=0.3", seed=1).key
    assert made.command == "primum compare"
    assert made.environment == {"torch": "some version"}
    assert made.commit == commit()
    assert made.date.startswith("20")
    assert len(made.curves["test_accuracy"]) == len(made.steps["gap"]) == 2
    assert made.steps["applied"] == [True, True]
    assert made.final["test_accuracy"] == made.curves["test_accuracy"][-1]
    assert made.final["ms_per_step"] is not None
    assert made.final["ms_per_step"] > 0
    assert place.store.find(tiny("primum@radius=0.3", seed=1)) == made


def test_factors_of_a_matched_run_are_recorded(place: Place) -> None:
    lr = train_run(tiny("lr-matched"), Matched(lr_factors=(1.1,)), place)
    assert lr.arm_settings["lr_factors"] == [1.1]
    time = train_run(tiny("time-matched@time_factor=1.5"), Matched(steps_factor=1.5), place)
    assert time.arm_settings["steps_factor"] == 1.5
    assert time.final["step"] == 12


@pytest.mark.parametrize("arm", ["base", "primum", "paper", "permuted"])
def test_a_cut_run_ends_as_if_it_had_not_been(place: Place, arm: str) -> None:
    cut_at(3, place, arm)
    cut_at(6, place, arm)
    assert place.store.checkpoint_path(tiny(arm)).exists()
    begun: list[int] = []

    def on_step(done: int, steps: int) -> None:
        begun.append(done)

    taken = train_run(tiny(arm), Matched(), place, on_step)
    assert begun[0] == 5  # the step before the cut was saved
    whole = train_run(tiny(arm), Matched(), replace(place, store=Store(place.store.folder / "b")))
    assert numbers(taken) == numbers(whole)


def test_data_workers_change_no_number_and_end_with_the_run(place: Place) -> None:
    others = set(active_children())
    settings = tiny("primum", augment="convnext")
    whole = train_run(settings, Matched(), replace(place, store=Store(place.store.folder / "b")))

    def cut(done: int, steps: int) -> None:
        if done == 3:  # in the middle of an epoch
            assert set(active_children()) > others
            raise KeyboardInterrupt

    helped = replace(place, data_workers=2, checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        train_run(settings, Matched(), helped, cut)
    assert set(active_children()) <= others
    assert place.store.checkpoint_path(settings).exists()
    taken = train_run(settings, Matched(), replace(place, data_workers=1))
    assert set(active_children()) <= others
    assert numbers(taken) == numbers(whole)


def test_a_checkpoint_with_other_figures_taken_over_does_not_count(place: Place) -> None:
    cut_at(3, place, "lr-matched")
    begun: list[int] = []
    train_run(tiny("lr-matched"), Matched((1.2,)), place, lambda done, _: begun.append(done))
    assert begun[0] == 0


def test_random_numbers_and_threads_are_given_back(place: Place) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    train_run(tiny(), Matched(), replace(place, threads=2))
    assert torch.equal(torch.rand(2), expected)
    assert torch.get_num_threads() == 1


@pytest.mark.filterwarnings("ignore:primum:RuntimeWarning")
def test_a_run_that_diverges_is_a_result(place: Place) -> None:
    made: RunRecord = train_run(tiny("base", lr=1e30), Matched(), place)
    assert made.complete
    found = place.store.find(tiny("base", lr=1e30))
    assert found is not None
    assert found.final["test_loss"] is found.final["test_accuracy"] is None
    assert numbers(made) == numbers(found)  # the sweep's table and that of a later call are one
