"""One look: the same as asking the diagnostics by hand, and nothing is disturbed."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from primum import diagnostics
from primum.experiments.images import Batches, ImageData
from primum.experiments.images.batches import Batch
from primum.experiments.inspection import InspectSettings, Moment
from primum.experiments.inspection.moment import evaluate, look
from primum.experiments.models import build_model


@pytest.fixture
def scene(
    settings: InspectSettings, data: ImageData
) -> tuple[nn.Module, torch.optim.Optimizer, Batch, Batch]:
    """A model that has taken a step, a batch and test images."""
    model = build_model("cnn-small", 4, 8, seed=0).train()
    optimizer = settings.make_optimizer(model)
    first, batch, *_ = Batches(data.train, data, batch_size=8).epoch(0)
    F.cross_entropy(model(first.images), first.targets).backward()
    optimizer.step()
    unseen = next(Batches(data.test, data, batch_size=20, shuffle=False).epoch(0))
    return model, optimizer, batch, unseen


def looked(scene: tuple[nn.Module, torch.optim.Optimizer, Batch, Batch]) -> Moment:
    return look(*scene, step=1, label="step 1", radius=0.2, lr_factors=(0.25, 1.0))


def test_agrees_with_the_diagnostics(scene: tuple) -> None:
    model, optimizer, batch, _ = scene
    found = looked(scene)
    loss = nn.CrossEntropyLoss()
    probe = diagnostics.Probe(model, optimizer, loss, batch.images, batch.targets)
    comparison = diagnostics.compare(probe)
    depth = diagnostics.by_depth(comparison.interference)
    assert found.layers == depth.layers
    assert found.error == pytest.approx(depth.error.tolist(), abs=1e-5)
    assert found.table["reor"] == pytest.approx(comparison.table()["reor"], abs=1e-4)
    assert found.changes["head"] == pytest.approx(
        comparison.real["head"].predicted.tolist(), rel=1e-3, abs=1e-5
    )
    assert found.by_lr["factor"] == [0.25, 1.0]
    assert found.by_lr["sign_right"][1] == float(comparison.real["plain"].sign_right)


def test_smaller_steps_are_told_no_worse(scene: tuple) -> None:
    right = looked(scene).by_lr["correlation"]
    assert right[0] >= right[1] - 1e-3


def test_mean_changes_are_those_of_a_real_step(scene: tuple) -> None:
    """On copies: the plain step, and one with the same weight for all."""
    model, optimizer, batch, unseen = scene
    found = looked(scene)
    twin, step = copy.deepcopy((model, optimizer))

    def losses() -> list[float]:
        with torch.no_grad():
            return [float(F.cross_entropy(twin(b.images), b.targets)) for b in (batch, unseen)]

    before = losses()
    step.zero_grad()
    F.cross_entropy(twin(batch.images), batch.targets).backward()
    step.step()
    changes = [after - first for after, first in zip(losses(), before, strict=True)]
    plain = found.table["weights"].index("plain")
    told = [found.table[name][plain] for name in ("mean_change", "test_change")]
    assert told == pytest.approx(changes, abs=1e-5)  # float32 losses of about 1.4


def test_nothing_is_disturbed(scene: tuple) -> None:
    model, optimizer, *_ = scene
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    random = torch.get_rng_state()
    looked(scene)
    now = (model.state_dict(), optimizer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(state[0].values(), now[0].values(), strict=True))
    assert state[1]["param_groups"] == now[1]["param_groups"]
    assert torch.equal(torch.get_rng_state(), random)


def test_goes_into_json(scene: tuple) -> None:
    content = json.loads(json.dumps(looked(scene).as_dict()))
    assert content["label"] == "step 1"
    assert len(content["real_changes"]["plain"]) == 8


def test_evaluate_in_evaluation_mode(data: ImageData) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.9), nn.Linear(192, 4)).train()
    whole = next(Batches(data.test, data, batch_size=20, shuffle=False).epoch(0))
    parts = Batches(data.test, data, batch_size=6, shuffle=False, drop_last=False)
    loss, accuracy = evaluate(model, parts.epoch(0))
    assert model.training
    logits = model.eval()(whole.images).detach()
    assert loss == pytest.approx(float(F.cross_entropy(logits, whole.targets)), rel=1e-5)
    assert accuracy == int((logits.argmax(1) == whole.targets).sum()) / 20


def test_a_model_that_has_diverged_has_no_accuracy(data: ImageData) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    nn.init.constant_(model[1].weight, torch.nan)
    batches = Batches(data.test, data, batch_size=20, shuffle=False)
    assert all(math.isnan(value) for value in evaluate(model, batches.epoch(0)))
