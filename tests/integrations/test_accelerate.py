"""Accelerate needs no module of ours: `attach` looks through what `prepare` returns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.data import DataLoader

import primum
from integrations.plain import (
    BATCH,
    FIGURES,
    OPTIMIZERS,
    assert_equal,
    dataset,
    differs,
    network,
    trained,
)
from primum.integrations.logging import log_to


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Accelerators share their state within a process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def run(
    kind: str,
    settings: dict[str, Any] | None,
    accelerator: Accelerator | None = None,
    *,
    clip: float | None = None,
    unwrap: bool = False,
    log_every: int = 0,
) -> dict[str, Tensor]:
    accelerator = accelerator or Accelerator(cpu=True)
    model = network()
    model, optimizer, loader = accelerator.prepare(
        model, OPTIMIZERS[kind](model.parameters()), DataLoader(dataset(), batch_size=BATCH)
    )
    if settings is not None:
        attached = accelerator.unwrap_model(model) if unwrap else model
        reducer = primum.attach(attached, optimizer, scaler=accelerator.scaler, **settings)
        if log_every:
            log_to(reducer, lambda d: accelerator.log(d, step=d["primum/step"]), every=log_every)
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(inputs), labels))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    if settings is not None:
        assert reducer.last is not None
        assert reducer.last.applied
        assert reducer.last.fallbacks == 0
    return accelerator.unwrap_model(model).state_dict()


@pytest.mark.parametrize("unwrap", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_same_parameters_as_a_plain_loop(kind: str, unwrap: bool) -> None:
    found = run(kind, {}, unwrap=unwrap)
    assert_equal(found, trained(kind, {}))
    assert differs(found, trained(kind, None))


@pytest.mark.parametrize("clip", [None, 0.1])
def test_accumulate(clip: float | None) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    found = run("SGD", {}, accelerator, clip=clip)
    assert_equal(found, trained("SGD", {}, accumulate=2, clip=clip))


def test_radius_zero_is_plain_accelerate() -> None:
    assert_equal(run("AdamW", {"radius": 0}), run("AdamW", None))


def test_bf16() -> None:
    """The wrapped forward casts its output to float32; the problem is the head's all the same."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert differs(run("SGD", {}, accelerator), run("SGD", None, accelerator))


def test_state_in_accelerates_checkpoints(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = network()
    model, optimizer = accelerator.prepare(model, OPTIMIZERS["SGD"](model.parameters()))
    reducer = primum.attach(model, optimizer, recipe="paper")
    accelerator.register_for_checkpointing(reducer)
    inputs, labels = dataset().tensors
    accelerator.backward(F.cross_entropy(model(inputs), labels))
    optimizer.step()
    accelerator.save_state(str(tmp_path / "state"))
    saved = reducer.state_dict()
    reducer.load_state_dict(saved | {"recipe_state": {"calls": 0, "averages": {}}})
    accelerator.load_state(str(tmp_path / "state"))
    restored = reducer.state_dict()
    assert restored["recipe_state"]["calls"] == saved["recipe_state"]["calls"] == 1
    averages = restored["recipe_state"]["averages"]
    for name, value in saved["recipe_state"]["averages"].items():
        assert torch.equal(averages[name], value)


def test_scalars_reach_accelerates_tracker(tmp_path: Path) -> None:
    config = ProjectConfiguration(str(tmp_path), logging_dir=str(tmp_path))
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_config=config)
    accelerator.init_trackers("run")
    run("SGD", {}, accelerator, log_every=4)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    for name in FIGURES:
        assert [event.step for event in events.Scalars(name)] == [4, 8]
