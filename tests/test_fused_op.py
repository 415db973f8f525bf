"""The fused loss as an operation: compiled, in half precision, with a GradScaler, its memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from loops import assert_close, report_of
from primum import fused_op
from test_gpu_ready import SYNCS, Count
from words import Run, pair

BLOCKS = pytest.mark.parametrize("chunk_size", [None, 5], ids=["whole", "blocks"])


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="torch 2.8 has no such tag")
def test_what_runs_python_is_kept_out_of_cuda_graphs() -> None:
    unsafe = torch.Tag.cudagraph_unsafe
    assert unsafe in torch.ops.primum.arrive.default.tags
    assert unsafe in torch.ops.primum.token_gradients.default.tags
    assert unsafe not in torch.ops.primum.token_losses.default.tags


class TestCompiled:
    @pytest.mark.parametrize(("backend", "chunk_size"), [("aot_eager", None), ("inductor", 5)])
    def test_whole_graph(self, backend: str, chunk_size: int | None) -> None:
        """Model and loss in one graph, no break; batches of another size as well."""
        torch.compiler.reset()
        eager, compiled = pair(dtype=torch.float32)

        @torch.compile(fullgraph=True, backend=backend)
        def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
            return compiled.fused(inputs, targets, chunk_size=chunk_size)

        for number, rows in enumerate((6, 6, 8)):
            inputs, targets = eager.batch(number, rows)
            expected, found = eager.fused(inputs, targets, chunk_size=chunk_size), None
            found = loss_of(inputs, targets)
            torch.testing.assert_close(found, expected)
            expected.backward()
            found.backward()
            one, other = report_of(eager.reducer), report_of(compiled.reducer)
            assert other.applied
            assert other.fallbacks == 0
            # The solver may take another path after a different rounding.
            torch.testing.assert_close(other.extra_weights, one.extra_weights, rtol=1e-2, atol=1e-3)
            assert_close(compiled.gradients(), eager.gradients(), 1e-3)
            for run in (eager, compiled):
                run.optimizer.step()
                run.optimizer.zero_grad()

    def test_paused_and_removed(self) -> None:
        torch.compiler.reset()
        run = Run(dtype=torch.float32)
        run.warm_up()
        loss_of = torch.compile(run.fused, fullgraph=True, backend="aot_eager")
        loss_of(*run.batch(0)).backward()
        assert report_of(run.reducer).applied
        run.optimizer.step()
        for how in ("paused", "removed"):
            run.optimizer.zero_grad()
            params = list(run.model.parameters())
            with run.reducer.paused():
                expected = torch.autograd.grad(run.called(*run.batch(1)), params)
            loss = loss_of(*run.batch(1))
            if how == "paused":
                with run.reducer.paused():
                    loss.backward()
            else:
                run.reducer.remove()
                loss.backward()
            assert_close(run.gradients(), list(expected), 1e-5)

    def test_the_operations_are_sound(self) -> None:
        """Schemas, shapes of fake tensors and aliasing, by torch's own check."""
        run = Run(dtype=torch.float32)
        inputs, targets = run.batch(0)
        hidden = run.model.hidden(inputs).detach().flatten(0, 1)
        head = run.model.head
        given = hidden, head.weight.detach(), head.bias.detach(), targets.flatten()
        settings = -100, 0.1, 5, torch.float32
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(fused_op.token_losses, (*given, *settings), test_utils=tests)
        losses, normaliser = fused_op.token_losses(*given, *settings)
        rest = [6, 9], -1, True, False, [True, True, True]
        for needed in ([True, True, True], [False, True, False]):
            arguments = (torch.ones_like(losses), normaliser, *given, *settings, *rest[:-1], needed)
            torch.library.opcheck(fused_op.token_gradients, arguments, test_utils=tests)


