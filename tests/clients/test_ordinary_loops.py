"""Loops in which every weighed pass is followed by a step: nothing is said about any of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import BOTH, SGD, batch, make, report_of

Loop = Callable[[nn.Sequential, optim.Optimizer], None]
STEPS = 6


def batches(count: int = STEPS, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(first, first + count):
        yield batch(number, 24)


def zero_grad_first(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
    for inputs, labels in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def zero_grad_in_place(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
    for inputs, labels in batches():
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()


def zero_grad_last(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
    for inputs, labels in batches():
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        model.zero_grad()


def zero_grad_twice(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
    for inputs, labels in batches():
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulation(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
    for number, (inputs, labels) in enumerate(batches(12), 1):
        (F.cross_entropy(model(inputs), labels) / 3).backward()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)


def accumulation_of_nothing(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
    """A micro-batch whose loss is flat (all masked, or saturated): its gradient is exactly zero."""
    for number, (inputs, labels) in enumerate(batches(12), 1):
        flat = 0.0 if number % 3 == 1 else 1.0
        (flat * F.cross_entropy(model(inputs), labels) / 3).backward()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def accumulation_clipped_in_between(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
    """Some loops clip after every micro-batch: the gradients shrink, but are not discarded."""
    for number, (inputs, labels) in enumerate(batches(12), 1):
        (F.cross_entropy(model(inputs), labels) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()


def norms_logged(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
    for inputs, labels in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
        optimizer.step()


def evaluation_in_between(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
    for inputs, labels in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        model.eval()
        with torch.no_grad():
            model(inputs)
        model.train()
        optimizer.step()
        F.cross_entropy(model(inputs), labels).item()  # no no_grad, no eval(), no backward


def adversarial(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
    for inputs, labels in batches():
        nudged = inputs.clone().requires_grad_()
        loss = F.cross_entropy(model(nudged), labels)
        (gradient,) = torch.autograd.grad(loss, nudged)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs + 0.1 * gradient.sign()), labels).backward()
        optimizer.step()


def gradient_penalty(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
    for inputs, labels in batches():
        optimizer.zero_grad()
        inputs.requires_grad_()
        loss = F.cross_entropy(model(inputs), labels)
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + gradient.square().sum()).backward()
        optimizer.step()


def closure(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
    for inputs, labels in batches():

        def evaluate(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        optimizer.step(evaluate)


def two_losses(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
    """Two backward passes through one graph, for one step."""
    for inputs, labels in batches():
        optimizer.zero_grad()
        output = model(inputs)
        F.cross_entropy(output, labels).backward(retain_graph=True)
        output.square().mean().backward()
        optimizer.step()


def restored(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
    """Back to the state of the third step, in the middle of training."""
    for number, (inputs, labels) in enumerate(batches()):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if number == 2:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if number == 4:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])


LOOPS: dict[str, Loop] = {
    each.__name__: each
    for each in (
        zero_grad_first,
        zero_grad_in_place,
        zero_grad_last,
        zero_grad_twice,
        accumulation,
        accumulation_of_nothing,
        accumulation_clipped_in_between,
        norms_logged,
        evaluation_in_between,
        adversarial,
        gradient_penalty,
        closure,
        two_losses,
        restored,
    )
}


@BOTH
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
def test_no_warning(kind: Any, options: Any, loop: Loop) -> None:
    """Warnings are errors here."""
    model, optimizer = make(kind, options)
    reducer = primum.attach(model, optimizer)
    loop(model, optimizer)
    report = report_of(reducer)
    assert report.applied
    assert (report.discarded, int(report.fallbacks)) == (0, 0)


@pytest.mark.parametrize("where", ["backbone", "head", "loss"])
def test_a_skipped_step_of_a_gradient_scaler(where: str) -> None:
    """The scaler discards gradients that overflow: that is its business."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    reducer = primum.attach(model, optimizer, scaler=scaler)
    for number, (inputs, labels) in enumerate(batches()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        overflows = number in (0, 3)
        if overflows and where == "loss":
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if overflows and where == "backbone":
            model[0].weight.grad[0, 0] = float("inf")
        if overflows and where == "head":
            model[2].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    assert report_of(reducer).discarded == 0
    assert report_of(reducer).fallbacks == 0


def test_an_optimizer_whose_steps_cannot_be_counted() -> None:
    """A class that skips `Optimizer.__init__` has no hooks: nothing is known, nothing is said."""

    class Bare(optim.Optimizer):
        def __init__(self, params: list[nn.Parameter], lr: float) -> None:
            self.param_groups = [{"params": params, "lr": lr}]
            self.state: dict[Tensor, dict[str, Tensor]] = {}
            self.defaults: dict[str, Any] = {"lr": lr}

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])

        def zero_grad(self, set_to_none: bool = True) -> None:
            for p in self.param_groups[0]["params"]:
                p.grad = None

    model, _ = make()
    optimizer = Bare(list(model.parameters()), 0.1)
    reducer = primum.attach(model, optimizer)
    zero_grad_first(model, optimizer)
    assert report_of(reducer).discarded == 0


def test_training_that_ends_in_the_middle_of_accumulation() -> None:
    """An epoch's last micro-batches, left over: their step comes in the next epoch."""
    model, optimizer = make(optim.SGD, SGD)
    reducer = primum.attach(model, optimizer)
    for epoch in range(3):
        for number, (inputs, labels) in enumerate(batches(5, first=5 * epoch), 1):
            (F.cross_entropy(model(inputs), labels) / 2).backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert report_of(reducer).discarded == 0
