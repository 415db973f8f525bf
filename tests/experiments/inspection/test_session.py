"""Train and look, load and look."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from primum.experiments.images import Batches, ImageData
from primum.experiments.inspection import InspectError, Inspection, InspectSettings
from primum.experiments.models import build_model


def test_looks_before_the_first_step_every_so_often_and_at_the_end(
    settings: InspectSettings, data: ImageData
) -> None:
    ticks: list[None] = []
    inspection = Inspection(settings, data, after_step=lambda: ticks.append(None))
    assert list(inspection.train()) == [0, 2, 4, 5]
    assert [moment.step for moment in inspection.moments] == [0, 2, 4, 5]
    assert len(ticks) == 5 + 4
    record = inspection.record()
    assert record.complete
    assert record.arm == "base"
    assert record.environment["threads"] == str(torch.get_num_threads())
    assert record.steps["step"] == list(range(5))
    assert len(record.steps["loss"]) == 5
    assert record.curves["epoch"] == [0.0, 0.4, 0.8, 1.0]
    assert record.final["test_accuracy"] == record.curves["test_accuracy"][-1]
    assert not any(record.steps["applied"])


def test_looking_does_not_change_training(settings: InspectSettings, data: ImageData) -> None:
    """The parameters are those of a plain loop."""
    inspection = Inspection(settings, data)
    list(inspection.train())
    model = build_model("cnn-small", 4, 8, seed=0)
    optimizer = settings.make_optimizer(model)
    for batch in Batches(data.train, data, batch_size=8).epoch(0):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.images), batch.targets).backward()
        optimizer.step()
    for mine, plain in zip(inspection.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, plain)


def test_reduced_training_applies_its_weights(settings: InspectSettings, data: ImageData) -> None:
    inspection = Inspection(replace(settings, reduce=True), data)
    list(inspection.train())
    record = inspection.record()
    assert record.arm == "primum"
    assert record.settings == Inspection(settings, data).record().settings  # they are compared
    assert all(record.steps["applied"])
    assert record.protected
    assert record.protected[0]["extra_weight"] > 0


def test_several_batches_per_look(settings: InspectSettings, data: ImageData) -> None:
    inspection = Inspection(replace(settings, batches=2, train_steps=0), data)
    assert list(inspection.train()) == [0]
    first, second = inspection.moments
    assert first.loss != second.loss
    assert len(inspection.curves["epoch"]) == 1


def test_stopped_in_the_middle_what_is_there_can_be_taken(
    settings: InspectSettings, data: ImageData
) -> None:
    inspection = Inspection(settings, data)
    work = inspection.train()
    next(work), next(work)
    work.close()
    record = inspection.record()
    assert not record.complete
    assert len(record.moments) == 2
    assert len(record.steps["step"]) == 2


@pytest.mark.parametrize("change", [{}, {"reduce": True, "optimizer": "adamw"}])
@pytest.mark.parametrize("pieces", [0, 1, 4, 7, 9])
def test_taken_up_between_any_two_pieces(
    settings: InspectSettings, data: ImageData, pieces: int, change: dict[str, Any]
) -> None:
    """Within a look, after it, between steps, at the last look: bit for bit, but for seconds."""
    settings = replace(settings, batches=2, every=3, schedule="cosine", **change)
    whole, cut, taken = (Inspection(settings, data) for _ in range(3))
    assert list(whole.train()) == [0, 3, 5]
    for _ in range(pieces):
        cut.advance()
    file = io.BytesIO()
    torch.save(cut.state_dict(), file)
    file.seek(0)
    taken.load_state_dict(torch.load(file, weights_only=True))
    assert taken.seconds == cut.seconds
    assert list(taken.train()) == [0, 3, 5][len(cut.curves.get("step", [])) :]
    own, other = (repr(replace(each.record(), seconds=0.0)) for each in (taken, whole))
    assert own == other
    for mine, plain in zip(taken.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, plain)


def test_checkpoints(settings: InspectSettings, data: ImageData, tmp_path: Path) -> None:
    trained = Inspection(settings, data)
    list(trained.train())
    states = {"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}
    torch.save(states | {"step": 5}, tmp_path / "end.pt")
    torch.save(states["model"], tmp_path / "bare.pt")
    loaded = Inspection(replace(settings, train_steps=0), data)
    assert list(loaded.load([tmp_path / "end.pt", tmp_path / "bare.pt"])) == [1, 2]
    with_state, without = loaded.moments
    assert with_state.label == "end.pt"
    assert with_state.step == 5
    assert without.label == "bare.pt (new optimizer)"
    assert with_state.loss != pytest.approx(without.loss)  # each on batches of its own
    assert loaded.curves["test_loss"][0] == pytest.approx(trained.curves["test_loss"][-1])
    record = loaded.record()
    assert record.complete
    assert record.steps == {}
    half = Inspection(replace(settings, train_steps=0), data)
    next(half.load([tmp_path / "end.pt", tmp_path / "bare.pt"]))
    assert not half.record().complete


def test_what_cannot_be_inspected(settings: InspectSettings, data: ImageData) -> None:
    mixing = Inspection(replace(settings, norm="batch"), data)
    with pytest.raises(InspectError, match="--norm group"):
        next(mixing.train())
    with pytest.raises(InspectError, match="40 samples"):
        Inspection(replace(settings, batch_size=64), data)