class TestPrecision:
    @BLOCKS
    @pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
    def test_autocast(self, low: torch.dtype, chunk_size: int | None) -> None:
        """Logits as autocast makes them, losses and sums in float32."""
        called, fused = pair(dtype=torch.float32)
        with torch.autocast("cpu", low):
            expected = called.called(*called.batch(0))
            found = fused.fused(*fused.batch(0), chunk_size=chunk_size)
        assert found.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        expected.backward()
        found.backward()
        one, other = report_of(called.reducer), report_of(fused.reducer)
        assert other.fallbacks == 0
        assert other.applied
        assert one.extra_weights.max() > 0.01
        # Three digits in the gradients, and a little less after the solver.
        torch.testing.assert_close(other.extra_weights, one.extra_weights, rtol=0.05, atol=0.02)
        assert_close(fused.gradients(), called.gradients(), 0.02)
        assert all(p.grad.dtype == torch.float32 for p in fused.model.parameters())

    @BLOCKS
    @pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
    def test_models_in_half_precision(self, low: torch.dtype, chunk_size: int | None) -> None:
        called, fused = Run("SGD", dtype=low), Run("SGD", dtype=low)
        expected = called.called(*called.batch(0))
        found = fused.fused(*fused.batch(0), chunk_size=chunk_size)
        assert found.dtype == torch.float32  # not rounded to the model's type
        torch.testing.assert_close(found, expected.float(), rtol=0.01, atol=0.01)
        expected.backward()
        found.backward()
        assert report_of(fused.reducer).fallbacks == 0
        assert report_of(fused.reducer).applied
        assert_close(
            [grad.float() for grad in fused.gradients()],
            [grad.float() for grad in called.gradients()],
            0.05,
        )
        assert all(p.grad.dtype == low for p in fused.model.parameters())

    @BLOCKS
    def test_grad_scaler(self, chunk_size: int | None) -> None:
        """The same weights as without, also where the scale grows."""
        plain, scaled = pair("SGD")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        scaled = Run("SGD", scaler=scaler)
        scaled.warm_up()
        for number in range(3):
            plain.fused(*plain.batch(number), chunk_size=chunk_size).backward()
            loss = scaled.fused(*scaled.batch(number), chunk_size=chunk_size)
            scaler.scale(loss).backward()
            one, other = report_of(plain.reducer), report_of(scaled.reducer)
            torch.testing.assert_close(other.extra_weights, one.extra_weights)
            torch.testing.assert_close(other.drift, one.drift)
            scaler.step(scaled.optimizer)
            scaler.update()
            plain.optimizer.step()
            for run in (plain, scaled):
                run.optimizer.zero_grad()
        assert scaler.get_scale() > 32

    def test_a_large_vocabulary_under_a_scaler(self) -> None:
        plain = Run("AdamW", words=2000, width=32)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaled = Run("AdamW", words=2000, width=32, scaler=scaler)
        for run in (plain, scaled):
            run.warm_up()
            run.reducer.measure_exact = True
        inputs, targets = plain.batch(0, 16, 32)
        plain.fused(inputs, targets).backward()
        scaler.scale(scaled.fused(inputs, targets)).backward()
        one, other = report_of(plain.reducer), report_of(scaled.reducer)
        assert other.approximate
        assert other.extra_weights.max() > 0.01
        torch.testing.assert_close(other.extra_weights, one.extra_weights)
        torch.testing.assert_close(other.exact().drift_after, one.exact().drift_after)


class TestDevices:
    @pytest.mark.parametrize("kind", ["SGD", "AdamW"])
    @pytest.mark.parametrize(
        ("words", "chunk_size"), [(37, 5), (2000, None)], ids=["exact", "sketch"]
    )
    def test_no_host_sync(
        self, kind: str, words: int, chunk_size: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing waits for a device, in forward or backward, where a look at a value would."""
        monkeypatch.setattr(fused_op, "token_losses", fused_op.losses_of)
        monkeypatch.setattr(fused_op, "token_gradients", fused_op.gradients_of)
        for name in ("solve", "rescale", "streamed"):
            monkeypatch.setattr(sys.modules[f"primum.{name}"], "on_host", lambda value: False)
        run = Run(kind, words=words, width=32, dtype=torch.float32)
        run.warm_up()
        inputs, targets = run.batch(0, 16, 32)
        with Count() as count:
            run.fused(inputs, targets, chunk_size=chunk_size).backward()
        assert report_of(run.reducer).weighed
        assert report_of(run.reducer).approximate is (words > 37)
        assert not set(count.names) & SYNCS


def peak_memory(run: Callable[[], None]) -> int:
    """Bytes that torch's CPU allocator held at most during `run`, over what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


class TestMemory:
    WORDS, WIDTH, TOKENS = 16_000, 128, 1024

    def measured(self, loss_of: Callable[[Run, Tensor, Tensor], Tensor]) -> int:
        run = Run(words=self.WORDS, width=self.WIDTH, bias=False, dtype=torch.float32)
        weight = run.model.head.weight
        run.optimizer.state[weight] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn_like(weight),
            "exp_avg_sq": torch.rand_like(weight),
        }
        hidden = torch.randn(self.TOKENS, self.WIDTH, requires_grad=True)
        targets = torch.randint(self.WORDS, (self.TOKENS,))
        return peak_memory(lambda: loss_of(run, hidden, targets).backward())

    def ours(self, run: Run, hidden: Tensor, targets: Tensor) -> Tensor:
        return run.reducer.linear_cross_entropy(hidden, targets)

    def test_about_a_tenth_more_than_torchs_own(self) -> None:
        """Gradients of the weight and of the hidden states, and little more."""
        needed, found = 4 * self.WIDTH * (self.WORDS + self.TOKENS), self.measured(self.ours)
        assert needed < found < 1.5 * needed
        assert found < 4 * self.WORDS * self.TOKENS / 4  # what the logits would take
        if not hasattr(F, "linear_cross_entropy"):
            return  # torch 2.13 and later

        def torchs(run: Run, hidden: Tensor, targets: Tensor) -> Tensor:
            options: Any = nn.LinearCrossEntropyOptions()
            weight = run.model.head.weight
            return F.linear_cross_entropy(hidden, weight, targets, options=options)

        assert found <= 1.12 * self.measured(torchs)  # torch 2.15: 1.1002
