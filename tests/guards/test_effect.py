"""A run whose weights have no effect says so once, with the likely reason; others do not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import batch, make
from primum import Solution, StepReport
from primum.guards.effect import STEPS, Effect
from primum.kernel.engine import Engine
from primum.kernel.head import Head


def said(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught]


def effects(messages: list[str]) -> list[str]:
    return [each for each in messages if "hardly any" in each or "no weights were computed" in each]


def learn(
    model: nn.Module, optimizer: optim.Optimizer, steps: int = STEPS, *shape: int, parts: int = 1
) -> None:
    """The same batch again and again, by plain gradient descent: a step harms none of it."""
    dtype = next(model.parameters()).dtype
    inputs, _ = batch(0, *(shape or (24,)), dtype=dtype)
    labels = (inputs[..., 0] > 0).long()
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(parts):
            F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()
        optimizer.step()


def easy() -> tuple[nn.Module, optim.Optimizer]:
    """One direction for all samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    for p in model[0].parameters():
        p.requires_grad_(False)
    model[0].weight.zero_()
    model[0].weight[:, 0] = 1.0
    return model, optim.SGD(model[1].parameters(), lr=0.01)


class Same(nn.Module):
    """Logits of a weight times one number for each position: whole sequences agree."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits


def sequences(steps: int = STEPS, **settings: Any) -> None:
    """Many positions each: the loss of a whole sequence is hardly ever raised."""
    torch.manual_seed(0)
    model = Same()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    primum.attach(model, optimizer, **settings)
    for number in range(steps):
        rng = torch.Generator().manual_seed(number)
        inputs = torch.randn(4, 256, 6, generator=rng)
        optimizer.zero_grad()
        noise = torch.randn(4, 256, 4, generator=rng)
        targets = (inputs[..., :4] + noise).argmax(-1)
        F.cross_entropy(model(inputs).transpose(1, 2), targets).backward()
        optimizer.step()


class TestSaid:
    def test_once_with_what_to_do_on_sequences(self) -> None:
        messages = effects(said(lambda: sequences(STEPS + 30, per="sample")))
        assert len(messages) == 1
        assert "in 100 steps hardly any sample got an extra weight (mean" in messages[0]
        assert "pass per='token'" in messages[0]

    def test_not_a_step_too_early(self) -> None:
        assert not effects(said(lambda: sequences(STEPS - 1, per="sample")))

    def test_tokens_have_weights_there(self) -> None:
        assert not effects(said(lambda: sequences()))

    def test_a_tiny_radius(self) -> None:
        messages = effects(said(lambda: sequences(radius=1e-6)))
        assert len(messages) == 1
        assert "hardly any token" in messages[0]
        assert "radius=1e-06 leaves no room" in messages[0]

    def test_nothing_to_remove(self) -> None:
        model, optimizer = easy()
        primum.attach(model, optimizer)
        messages = effects(said(lambda: learn(model, optimizer)))
        assert len(messages) == 1
        assert "of the samples, so there is little interference" in messages[0]
        assert "primum.detach(model)" in messages[0]

    @pytest.mark.parametrize("explicit", [True, False])
    def test_steps_are_counted_and_not_passes(self, explicit: bool) -> None:
        model, optimizer = easy()
        reducer = primum.attach(model, optimizer)
        assert not effects(said(lambda: learn(model, optimizer, STEPS - 1, parts=3)))
        inputs, _ = batch(0, 24, dtype=torch.float32)
        losses = F.cross_entropy(model(inputs), (inputs[:, 0] > 0).long(), reduction="none")
        (reducer(losses) if explicit else losses.mean()).backward()
        assert len(effects(said(optimizer.step))) == 1

    def test_every_step_fell_back(self) -> None:
        model, optimizer = make()
        primum.attach(model, optimizer)
        held = [p for p in model.parameters() if p is not model[2].weight]
        optimizer.param_groups[0]["params"] = held
        messages = effects(said(lambda: learn(model, optimizer)))
        assert len(messages) == 1
        assert "no weights were computed in 100 steps: the optimizer no longer" in messages[0]
        assert "(100 times)" in messages[0]

    def test_raised_under_the_users_filter(self) -> None:
        model, optimizer = easy()
        primum.attach(model, optimizer)
        learn(model, optimizer, STEPS - 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="hardly any"):
                learn(model, optimizer, 1)


class TestNotSaid:
    @pytest.mark.parametrize("kind", ["observe", "radius", "paused", "removed"])
    def test_where_no_weights_are_wanted(self, kind: str) -> None:
        model, optimizer = easy()
        make_one = primum.observe if kind == "observe" else primum.attach
        reducer = make_one(model, optimizer, radius=0 if kind == "radius" else None)
        reducer.enabled = kind != "paused"
        if kind == "removed":
            reducer.remove()
        assert not effects(said(lambda: learn(model, optimizer, 2 * STEPS)))

    def test_a_pause_is_not_counted(self) -> None:
        model, optimizer = easy()
        reducer = primum.attach(model, optimizer)
        with reducer.paused():
            assert not effects(said(lambda: learn(model, optimizer, STEPS - 1)))
        assert not effects(said(lambda: learn(model, optimizer, STEPS - 1)))
        assert len(effects(said(lambda: learn(model, optimizer, 1)))) == 1

    @pytest.mark.parametrize("kind", ["SGD", "momentum", "AdamW"])
    def test_ordinary_training_on_images(self, kind: str) -> None:
        """Digits, a small CNN: also once it is well trained."""
        from sklearn.datasets import load_digits

        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
        targets = torch.tensor(data.target)
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(256, 10),
        )  # fmt: skip
        optimizer: optim.Optimizer = optim.AdamW(model.parameters(), lr=3e-3)
        if kind != "AdamW":
            momentum = 0.9 if kind == "momentum" else 0.0
            optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        for _ in range(3):
            primum.attach(model, optimizer)

            def run() -> None:
                for _ in range(STEPS):
                    rows = torch.randint(len(images), (64,))
                    optimizer.zero_grad()
                    F.cross_entropy(model(images[rows]), targets[rows]).backward()
                    optimizer.step()

            assert not effects(said(run))


class Watched:
    """An `Effect` and its engine, which is given reports and steps by hand."""

    def __init__(self, radius: float | None = 0.2) -> None:
        self.model, optimizer = make()
        head = Head(self.model[2], {"weight": optimizer, "bias": optimizer})
        self.engine = Engine(head, primum.Primum(radius=radius))
        self.effect = Effect(self.engine)

    def step(self, weights: Tensor, drift: Tensor, *, passed: bool = True) -> list[str]:
        """What is said after a step with these weights."""
        solution = Solution(weights, drift.sum(), drift.sum(), drift)
        count = torch.zeros(())
        self.effect.on_solution(StepReport(solution, drift, count, count, weighted=True))
        return said(lambda: self.effect.after_step(passed))


class TestEffect:
    def test_no_values_are_read_before_the_hundredth_step(self) -> None:
        class Untouched(Tensor):
            def tolist(self) -> Any:
                raise AssertionError("read")

        watched, weights = Watched(), torch.zeros(4).as_subclass(Untouched)
        for _ in range(STEPS - 1):
            assert not watched.step(weights, weights)
        with pytest.raises(AssertionError, match="read"):
            watched.step(weights, weights)
        assert not watched.step(weights, weights)  # and never again

    @pytest.mark.parametrize(("weight", "speaks"), [(0.0, True), (9e-3, True), (11e-3, False)])
    @pytest.mark.parametrize("sign", [1, -1])
    def test_the_mean_size_counts(self, weight: float, speaks: bool, sign: int) -> None:
        watched = Watched()
        weights = weight * torch.tensor([1.5, 0.5 * sign])
        found = [watched.step(weights, torch.ones(2)) for _ in range(STEPS)]
        assert bool(found[-1]) == speaks

    @pytest.mark.parametrize(("weight", "speaks"), [(1.5e-3, False), (5e-4, True)])
    def test_compared_with_the_radius(self, weight: float, speaks: bool) -> None:
        watched = Watched(0.01)
        found = [watched.step(torch.full((2,), weight), torch.ones(2)) for _ in range(STEPS)]
        assert bool(found[-1]) == speaks

    def test_harmed_samples_and_a_usual_radius(self) -> None:
        watched = Watched(0.4)
        found = [watched.step(torch.full((2,), 1e-3), torch.ones(2)) for _ in range(STEPS)]
        assert "raised the loss of 100.0% of the samples; either weights this small" in found[-1][0]

    def test_steps_for_other_networks_are_not_counted(self) -> None:
        watched = Watched()
        for _ in range(2 * STEPS):
            assert not watched.step(torch.zeros(2), torch.zeros(2), passed=False)

    def test_not_a_number_is_counted_elsewhere(self) -> None:
        watched = Watched()
        for _ in range(STEPS):
            assert not watched.step(torch.full((2,), torch.nan), torch.zeros(2))
