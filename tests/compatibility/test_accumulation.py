"""Accumulated gradients and clipping: what a step sees that no single backward pass does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from compatibility.oracle import explicit, flat
from loops import (
    ADAMW,
    BOTH,
    PRECISE,
    SGD,
    batch,
    gradients,
    make,
    make_like,
    report_of,
    slow_solution,
    stir,
)

CLIPPING: dict[str, Callable[[nn.Module], object]] = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
}


def losses_on(number: int, rows: int = 24) -> Callable[[nn.Module], Tensor]:
    inputs, labels = batch(number, rows)
    return lambda model: F.cross_entropy(model(inputs), labels, reduction="none") / rows


class TestAccumulation:
    @BOTH
    def test_micro_batches_of_different_sizes(self, kind: Any, options: Any) -> None:
        """Each counts by its share of the samples, as in one large batch."""
        model, optimizer = make(kind, options)
        reducer = primum.attach(model, optimizer, **PRECISE)
        for number in range(3):
            optimizer.zero_grad()
            for part, rows in enumerate((12, 7, 5)):
                inputs, labels = batch(10 * number + part, rows)
                copies = make_like(model, optimizer)
                oracle = slow_solution(*copies, inputs, labels, scale=rows / 24)
                (F.cross_entropy(model(inputs), labels) * (rows / 24)).backward()
                report = report_of(reducer)
                torch.testing.assert_close(
                    report.extra_weights, oracle.extra_weights, rtol=1e-5, atol=1e-7
                )
            optimizer.step()
        assert report.extra_weights.max() > 0.01

    @BOTH
    def test_explicit_form_of_a_share(self, kind: Any, options: Any) -> None:
        """`reducer(losses / k)`, or else the step is predicted k times too large."""
        (one, first), (two, second) = make(kind, options), make(kind, options)
        reducers = primum.attach(one, first), primum.attach(two, second)
        for number in range(3):
            first.zero_grad()
            second.zero_grad()
            for part in range(4):
                inputs, labels = batch(10 * number + part, 12)
                (F.cross_entropy(one(inputs), labels) / 4).backward()
                losses = F.cross_entropy(two(inputs), labels, reduction="none")
                reducers[1](losses / 4).backward()
                found, expected = (report_of(each).extra_weights for each in reducers[::-1])
                torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
            first.step()
            second.step()
        assert expected.max() > 0.01

    def test_gradients_zeroed_in_place(self) -> None:
        (one, first), (two, second) = make(), make()
        reducers = primum.attach(one, first), primum.attach(two, second)
        for number in range(3):
            for (model, optimizer), to_none in (((one, first), True), ((two, second), False)):
                optimizer.zero_grad(set_to_none=to_none)
                losses_on(number)(model).sum().backward()
                optimizer.step()
            found, expected = (report_of(each).extra_weights for each in reducers)
            assert expected.max() > 0.01
            torch.testing.assert_close(found, expected, rtol=0, atol=0)

    def accumulate(
        self, kind: Any, options: Any, parts: int, radius: float, *, stirred: bool
    ) -> tuple[Tensor, float, float]:
        """Gradients of a batch of 48 in parts; harm removed by the step; how far it is bent."""
        model, optimizer = make(kind, options)
        for number in range(3):
            losses_on(number, 48)(model).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if stirred:
            stir(optimizer)
        whole = losses_on(9, 48)
        plain = explicit(model, [optimizer], "2", whole, lr=options["lr"])
        reducer = primum.attach(model, optimizer, radius=radius)
        inputs, labels = batch(9, 48)
        for x, y in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
            (F.cross_entropy(model(x), y) / parts).backward()
        assert report_of(reducer).applied
        found = flat(gradients(model))
        before = flat(list(model[2].parameters()))
        optimizer.step()
        step = (flat(list(model[2].parameters())) - before) / options["lr"]
        harm = (plain.gradients @ step).clamp_min(0).sum()
        bent = (step - plain.step).norm() / plain.step.norm()
        return found, float(plain.harm - harm), float(bent)

    @BOTH
    @pytest.mark.parametrize("parts", [2, 4])
    def test_close_to_one_large_batch(self, kind: Any, options: Any, parts: int) -> None:
        """With radius / sqrt(k); benchmarks/loops.py has the same on real training."""
        large, removed, _ = self.accumulate(kind, options, 1, 0.2, stirred=True)
        radius = 0.2 / parts**0.5
        found, also_removed, _ = self.accumulate(kind, options, parts, radius, stirred=True)
        assert removed > 0
        assert also_removed > 0.6 * removed
        assert F.cosine_similarity(found, large, 0) > 0.9

    def test_each_micro_batch_bends_the_step_by_the_radius(self) -> None:
        """So all together bend it by more, under SGD, unless the radius is divided."""
        cases = [(1, 0.02), (4, 0.02), (4, 0.02 / 4**0.5)]
        large, four, divided = (
            self.accumulate(optim.SGD, SGD, *case, stirred=False)[2] for case in cases
        )
        assert large == pytest.approx(0.02, rel=1e-3)  # all of the radius is used
        assert 1.5 * large < four <= 4 * large
        assert divided < 0.75 * four


class TestClipping:
    @BOTH
    @pytest.mark.parametrize("how", CLIPPING)
    def test_the_clipped_step_does_less_harm(self, kind: Any, options: Any, how: str) -> None:
        """Whatever was known of the factor: of the steps that are really taken."""
        model, optimizer = make(kind, options)
        reducer = primum.attach(model, optimizer)
        harm = {"plain": 0.0, "ours": 0.0}
        for number in range(20):
            clip = CLIPPING[how]
            plain = explicit(
                model, [optimizer], "2", losses_on(number), lr=options["lr"], between=clip
            )
            before = flat(list(model[2].parameters()))
            losses_on(number)(model).sum().backward()
            clip(model)
            optimizer.step()
            optimizer.zero_grad()
            step = (flat(list(model[2].parameters())) - before) / options["lr"]
            harm["plain"] += float(plain.harm)
            harm["ours"] += float((plain.gradients @ step).clamp_min(0).sum())
        assert harm["ours"] < 0.9 * harm["plain"]
        assert report_of(reducer).fallbacks == 0

    @BOTH
    def test_the_first_step_expects_no_clipping_the_second_the_same(
        self, kind: Any, options: Any
    ) -> None:
        """The drift reported is that of the gradient times the factor of the step before."""
        model, optimizer = make(kind, options)
        reducer = primum.attach(model, optimizer)
        factor = 1.0
        for number in range(3):
            expected = factor

            def scale(net: nn.Module, factor: float = expected) -> None:
                for param in net.parameters():
                    param.grad = None if param.grad is None else param.grad * factor

            oracle = explicit(
                model, [optimizer], "2", losses_on(number), lr=options["lr"], between=scale
            )
            losses_on(number)(model).sum().backward()
            torch.testing.assert_close(report_of(reducer).drift, oracle.drift, rtol=1e-6, atol=1e-9)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            factor = 0.05 / (float(norm) + 1e-6)
            optimizer.step()
            optimizer.zero_grad()
        assert factor < 0.5

    def test_the_backbone_alone_is_clipped(self) -> None:
        """Then the head's step is known, and stays exact."""
        model, optimizer = make(optim.AdamW, ADAMW)
        reducer = primum.attach(model, optimizer)

        def clip(net: nn.Module) -> None:
            nn.utils.clip_grad_norm_(net.get_submodule("0").parameters(), 1e-3)

        for number in range(4):
            oracle = explicit(
                model, [optimizer], "2", losses_on(number), lr=ADAMW["lr"], between=clip
            )
            losses_on(number)(model).sum().backward()
            assert flat(gradients(model[0])).norm() > 1e-2
            report = report_of(reducer)
            torch.testing.assert_close(report.drift, oracle.drift, rtol=1e-6, atol=1e-9)
            clip(model)
            optimizer.step()
            optimizer.zero_grad()
        assert report.extra_weights.max() > 0.01
