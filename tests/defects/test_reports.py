"""Reports, summaries, states and logs: small, true, and no error in the middle of a run."""

from __future__ import annotations

import gc
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum

from .scene import (
    assert_equal,
    batch,
    gradients,
    net,
    plain_gradients,
    report_of,
    sgd,
    train,
    warned,
)

PACKAGE = str(Path(primum.__file__).parent)


# --- what a reducer holds -------------------------------------------------------------------------


def held(root: object) -> int:
    """Bytes of all tensors that can be reached from an object, but for model and optimizer."""
    seen, storages, waiting = set(), {}, [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, types.FunctionType):
            waiting.extend(thing.__closure__ or ())
        elif not isinstance(thing, type | types.ModuleType | nn.Module | optim.Optimizer):
            waiting.extend(gc.get_referents(thing))
    return sum(storages.values())


def test_a_reducer_holds_a_few_numbers_per_sample() -> None:
    rows = 20_000
    model = net().float()
    optimizer = sgd(model)
    reducer = primum.attach(model, optimizer)
    train(model, optimizer, 20, rows=rows)
    assert report_of(reducer).extra_weights.shape == (rows,)
    assert held(reducer) <= 8 * rows * 4


# --- what it costs --------------------------------------------------------------------------------


class Counted(list[Any]):
    """Parameters of a group that count how often one of them is looked at."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.looks += 1
            yield each


def test_parameters_are_looked_up_at_most_once_per_step() -> None:
    """Of a model with a thousand tensors, in two backward passes of one step."""
    layers = [nn.Linear(6, 6, bias=False) for _ in range(20)]
    model = nn.Sequential(*layers, nn.Linear(6, 4))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    primum.attach(model, optimizer)
    params = Counted(optimizer.param_groups[0]["params"])
    optimizer.param_groups[0]["params"] = params
    for number in range(3):
        optimizer.zero_grad()
        losses = [
            F.cross_entropy(model(inputs.float()), labels)
            for inputs, labels in (batch(2 * number, 12), batch(2 * number + 1, 12))
        ]
        params.looks = 0
        for loss in losses:
            loss.backward()
        looks = params.looks
        optimizer.step()
    assert looks <= len(params)


def test_radius_zero_costs_next_to_nothing_while_nobody_reads_the_report() -> None:
    """Calls of Python functions in primum, by step."""
    model = net()
    optimizer = sgd(model)
    primum.attach(model, optimizer, radius=0)
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    train(model, optimizer, 4)
    before = sys.getprofile()
    torch.autograd.set_multithreading_enabled(False)  # hooks run in this thread, and are seen
    sys.setprofile(count)
    try:
        train(model, optimizer, 5, first=4)
    finally:
        sys.setprofile(before)
        torch.autograd.set_multithreading_enabled(True)
    assert calls <= 5 * 40, calls / 5


def test_radius_zero_still_reports_to_those_who_ask() -> None:
    """From the step after the first question on, what `observe` reports."""
    found = []
    for make, options in ((primum.attach, {"radius": 0}), (primum.observe, {})):
        model = net()
        optimizer = sgd(model)
        reducer = make(model, optimizer, **options)
        drifts = []
        for number in range(5):
            inputs, labels = batch(number, 24)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            last = reducer.last
            drifts.append(None if last is None else last.drift)
            optimizer.step()
        found.append(drifts)
    for one, other in zip(*(drifts[3:] for drifts in found), strict=True):
        assert one is not None
        assert torch.equal(one, other)


# --- batches of one sample and of none ------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"radius": 0}], ids=["default", "radius 0"])
def test_a_last_batch_of_one_sample_is_logged(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Under -W error, as everywhere in these tests."""
    model = net()
    optimizer = sgd(model)
    primum.attach(model, optimizer, **options)
    train(model, optimizer, 2)
    inputs, labels = batch(9, 1)
    expected = plain_gradients(model, lambda twin: F.cross_entropy(twin(inputs), labels))
    optimizer.zero_grad()
    with caplog.at_level(logging.DEBUG, logger="primum"):
        F.cross_entropy(model(inputs), labels).backward()
    assert_equal(gradients(model), expected)
    if not options:
        assert "one sample" in caplog.text
    optimizer.step()


