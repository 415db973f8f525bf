"""Figures of the steps in TensorBoard and in any `log(dict)`, without waiting in between."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.optim import SGD
from torch.utils.tensorboard import SummaryWriter

import primum
from integrations.plain import FIGURES, STEPS, network, train
from primum import Reducer, StepReport
from primum.integrations.logging import log_to


def attached() -> tuple[nn.Sequential, SGD, Reducer]:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, primum.attach(model, optimizer)


def test_any_callable_that_takes_a_dict() -> None:
    model, optimizer, reducer = attached()
    entries: list[dict[str, float]] = []
    log_to(reducer, entries.append, every=5)
    train(model, optimizer)
    assert [entry["primum/step"] for entry in entries] == [5, 10]
    assert all(entry.keys() == FIGURES | {"primum/step"} for entry in entries)
    assert reducer.last is not None
    last = {f"primum/{name}": value for name, value in reducer.last.as_dict().items()}
    assert entries[-1] == last | {"primum/step": 10}


def test_tensorboard(tmp_path: Path) -> None:
    model, optimizer, reducer = attached()
    with SummaryWriter(tmp_path) as writer:
        log_to(reducer, writer, every=4, first_step=100)
        train(model, optimizer)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == FIGURES
    for name in FIGURES:
        assert [event.step for event in events.Scalars(name)] == [104, 108]
    assert all(event.value > 0 for event in events.Scalars("primum/mean_extra_weight"))


def test_only_logged_steps_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`as_dict` waits for the device."""
    read: list[StepReport] = []

    def as_dict(report: StepReport) -> dict[str, float]:
        read.append(report)
        return {}

    monkeypatch.setattr(StepReport, "as_dict", as_dict)
    model, optimizer, reducer = attached()
    log_to(reducer, lambda _: None, every=3)
    train(model, optimizer)
    assert len(read) == STEPS // 3


def test_steps_count_and_not_micro_batches() -> None:
    model, optimizer, reducer = attached()
    entries: list[dict[str, float]] = []
    log_to(reducer, entries.append, every=1)
    train(model, optimizer, accumulate=2)
    assert [entry["primum/step"] for entry in entries] == [1, 2, 3, 4, 5]


def test_a_pause_is_not_logged() -> None:
    """The last report is still there, but it is of an earlier step."""
    model, optimizer, reducer = attached()
    entries: list[dict[str, float]] = []
    log_to(reducer, entries.append, every=4)
    train(model, optimizer)
    reducer.enabled = False
    train(model, optimizer)
    reducer.enabled = True
    train(model, optimizer)
    assert [entry["primum/step"] for entry in entries] == [4, 8, 24, 28]


def test_removed() -> None:
    model, optimizer, reducer = attached()
    hooks = len(optimizer._optimizer_step_post_hooks)
    entries: list[dict[str, float]] = []
    handle = log_to(reducer, entries.append, every=1)
    handle.remove()
    assert len(optimizer._optimizer_step_post_hooks) == hooks
    log_to(reducer, entries.append, every=1)
    reducer.remove()
    train(model, optimizer)
    assert not entries


def test_everything_dies_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        model, optimizer, reducer = attached()
        log_to(reducer, print, every=STEPS + 1)
        train(model, optimizer)
        refs = [weakref.ref(each) for each in (model, optimizer, reducer)]
        del model, optimizer, reducer
        assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()


def test_training_is_the_same() -> None:
    logged, optimizer, reducer = attached()
    log_to(reducer, lambda _: None, every=1)
    train(logged, optimizer)
    plain, optimizer, _ = attached()
    train(plain, optimizer)
    assert all(map(torch.equal, logged.parameters(), plain.parameters()))


def test_wrong_arguments() -> None:
    _, _, reducer = attached()
    with pytest.raises(ValueError, match="every must be >= 1, got 0"):
        log_to(reducer, print, every=0)
    with pytest.raises(TypeError, match="SummaryWriter with add_scalar; got str"):
        log_to(reducer, "runs")  # type: ignore[arg-type]
