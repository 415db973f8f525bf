"""Optimizers and scalers of public training scripts that hold the torch one inside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import primum


class Lookahead(Optimizer):
    """As timm's: every k steps, the weights go half-way back to where they were k steps ago."""

    def __init__(self, base: Optimizer, k: int = 3) -> None:
        self._optimizer_step_pre_hooks: dict[int, Any] = {}
        self._optimizer_step_post_hooks: dict[int, Any] = {}
        self._base_optimizer, self.k, self.count = base, k, 0
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.state = defaultdict(dict)
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._base_optimizer.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            fast = [p for g in self.param_groups for p in g["params"]]
            for slow, param in zip(self.slow, fast, strict=True):
                slow.lerp_(param, 0.5)
                param.copy_(slow)


class NativeScaler:
    """As timm's: backward, clipping and the step in one call."""

    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def __call__(self, loss: Tensor, optimizer: Optimizer) -> None:
        self._scaler.scale(loss).backward()
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()


class Adahessian(Optimizer):
    """As timm's: divides by a Hessian's diagonal, from products with random signs."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            signs = [torch.randint_like(p, 2) * 2 - 1 for p in params]
            with torch.enable_grad():
                grads = [p.grad for p in params]
                products = torch.autograd.grad(grads, params, signs, retain_graph=True)
            for param, sign, product in zip(params, signs, products, strict=True):
                size = (sign * product).abs() + 1e-4
                param.sub_(param.grad / size, alpha=group["lr"])


class Marked(Adahessian):
    @property
    def is_second_order(self) -> bool:
        return True


class Worded(Adahessian):
    """Another library's: says itself what it needs."""

    def step(self, closure: Any = None) -> None:
        if any(p.grad.grad_fn is None for g in self.param_groups for p in g["params"]):
            raise RuntimeError("gradients need a grad_fn; call backward with create_graph=True")


class ScheduleFree(SGD):
    """Must be put into training mode before its first step, as schedulefree's optimizers."""

    training = False

    def step(self, closure: Any = None) -> None:
        if not self.training:
            raise RuntimeError("optimizer was not in train mode when step was called")
        super().step(closure)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (24,), generator=rng)
    return torch.randn(24, 6, generator=rng) + labels[:, None], labels


def train(model: nn.Module, optimizer: Optimizer, scaler: Any = None) -> None:
    for number in range(8):
        inputs, labels = batch(number)
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler(loss, optimizer)


class TestLookahead:
    def test_refused_by_name(self) -> None:
        model = make()
        optimizer = Lookahead(SGD(model.parameters(), lr=0.1))
        with pytest.raises(
            TypeError,
            match=r"Lookahead wraps another optimizer.* train with an optimizer of torch\.optim",
        ):
            primum.attach(model, optimizer)

    def test_the_one_inside_works(self) -> None:
        model = make()
        optimizer = Lookahead(SGD(model.parameters(), lr=0.1, momentum=0.9))
        reducer = primum.attach(model, optimizer._base_optimizer)
        train(model, optimizer)
        assert reducer.last is not None
        assert reducer.last.applied
        assert reducer.last.fallbacks == 0
        assert reducer.last.mean_extra_weight > 0


class TestNativeScaler:
    def test_its_scaler_is_used(self) -> None:
        """Weights come from unscaled gradients: training is that without a scaler."""
        models = []
        for scaler in (None, NativeScaler()):
            model = make()
            optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
            reducer = primum.attach(model, optimizer, scaler=scaler)
            train(model, optimizer, scaler)
            assert reducer.last is not None
            assert reducer.last.applied
            assert reducer.last.mean_extra_weight > 0
            models.append(model)
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(one, other)

    def test_what_holds_no_scaler_is_refused(self) -> None:
        class Nothing:
            pass

        model = make()
        with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler, got Noth"):
            primum.attach(model, SGD(model.parameters(), lr=0.1), scaler=Nothing())


class TestSecondOrder:
    @pytest.mark.parametrize("kind", [Adahessian, Marked, Worded])
    @pytest.mark.parametrize("attach", [primum.attach, primum.observe])
    def test_refused_at_once(
        self, attach: Callable[..., Any], kind: Callable[..., Optimizer]
    ) -> None:
        model = make()
        with pytest.raises(TypeError, match=r"is not supported: its step differentiates the grad"):
            attach(model, kind(model.parameters()))

    def test_the_model_is_left_as_it_was(self) -> None:
        model, other = make(), make()
        state = torch.random.get_rng_state()
        optimizer = Adahessian(model.parameters())
        with pytest.raises(TypeError):
            primum.attach(model, optimizer)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert not any(each._forward_hooks for each in model.modules())
        assert not optimizer.state
        for one, same in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, same)
            assert one.grad is None

    def test_a_step_that_is_not_ready_yet_is_no_reason(self) -> None:
        model = make()
        optimizer = ScheduleFree(model.parameters(), lr=0.1)
        reducer = primum.attach(model, optimizer)
        optimizer.training = True
        train(model, optimizer)
        assert reducer.last is not None
        assert reducer.last.applied
        assert reducer.last.fallbacks == 0
