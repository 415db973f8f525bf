"""Whole-network measurements: the same as calling the diagnostics by hand; nothing is changed."""

from __future__ import annotations

import base64
import copy
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from lab.checkpoints import load_checkpoint
from lab.epochs import Batch
from lab.errors import UserError
from lab.images import Batches, load_data
from lab.looks import Looks, look, most_protected, png
from lab.models import build_model
from lab.settings import LookSettings, RunSettings
from lab.trainer import Trainer
from laboratory.conftest import tiny
from primum import diagnostics
from primum.diagnostics import InterferenceMeter

LOOK = LookSettings(every=2, lr_factors=(0.5, 1.0))
SETTINGS = tiny(
    train_size=40, test_size=20, steps=5, schedule="constant", observe_every=1, look=LOOK
)
DATA = load_data(SETTINGS.data_settings())
Scene = tuple[nn.Module, torch.optim.Optimizer, Batch, Batch]


@pytest.fixture
def scene() -> Scene:
    """A model that has taken a step, a batch and test images."""
    model = build_model("cnn-small", 4, 8, seed=0).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first, batch, *_ = Batches(DATA.train, DATA, batch_size=8).epoch(0)
    F.cross_entropy(model(first.inputs), first.targets).backward()
    optimizer.step()
    unseen = next(Batches(DATA.test, DATA, batch_size=20, shuffle=False).epoch(0))
    return model, optimizer, batch, unseen


def looked(scene: Scene) -> dict[str, Any]:
    return look(*scene, radius=0.2, lr_factors=(0.25, 1.0))


def test_agrees_with_the_diagnostics_and_goes_into_json(scene: Scene) -> None:
    model, optimizer, batch, _ = scene
    found = json.loads(json.dumps(looked(scene)))
    probe = diagnostics.Probe(model, optimizer, nn.CrossEntropyLoss(), batch.inputs, batch.targets)
    comparison = diagnostics.compare(probe, radius=0.2)
    depth = diagnostics.by_depth(comparison.interference)
    assert found["layers"] == list(depth.layers)
    assert found["error"] == pytest.approx(depth.error.tolist(), abs=1e-5)
    assert found["table"]["reor"] == pytest.approx(comparison.table()["reor"], abs=1e-4)
    assert found["changes"]["head"] == pytest.approx(
        comparison.real["head"].predicted.tolist(), rel=1e-3, abs=1e-5
    )
    assert found["by_lr"]["factor"] == [0.25, 1.0]
    assert found["by_lr"]["sign_right"][1] == float(comparison.real["plain"].sign_right)
    assert found["by_lr"]["correlation"][0] >= found["by_lr"]["correlation"][1] - 1e-3


def test_mean_changes_are_those_of_a_real_step(scene: Scene) -> None:
    model, optimizer, batch, unseen = scene
    table = looked(scene)["table"]
    twin, step = copy.deepcopy((model, optimizer))

    def losses() -> list[float]:
        with torch.no_grad():
            return [float(F.cross_entropy(twin(b.inputs), b.targets)) for b in (batch, unseen)]

    before = losses()
    step.zero_grad()
    F.cross_entropy(twin(batch.inputs), batch.targets).backward()
    step.step()
    changes = [after - first for after, first in zip(losses(), before, strict=True)]
    plain = table["weights"].index("plain")
    found = [table[name][plain] for name in ("mean_change", "test_change")]
    assert found == pytest.approx(changes, abs=1e-5)  # float32 losses of about 1.4


def test_nothing_is_disturbed(scene: Scene) -> None:
    model, optimizer, *_ = scene
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    random = torch.get_rng_state()
    looked(scene)
    now = (model.state_dict(), optimizer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(state[0].values(), now[0].values(), strict=True))
    assert state[1]["param_groups"] == now[1]["param_groups"]
    assert torch.equal(torch.get_rng_state(), random)


def inspected(settings: RunSettings = SETTINGS, steps: int = 99) -> tuple[Trainer, Looks]:
    looks = Looks()
    trainer = Trainer(settings, DATA, [looks])
    while not trainer.finished and trainer.step_count < steps:
        trainer.step()
    return trainer, looks


