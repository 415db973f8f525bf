"""Mixed precision as loops have it: autocast, GradScaler, fused optimizers, all at once."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import ADAMW, BOTH, batch, make, report_of

SCALE = 2.0**12


def usual_loop(kind: Any, options: Any, dtype: torch.dtype | None) -> list[Tensor]:
    """Autocast, scaler, accumulation, unscaling, clipping, a schedule. -> weights of each pass."""
    model, optimizer = make(kind, options, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=dtype is torch.float16)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    reducer = primum.attach(model, optimizer, scaler=scaler)
    found = []
    for number in range(4):
        optimizer.zero_grad()
        for part in range(2):
            inputs, labels = batch(2 * number + part, 24, dtype=torch.float32)
            with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
                loss = F.cross_entropy(model(inputs), labels) / 2
            scaler.scale(loss).backward()
            found.append(report_of(reducer).extra_weights)
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    assert report_of(reducer).fallbacks == 0
    return found


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_everything_at_once(kind: Any, options: Any, dtype: torch.dtype) -> None:
    """The weights are those of the loop in float32, as far as half precision goes."""
    found, expected = (usual_loop(kind, options, each) for each in (dtype, None))
    assert max(float(each.max()) for each in expected) > 0.1
    apart = torch.stack(found) - torch.stack(expected)
    assert all(each.dtype == torch.float32 for each in found)
    assert apart.abs().mean() < 0.1 * torch.stack(expected).mean()


def test_overflow_under_a_scaler_that_was_not_passed() -> None:
    """Nobody told us that the step will be skipped: it counts as trouble, and says what to do."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    reducer = primum.attach(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    inputs, labels = batch(0, 24)
    with pytest.warns(RuntimeWarning, match="step's values were not finite.*pass it as scaler="):
        scaler.scale(F.cross_entropy(model(inputs) * torch.inf, labels)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert report_of(reducer).fallbacks == 1
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


class TestFused:
    """Fused optimizers undo the scale themselves, within their step."""

    def steps(self, fused: bool, recipe: str, overflow: bool) -> tuple[list[Tensor], Any, Any]:
        """Weights of four steps; one between them overflows, in the backbone, if so wished."""
        model, optimizer = make(optim.AdamW, ADAMW | {"fused": fused}, dtype=torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        reducer = primum.attach(model, optimizer, scaler=scaler, recipe=recipe)
        found = []
        for number in (0, 1, 99, 2, 3) if overflow else range(4):
            optimizer.zero_grad()
            inputs, labels = batch(number, 24, dtype=torch.float32)
            scaler.scale(F.cross_entropy(model(inputs), labels)).backward()
            if number == 99:
                model[0].weight.grad[0, 0] = torch.inf
            else:
                found.append(report_of(reducer).extra_weights)
            scaler.step(optimizer)
            scaler.update()
            if number == 99:
                scaler.update(SCALE)
        return found, model.state_dict(), reducer.state_dict()["recipe_state"]

    @pytest.mark.parametrize("recipe", ["primum", "paper"])
    def test_same_weights(self, recipe: str) -> None:
        found, expected = (self.steps(fused, recipe, False)[0] for fused in (True, False))
        assert max(float(each.max()) for each in expected) > 0.01
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("recipe", ["primum", "paper"])
    def test_a_skipped_step_never_happened(self, recipe: str) -> None:
        """The optimizer's `step` runs then, but does nothing, and leaves gradients scaled."""
        found, expected = (self.steps(True, recipe, overflow) for overflow in (True, False))
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)
        assert found[2] == expected[2]
