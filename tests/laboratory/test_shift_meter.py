"""The common shift of a run: measured on copies, at the planned steps, and nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lab.images import load_data
from lab.job import default_callbacks
from lab.settings import RunSettings
from lab.shift_meter import CommonShift
from lab.trainer import Trainer
from laboratory.conftest import tiny


def trainer_of(settings: RunSettings) -> Trainer:
    torch.manual_seed(0)
    return Trainer(settings, load_data(settings.data_settings()), default_callbacks(settings))


def finished(trainer: Trainer) -> Trainer:
    while not trainer.finished:
        trainer.step()
    return trainer


def shift_of(trainer: Trainer) -> CommonShift:
    (found,) = (each for each in trainer.callbacks if isinstance(each, CommonShift))
    return found


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_training_is_the_same_with_and_without(norm: Any) -> None:
    plain = finished(trainer_of(tiny(norm=norm)))
    measured = finished(trainer_of(tiny(norm=norm, shift_every=3)))
    assert not any(isinstance(each, CommonShift) for each in plain.callbacks)
    for name, value in plain.model.state_dict().items():  # running statistics too
        assert torch.equal(value, measured.model.state_dict()[name]), name
    # Of 8 steps the second, fifth and eighth.
    assert {len(column) for column in shift_of(measured).table.values()} == {3}


def test_against_a_step_measured_by_hand() -> None:
    trainer = trainer_of(tiny(shift_every=1, epochs=1))
    batch = trainer.coming
    old = copy.deepcopy(trainer.model)
    trainer.step()
    with torch.no_grad():
        before, after = old(batch.inputs), trainer.model(batch.inputs)
    mean = (after - before).mean(0)
    rows = [F.cross_entropy(z, batch.targets, reduction="none")
            for z in (before, after, before + mean)]  # fmt: skip
    found = {name: column[0] for name, column in shift_of(trainer).table.items()}
    assert found["real_change"] == pytest.approx(float((rows[1] - rows[0]).mean()))
    assert found["real_harm"] == pytest.approx(float((rows[1] - rows[0]).clamp_min(0).mean()))
    assert found["common_harm"] == pytest.approx(float((rows[2] - rows[0]).clamp_min(0).mean()))
    change = after - before - (after - before).mean(1, keepdim=True)
    share = change.mean(0).square().sum() / change.square().sum(1).mean()
    assert found["common_shift"] == pytest.approx(float(share), rel=1e-4)


def test_the_record_has_means_and_a_resumed_run_has_the_same() -> None:
    settings = tiny(shift_every=2)
    whole = finished(trainer_of(settings))
    fields = shift_of(whole).fields(whole)["final"]
    table = shift_of(whole).table
    assert fields == {name: pytest.approx(sum(v) / len(v)) for name, v in table.items()}
    first = trainer_of(settings)
    for _ in range(3):
        first.step()
    second = trainer_of(settings)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert shift_of(finished(second)).table == table