def test_measures_before_the_first_step_regularly_and_at_the_end() -> None:
    trainer, looks = inspected()
    assert [moment["step"] for moment in looks.moments] == [0, 2, 4, 5]
    found = looks.fields(trainer)
    assert found["steps"]["step"] == list(range(5))
    assert len(found["steps"]["loss"]) == 5
    assert found["curves"]["epoch"] == [0.0, 0.4, 0.8, 1.0]
    assert found["final"]["test_accuracy"] == found["curves"]["test_accuracy"][-1]
    assert not any(found["steps"]["applied"])
    plain = Trainer(tiny(train_size=40, test_size=20, steps=5, schedule="constant"), DATA)
    while not plain.finished:
        plain.step()
    for mine, other in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)  # measuring does not change training


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("arm", ["base", "primum"])
def test_resumed_between_any_two_steps(arm: str, steps: int) -> None:
    settings = tiny(arm, train_size=40, test_size=20, steps=5, observe_every=1,
                    look=LookSettings(every=3, batches=2, lr_factors=(1.0,)))  # fmt: skip
    whole, looks = inspected(settings)
    cut, _ = inspected(settings, steps)
    file = io.BytesIO()
    torch.save(cut.state_dict(), file)
    file.seek(0)
    again = Looks()
    taken = Trainer(settings, DATA, [again])
    taken.load_state_dict(torch.load(file, weights_only=True))
    while not taken.finished:
        taken.step()
    assert repr(again.fields(taken)) == repr(looks.fields(whole))
    if arm == "primum":
        found = again.fields(taken)
        assert all(found["steps"]["applied"])
        assert found["protected"][0]["extra_weight"] > 0


def test_what_cannot_be_measured() -> None:
    with pytest.raises(UserError, match="--norm group"):
        inspected(tiny(norm="batch", train_size=40, look=LOOK, observe_every=1))


def shown(text: str) -> torch.Tensor:
    """The image in a base64 PNG; [3, H, W]."""
    image = Image.open(io.BytesIO(base64.b64decode(text)))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_most_protected_samples_are_ranked() -> None:
    trainer, looks = inspected(tiny("primum", train_size=40, steps=5, look=LOOK))
    meter = looks._meter_of(trainer)
    found = most_protected(meter, DATA, count=3)
    weights = sorted(meter.samples()["extra_weight"], reverse=True)[:3]
    assert [row["extra_weight"] for row in found] == [round(w, 4) for w in weights]
    first = found[0]
    assert first["label"] == DATA.class_names[int(DATA.train.labels[first["id"]])]
    assert first["harmed"] <= first["seen"] == 1
    assert torch.equal(shown(first["png"]), DATA.train.images[first["id"]])
    assert most_protected(InterferenceMeter(num_samples=40), DATA) == []


def test_png_of_floats_spans_all_grey_levels() -> None:
    image = shown(png(torch.linspace(-1, 1, 16).view(1, 4, 4)))
    assert (int(image.min()), int(image.max())) == (0, 255)


def made(width: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = made()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_checkpoints_with_and_without_an_optimizer(tmp_path: Path) -> None:
    first, optimizer = trained()
    states = {"model": first.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    for content, found, states_left in (
        (states, (7, True), 4),
        (states["model"], (None, False), 0),
    ):
        torch.save(content, tmp_path / "x.pt")
        model, other = trained()
        assert load_checkpoint(tmp_path / "x.pt", model, other) == found
        assert torch.equal(model[0].weight, first[0].weight)  # type: ignore[index]
        assert len(other.state) == states_left


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (made(4)[0].state_dict(), "does not match the model: size mismatch"),
        ({"model": {"other.weight": torch.ones(2)}}, "does not match the model"),
        ({"model": "words"}, "does not match the model"),
        ([1, 2], "holds a list"),
        ({"model": made()[0].state_dict(), "optimizer": {"state": {}}}, "optimizer does not match"),
        (b"not a checkpoint", "cannot be read"),
        (None, "does not exist"),
    ],
)
def test_bad_checkpoints_are_named(content: Any, message: str, tmp_path: Path) -> None:
    if isinstance(content, bytes):
        (tmp_path / "x.pt").write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / "x.pt")
    with pytest.raises(UserError, match=message) as caught:
        load_checkpoint(tmp_path / "x.pt", *made())
    assert "x.pt" in str(caught.value)
