"""Checkpoints: what is in them, and what a run without them loses."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn, optim

import primum
from loops import ADAMW, batch, make, report_of, train


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_model_and_optimizer_have_the_keys_they_had() -> None:
    """Attached or not: either loads the other's checkpoint, strictly."""
    model, optimizer = make(optim.AdamW, ADAMW)
    train(model, optimizer, 1)
    keys = list(model.state_dict()), list(optimizer.state_dict()["state"])
    primum.attach(model, optimizer)
    train(model, optimizer, 1)
    assert keys == (list(model.state_dict()), list(optimizer.state_dict()["state"]))
    other, stepper = make(optim.AdamW, ADAMW, seed=1)
    other.load_state_dict(through_a_file(model.state_dict()), strict=True)
    stepper.load_state_dict(through_a_file(optimizer.state_dict()))
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("recipe", ["primum", "paper"])
@pytest.mark.parametrize("clip", [False, True])
def test_the_reducers_state_is_needed_for_clipping_and_for_the_paper(
    recipe: str, clip: bool
) -> None:
    """Of the default recipe without clipping there is nothing to remember but a count."""

    def go_on(model: nn.Module, optimizer: optim.Optimizer, first: int) -> None:
        for number in range(first, first + 3):
            optimizer.zero_grad()
            inputs, labels = batch(number, 24)
            nn.functional.cross_entropy(model(inputs), labels).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()

    model, optimizer = make(optim.AdamW, ADAMW)
    reducer = primum.attach(model, optimizer, recipe=recipe)
    go_on(model, optimizer, 0)
    saved = through_a_file(
        {"model": model.state_dict(), "opt": optimizer.state_dict(), "ours": reducer.state_dict()}
    )
    go_on(model, optimizer, 3)
    ends = {}
    for with_state in (True, False):
        again, stepper = make(optim.AdamW, ADAMW, seed=1)
        again.load_state_dict(saved["model"])
        stepper.load_state_dict(copy.deepcopy(saved["opt"]))
        resumed = primum.attach(again, stepper, recipe=recipe)
        if with_state:
            resumed.load_state_dict(saved["ours"])
        go_on(again, stepper, 3)
        assert report_of(resumed).fallbacks == 0
        ends[with_state] = all(map(torch.equal, again.parameters(), model.parameters()))
    assert ends[True]
    assert ends[False] == (recipe == "primum" and not clip)