def test_an_empty_batch_is_not_called_one_sample(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = sgd(model)
    primum.attach(model, optimizer)
    train(model, optimizer, 2)
    inputs, labels = batch(0, 0)
    with warned() as messages, caplog.at_level(logging.DEBUG, logger="primum"):
        F.cross_entropy(model(inputs), labels, reduction="sum").backward()
    assert "one sample" not in " ".join([*messages, caplog.text])


def test_radius_zero_is_not_said_to_reweight(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    primum.attach(model, sgd(model), radius=0)
    inputs, labels = batch(0, 6, 5)
    with caplog.at_level(logging.DEBUG, logger="primum"):
        F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).backward()
    assert "reweighting" not in caplog.text


# --- summaries and states -------------------------------------------------------------------------


def test_the_summary_tells_the_truth_after_remove() -> None:
    model = net()
    optimizer = sgd(model)
    reducer = primum.attach(model, optimizer)
    train(model, optimizer, 6)
    before = reducer.summary_text().splitlines()[1:]
    assert "harmed by a step" in before[0]
    reducer.remove()
    assert reducer.summary_text().splitlines()[1:] == before


ALIEN: dict[str, Any] = {
    "fallbacks": "many",
    "factors": "half",
    "recipe_state": 3,
    "per": "pixel",
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("key", ALIEN)
def test_a_state_of_alien_values_is_one_error_and_changes_nothing(key: str) -> None:
    model = net()
    optimizer = sgd(model)
    reducer = primum.attach(model, optimizer)
    train(model, optimizer, 3)
    before = reducer.state_dict()
    other = before | {"fallbacks": torch.tensor(41), key: ALIEN[key]}
    with pytest.raises(ValueError, match=key):
        reducer.load_state_dict(other)
    after = reducer.state_dict()
    assert all(same(after[name], value) for name, value in before.items())


# --- what a user should hear of -------------------------------------------------------------------


def test_weights_that_saturate_are_said_once() -> None:
    """One output, as in regression: large weights, and hardly a sample less is harmed."""
    model = net(1, lambda logits, _: logits.squeeze(1))
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    reducer = primum.attach(model, optimizer)
    weights, before, after = [], [], []
    with warned() as messages:
        for number in range(150):
            inputs, labels = batch(number, 32)
            optimizer.zero_grad()
            F.mse_loss(model(inputs), labels.double()).backward()
            optimizer.step()
            report = report_of(reducer)
            weights.append(float(report.mean_extra_weight))
            before.append(float(report.harmed_before))
            after.append(float(report.harmed_after))
    assert sum(weights) / len(weights) > 0.4, sum(weights) / len(weights)
    assert sum(after) > 0.8 * sum(before), (sum(before), sum(after))
    assert sum("saturate" in message for message in messages) == 1


def test_weights_of_a_classifier_do_not_saturate() -> None:
    model = net()
    optimizer = sgd(model)
    primum.attach(model, optimizer)
    with warned() as messages:
        train(model, optimizer, 150)
    assert not any("saturate" in message for message in messages)


def test_a_model_that_is_gone_before_its_first_step_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As under skorch, whose `fit` builds the model anew."""
    model = net()
    optimizer = sgd(model)
    with warned() as messages, caplog.at_level(logging.DEBUG, logger="primum"):
        reducer = primum.attach(model, optimizer)
        caplog.clear()
        del model, optimizer
        gc.collect()
        model = net()
        train(model, sgd(model), 2)
    assert "attached" not in repr(reducer)
    assert any("no longer exists" in text for text in [*messages, caplog.text])


def test_the_fallback_under_torchjd_is_said_in_words() -> None:
    autojac = pytest.importorskip("torchjd.autojac")
    model = net()
    optimizer = sgd(model)
    reducer = primum.attach(model, optimizer)
    inputs, labels = batch(0, 12)
    with warned() as messages:
        autojac.backward(F.cross_entropy(model(inputs), labels, reduction="none"))
    said = " ".join([*messages, report_of(reducer).reason or ""])
    assert "plain gradients" in said
    for word in ("functorch", "vmap", "BatchedTensor", "GradTrackingTensor", ".item()"):
        assert word not in said
