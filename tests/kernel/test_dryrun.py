"""A dry run copies what it steps, and nothing else in the process notices it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import primum
from loops import batch, report_of
from primum.kernel.optimizers.predict import predict


class Signs(optim.Optimizer):
    """An optimizer without a formula, which keeps whatever it is given."""

    def __init__(self, params: Any, **kept: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.during: Callable[[Signs], None] | None = None
        vars(self).update(kept)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.during is not None:
            self.during(self)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                mean = state.setdefault("mean", torch.zeros_like(param))
                mean.lerp_(param.grad, 0.5)
                param.add_(mean.sign(), alpha=-group["lr"])


class Trainer:
    """Anything that refers to the model, and to itself."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.owner = model, self


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


HELD: dict[str, Callable[[nn.Module], Any]] = {
    "the model": lambda model: model,
    "in a list": lambda model: [model, {"teacher": model}],
    "in an object": Trainer,
}


def model_in(held: Any) -> nn.Module:
    return (
        held if isinstance(held, nn.Module) else held[0] if isinstance(held, list) else held.model
    )


@pytest.mark.parametrize("hold", HELD.values(), ids=HELD)
def test_a_model_on_the_optimizer_is_not_copied(hold: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = Signs(model.parameters(), held=hold(model))
    seen: list[bool] = []
    optimizer.during = lambda self: seen.append(model_in(self.held) is model)  # type: ignore
    reducer = primum.attach(model, optimizer, head="2")
    before = [p.detach().clone() for p in model.parameters()]
    monkeypatch.setattr(nn.Module, "__deepcopy__", _refused, raising=False)
    inputs, labels = batch(0, 24)
    F.cross_entropy(model(inputs), labels).backward()
    assert report_of(reducer).applied
    assert len(seen) > 0
    assert all(seen)
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.state == {}


def _refused(*_: Any) -> None:
    raise AssertionError("a model was copied")


def test_nobodys_hooks_run_and_torchs_are_not_touched() -> None:
    model = network()
    optimizer = Signs(model.parameters())
    calls: list[str] = []
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("post")),
        optimizer.register_step_pre_hook(lambda *_: calls.append("own pre")),
        optimizer.register_step_post_hook(lambda *_: calls.append("own post")),
    ]
    try:
        primum.attach(model, optimizer, head="2")
        tables = [getattr(torch_optimizer, name) for name in names]
        contents = [list(table.items()) for table in tables]
        same: list[bool] = []

        def during(self: Signs) -> None:
            now = [getattr(torch_optimizer, name) for name in names]
            same.append(
                all(one is other for one, other in zip(now, tables, strict=True))
                and [list(table.items()) for table in now] == contents
            )

        optimizer.during = during
        inputs, labels = batch(0, 24)
        F.cross_entropy(model(inputs), labels).backward()
        assert len(same) > 0  # the dry run went through here
        assert calls == []
        optimizer.step()
        assert all(same)
        assert sorted(calls) == ["own post", "own pre", "post", "pre"]
    finally:
        for handle in handles:
            handle.remove()


def test_what_is_copied_is_the_state_of_one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps on copies make a prediction: each copies that state once, and no parameter."""
    model = network()
    optimizer = Signs(model.parameters())
    F.cross_entropy(model(batch(0, 24)[0]), batch(0, 24)[1]).backward()
    optimizer.step()
    copies: list[Any] = []
    whole = copy.deepcopy

    def counted(tree: Any, memo: Any = None) -> Any:
        copies.append(tree)
        return whole(tree, memo)

    monkeypatch.setattr("primum.kernel.optimizers.dry_run.copy.deepcopy", counted)
    monkeypatch.setattr(Tensor, "__deepcopy__", _refused)
    head: Any = model[2]
    states: list[tuple[int, int]] = []

    def during(self: Signs) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        states.append((len(held), len(self.state)))
        assert held[0] is not head.weight
        assert self.state[held[0]]["mean"] is not optimizer.state[head.weight]["mean"]

    optimizer.during = during
    kept = copy.copy(optimizer.state[head.weight])["mean"].clone()
    predict(optimizer, head.weight, torch.ones_like(head.weight))
    assert len(copies) == 2
    assert states == [(1, 1), (1, 1)]
    assert torch.equal(optimizer.state[head.weight]["mean"], kept)
