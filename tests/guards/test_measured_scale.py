"""Loss scaling and clipping: the optimizer sees the gradient of backward times a factor."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import ADAMW, BOTH, SGD, assert_close, batch, gradients, make, report_of, stir

SCALE = 2.0**10


def factor_of(reducer: primum.Reducer) -> float:
    measured = reducer._scale.factor("weight")
    assert isinstance(measured, float)  # on the host
    return measured


def backward(model: nn.Module, number: int, scale: float = 1.0, rows: int = 24) -> None:
    inputs, labels = batch(number, rows, dtype=next(model.parameters()).dtype)
    (F.cross_entropy(model(inputs), labels) * scale).backward()


class TestScaler:
    @BOTH
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("micro_batches", [1, 3])
    def test_same_weights_as_without(
        self, kind: Any, options: Any, bias: bool, micro_batches: int
    ) -> None:
        """A power of two scales without rounding: the same weights to the last bit."""
        (one, plain), (two, scaled) = (make(kind, options, bias=bias) for _ in range(2))
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
        reducers = primum.attach(one, plain), primum.attach(two, scaled, scaler=scaler)
        for number in range(4):
            plain.zero_grad()
            scaled.zero_grad()
            for part in range(micro_batches):
                inputs, labels = batch(10 * number + part, 24)
                F.cross_entropy(one(inputs), labels).backward()
                scaler.scale(F.cross_entropy(two(inputs), labels)).backward()
                found, expected = (report_of(each).extra_weights for each in reducers[::-1])
                assert expected.max() > 0.01
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
                for name in ("drift", "drift_after", "objective", "lower_bound"):
                    found, expected = (getattr(report_of(each), name) for each in reducers[::-1])
                    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)
            plain.step()
            scaler.step(scaled)
            scaler.update()
        assert scaler.get_scale() == 4 * SCALE  # it grew on the way
        assert_close(list(two.parameters()), list(one.parameters()), 1e-12)

    @BOTH
    def test_explicit_form(self, kind: Any, options: Any) -> None:
        (one, plain), (two, scaled) = (make(kind, options) for _ in range(2))
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        reducers = primum.attach(one, plain), primum.attach(two, scaled, scaler=scaler)
        for number in range(4):
            plain.zero_grad()
            scaled.zero_grad()
            for part in range(2):
                inputs, labels = batch(10 * number + part, 24)
                reducers[0](F.cross_entropy(one(inputs), labels, reduction="none")).backward()
                loss = reducers[1](F.cross_entropy(two(inputs), labels, reduction="none"))
                scaler.scale(loss).backward()
                found, expected = (report_of(each).extra_weights for each in reducers[::-1])
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
            plain.step()
            scaler.step(scaled)
            scaler.update()
        assert factor_of(reducers[1]) == 1

    @pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
    def test_a_scaler_that_was_not_passed_is_measured(self, kind: Any) -> None:
        """From the second step on; in the first there is no memory to compare with."""
        options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9} if kind is optim.SGD else ADAMW
        (one, plain), (two, scaled) = (make(kind, options) for _ in range(2))
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        reducers = primum.attach(one, plain), primum.attach(two, scaled)
        for number in range(4):
            plain.zero_grad()
            scaled.zero_grad()
            backward(one, number)
            inputs, labels = batch(number, 24)
            scaler.scale(F.cross_entropy(two(inputs), labels)).backward()
            found, expected = (report_of(each).extra_weights for each in reducers[::-1])
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
            plain.step()
            scaler.step(scaled)
            scaler.update()
            assert factor_of(reducers[1]) == pytest.approx(1 / SCALE, rel=1e-9)

    @pytest.mark.parametrize("recipe", ["primum", "paper"])
    def test_a_skipped_step_never_happened(self, recipe: str) -> None:
        """State, count and what comes after are those of a run without it, bit for bit."""
        states = []
        for overflows in (False, True):
            model, optimizer = make()
            scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, backoff_factor=0.5)
            reducer = primum.attach(model, optimizer, scaler=scaler, recipe=recipe)
            kept: dict[str, Any] = {}
            for number in range(6):
                if overflows and number == 3:
                    optimizer.zero_grad()
                    inputs, labels = batch(99, 24)
                    scaler.scale(F.cross_entropy(model(inputs), labels)).backward()
                    model[0].weight.grad[0, 0] = torch.inf  # in the backbone: the head is fine
                    scaler.step(optimizer)
                    scaler.update()
                    scaler.update(SCALE)
                    saved = reducer.state_dict()["recipe_state"]
                    assert saved == kept
                optimizer.zero_grad()
                inputs, labels = batch(number, 24)
                scaler.scale(F.cross_entropy(model(inputs), labels)).backward()
                scaler.step(optimizer)
                scaler.update()
                kept = reducer.state_dict()["recipe_state"]
            states.append((model.state_dict(), reducer.state_dict()))
        (model_state, own), (other_model_state, other_own) = states
        torch.testing.assert_close(other_model_state, model_state, rtol=0, atol=0)
        assert own["recipe_state"] == other_own["recipe_state"]
        assert own["fallbacks"] == other_own["fallbacks"] == 0

    def test_values_that_overflow_are_the_scalers_business(self) -> None:
        """Not a fallback, no warning: here warnings are errors."""
        model, optimizer = make()
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        reducer = primum.attach(model, optimizer, scaler=scaler)
        inputs, labels = batch(0, 24)
        before = copy.deepcopy(model.state_dict())
        scaler.scale(F.cross_entropy(model(inputs) * torch.inf, labels)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert report_of(reducer).fallbacks == 0
        assert report_of(reducer).extra_weights.max() == 0
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        optimizer.zero_grad()
        backward(model, 1)
        assert report_of(reducer).extra_weights.max() > 0

    def test_disabled(self) -> None:
        model, optimizer = make()
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        reducer = primum.attach(model, optimizer, scaler=scaler)
        twin, _ = make()
        expected = primum.attach(twin, optim.SGD(twin.parameters(), **SGD))
        backward(model, 0)
        backward(twin, 0)
        assert torch.equal(report_of(reducer).extra_weights, report_of(expected).extra_weights)
        assert reducer.state_dict()["recipe_state"] == {}

    def test_disabled_skips_no_step(self) -> None:
        """`GradScaler(enabled=use_amp)`: values that are not finite go into the parameters."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False))
        inputs, labels = batch(0, 24)
        with pytest.warns(RuntimeWarning, match="values were not finite"):
            F.cross_entropy(model(inputs) * torch.inf, labels).backward()
        assert report_of(reducer).fallbacks == 1

    def test_float16(self) -> None:
        """Half-precision gradients: too small for float16 unscaled, right when scaled."""
        model, optimizer = make(dtype=torch.float32)
        twin, reference = make(dtype=torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        reducer = primum.attach(model, optimizer, scaler=scaler)
        expected = primum.attach(twin, reference)
        for number in range(3):
            inputs, labels = batch(number, 24, dtype=torch.float32)
            optimizer.zero_grad()
            reference.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = 1e-4 * F.cross_entropy(model(inputs), labels)
            scaler.scale(loss).backward()
            (1e-4 * F.cross_entropy(twin(inputs), labels)).backward()
            found = report_of(reducer).extra_weights
            assert found.max() > 0.01
            torch.testing.assert_close(
                found, report_of(expected).extra_weights, rtol=0.05, atol=0.02
            )
            scaler.step(optimizer)
            scaler.update()
            reference.step()

    @pytest.mark.parametrize("scaler", [1.0, "fp16", object()])
    def test_not_a_scaler(self, scaler: Any) -> None:
        model, optimizer = make()
        with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler, got"):
            primum.attach(model, optimizer, scaler=scaler)
        assert not model[2]._forward_hooks


class TestFactor:
    @BOTH
    @pytest.mark.parametrize("bias", [True, False])
    def test_clipping_by_norm(self, kind: Any, options: Any, bias: bool) -> None:
        """Measured exactly after the step, and used in the next one."""
        model, optimizer = make(kind, options, bias=bias)
        reducer = primum.attach(model, optimizer)
        for number in range(4):
            optimizer.zero_grad()
            backward(model, number)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            assert norm > 0.05
            optimizer.step()
            assert factor_of(reducer) == pytest.approx(0.05 / norm.item(), rel=1e-5)

    @BOTH
    @pytest.mark.parametrize("bias", [True, False])
    def test_known_beforehand_it_gives_the_weights_of_the_clipped_step(
        self, kind: Any, options: Any, bias: bool
    ) -> None:
        """With a constant factor the prediction is exact: against a really clipped step."""
        c = 0.25
        model, optimizer = make(kind, options, bias=bias)
        reducer = primum.attach(model, optimizer)
        for number in range(3):
            optimizer.zero_grad()
            backward(model, number)
            for param in model.parameters():
                param.grad *= c
            optimizer.step()
        stir(optimizer)
        optimizer.zero_grad()
        twin, stepper = copy.deepcopy((model, optimizer))
        backward(model, 3)
        report = report_of(reducer)

        inputs, labels = batch(3, 24)
        params = list(twin[2].parameters())
        losses = F.cross_entropy(twin(inputs), labels, reduction="none") / 24
        rows = torch.stack(
            [
                torch.cat([g.flatten() for g in torch.autograd.grad(x, params, retain_graph=True)])
                for x in losses
            ]
        )

        def moved(weights: Tensor) -> Tensor:
            """The head's real step, per unit lr, on clipped gradients of the weighted loss."""
            net, own = copy.deepcopy((twin, stepper))
            before = [p.detach().clone() for p in net[2].parameters()]
            each = F.cross_entropy(net(inputs), labels, reduction="none") / 24
            (c * weights * each).sum().backward()
            own.step()
            steps = [p.detach() - b for p, b in zip(net[2].parameters(), before, strict=True)]
            return torch.cat([each.flatten() for each in steps]) / own.param_groups[0]["lr"]

        torch.testing.assert_close(report.drift, rows @ moved(torch.ones(24)), rtol=1e-6, atol=1e-9)
        assert report.extra_weights.max() > 0.01
        if kind is optim.SGD:  # linear in the gradient: the drift with weights is exact, too
            after = rows @ moved(1 + report.extra_weights)
            torch.testing.assert_close(report.drift_after, after, rtol=1e-6, atol=1e-9)

    def test_no_clipping_no_factor(self) -> None:
        """Rounding is no factor: float32, accumulated, and nothing is multiplied."""
        model, optimizer = make(dtype=torch.float32)
        reducer = primum.attach(model, optimizer)
        for number in range(5):
            optimizer.zero_grad()
            for part in range(3):
                backward(model, 10 * number + part, 1 / 3)
            optimizer.step()
            assert factor_of(reducer) == 1

    @pytest.mark.parametrize("bias", [True, False])
    def test_accumulated_and_clipped(self, bias: bool) -> None:
        model, optimizer = make(bias=bias)
        reducer = primum.attach(model, optimizer)
        for number in range(3):
            optimizer.zero_grad()
            for part in range(3):
                backward(model, 10 * number + part, 1 / 3, rows=7 + part)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()
            optimizer.step()
            assert factor_of(reducer) == pytest.approx(0.01 / norm, rel=1e-5)

    def test_what_is_not_parallel_tells_nothing(self) -> None:
        """Values clipped one by one, hard: the factor stays as it was."""
        model, optimizer = make(optim.SGD, {"lr": 0.1})
        reducer = primum.attach(model, optimizer)
        backward(model, 0)
        optimizer.step()
        assert factor_of(reducer) == 1
        optimizer.zero_grad()
        backward(model, 1)
        with torch.no_grad():
            for param in model.parameters():
                param.grad.copy_(torch.randn_like(param))
        optimizer.step()
        assert factor_of(reducer) == 1

    def test_paused_passes_are_no_clipping(self) -> None:
        """What is in `.grad` counts, whatever put it there."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        backward(model, 1)
        with reducer.paused():
            backward(model, 1)
        optimizer.step()
        assert factor_of(reducer) == 1

    @pytest.mark.parametrize("bias", [True, False])
    def test_gradients_thrown_away_do_not_count(self, bias: bool) -> None:
        model, optimizer = make(bias=bias)
        reducer = primum.attach(model, optimizer)
        for number in range(3):
            backward(model, number + 10)
            optimizer.zero_grad()
            if number == 0:
                with pytest.warns(RuntimeWarning, match="discarded"):
                    backward(model, number)
            else:
                backward(model, number)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
            optimizer.step()
            optimizer.zero_grad()
            assert factor_of(reducer) == pytest.approx(0.05 / norm, rel=1e-5)

    def test_a_head_of_another_size_is_no_trouble(self) -> None:
        """Its parameters replaced between backward and step: nothing is measured, nothing dies."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        backward(model, 0)
        for part, shape in (("weight", (5, 8)), ("bias", (5,))):
            param = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
            param.grad = torch.ones_like(param)
            setattr(model[2], part, param)
        optimizer.step()
        assert factor_of(reducer) == 1

    def test_an_error_while_measuring_leaves_the_step_alone(self) -> None:
        """The step is made as without us; told once."""

        def fail(*_: object) -> None:
            raise ValueError("no such thing")

        ends = []
        for broken in (False, True):
            model, optimizer = make()
            reducer = primum.attach(model, optimizer)
            if broken:
                reducer._watch._before_step = fail
            for number in range(3):
                optimizer.zero_grad()
                backward(model, number)
                if broken and number == 0:
                    with pytest.warns(RuntimeWarning, match="not measure .*: ValueError: no such"):
                        optimizer.step()
                else:
                    optimizer.step()
            ends.append([param.detach().clone() for param in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))

    def test_steps_without_gradients(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        optimizer.step()
        assert factor_of(reducer) == 1
        backward(model, 0)
        optimizer.zero_grad()
        optimizer.step()
        assert factor_of(reducer) == 1

    def test_head_used_twice(self) -> None:
        """Both calls count: their gradients arrive one after the other and are summed."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        for number in range(2):
            optimizer.zero_grad()
            (one, labels), (two, _) = batch(number, 24), batch(number + 5, 24)
            with (
                pytest.warns(RuntimeWarning, match="more than once")
                if not number
                else nullcontext()
            ):
                F.cross_entropy(model(one) + model(two), labels).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3).item()
            optimizer.step()
            assert factor_of(reducer) == pytest.approx(1e-3 / norm, rel=1e-5)

    def test_resumes_bit_for_bit(self) -> None:
        """The factor is part of the state."""

        def step(model: nn.Module, optimizer: optim.Optimizer, number: int) -> None:
            optimizer.zero_grad()
            backward(model, number)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()

        model, optimizer = make(optim.AdamW, ADAMW)
        reducer = primum.attach(model, optimizer)
        for number in range(4):
            step(model, optimizer, number)
        saved = copy.deepcopy(
            {"model": model.state_dict(), "opt": optimizer.state_dict(), "r": reducer.state_dict()}
        )
        for number in range(4, 7):
            step(model, optimizer, number)
        again, other = make(optim.AdamW, ADAMW, seed=1)
        again.load_state_dict(saved["model"])
        other.load_state_dict(saved["opt"])
        resumed = primum.attach(again, other)
        resumed.load_state_dict(saved["r"])
        for number in range(4, 7):
            step(again, other, number)
        torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)

    def test_observed_training_is_measured_too(self) -> None:
        model, optimizer = make()
        reducer = primum.observe(model, optimizer)
        twin, other = make()
        for number in range(2):
            for net, own in ((model, optimizer), (twin, other)):
                own.zero_grad()
                backward(net, number)
                norm = nn.utils.clip_grad_norm_(net.parameters(), 0.05).item()
            assert_close(gradients(model), gradients(twin), 0.0)
            optimizer.step()
            other.step()
            assert factor_of(reducer) == pytest.approx(0.05 / norm, rel=1e-5)
