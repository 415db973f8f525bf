"""From a batch to the problem of its step: large heads in blocks, tokens, memory."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import ADAMW, BOTH, PRECISE, SGD, assert_close, gradients, make, report_of, stir
from oracles import gradients_of, gram_of
from predicting import Factor, predict_head
from primum import Primum, Problem, solve
from primum.kernel.batch import HeadBatch
from primum.kernel.builder import Builder
from primum.kernel.gram import Dense, MatrixFree
from primum.kernel.head import Head
from primum.paper import Paper

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (optim.SGD, SGD),
    "Nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "AdamW": (optim.AdamW, ADAMW),
    "amsgrad": (optim.AdamW, ADAMW | {"amsgrad": True}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1}),
    "maximize": (optim.AdamW, ADAMW | {"maximize": True}),
}


def head_of(
    kind: str, bias: bool, *, outputs: int = 11, apart: bool = False
) -> tuple[nn.Linear, dict[str, optim.Optimizer]]:
    """A head whose optimizer has stepped a few times on noise."""
    torch.manual_seed(0)
    head = nn.Linear(6, outputs, bias=bias).double()
    cls, options = OPTIMIZERS[kind]
    groups: list[dict[str, Any]] = [{"params": list(head.parameters())}]
    if apart:
        groups = [{"params": [head.weight]}, {"params": [head.bias], "lr": 0.03}]
    optimizer = cls(groups, **options)
    for _ in range(3):
        for param in head.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    optimizer.zero_grad()
    return head, dict.fromkeys(("weight", "bias") if bias else ("weight",), optimizer)


def captured(shape: tuple[int, ...], outputs: int = 11, **others: Any) -> HeadBatch:
    torch.manual_seed(1)
    x = torch.randn(*shape, 6, dtype=torch.float64)
    return HeadBatch(x, 0.1 * torch.randn(*shape, outputs, dtype=torch.float64), **others)


def two_outputs(features: Tensor, output_gradients: Tensor) -> Iterator[slice]:
    outputs = output_gradients.shape[-1]
    return (slice(i, min(i + 2, outputs)) for i in range(0, outputs, 2))


class TestBlocks:
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    @pytest.mark.parametrize("shape", [(5,), (5, 3), (1, 4), (9, 1)])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("accumulated", [False, True])
    def test_are_the_whole(
        self,
        kind: str,
        shape: tuple[int, ...],
        bias: bool,
        accumulated: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Against the gradients of all samples formed at once, and the update of the whole head."""
        monkeypatch.setattr("primum.kernel.builder.sample_blocks", two_outputs)
        head, owners = head_of(kind, bias)
        if accumulated:
            for param in head.parameters():
                param.grad = torch.randn_like(param)
        seen = captured(shape, unscale=torch.tensor(0.5))
        factor = torch.tensor(0.3, dtype=torch.float64)
        x = F.pad(seen.inputs, (0, 1), value=1.0) if bias else seen.inputs
        g = seen.output_grads * 0.5
        rows = gradients_of(MatrixFree(x, g, 1.0))
        total = rows.sum(0)
        if accumulated:
            grads = [param.grad.view(11, -1) for param in head.parameters()]
            total = total + 0.25 * torch.cat(grads, 1)
        update = predict_head(head, owners, total, factor=factor)
        uphill = kind == "maximize"
        with torch.no_grad():
            own = Head(head, owners, scale=Factor(factor, torch.tensor(0.25)))
            problem = Builder()._in_blocks(own, seen, Primum())
            euclidean = Builder()._in_blocks(own, seen, Paper()).step_norm
        gram, drift = problem.gram, problem.drift
        close: dict[str, float] = {"rtol": 1e-9, "atol": 1e-12}
        assert isinstance(gram, Dense)
        torch.testing.assert_close(gram.matrix, gram_of(rows, update.gain), **close)
        expected = (rows * update.step).sum((1, 2))
        torch.testing.assert_close(drift, -expected if uphill else expected, **close)
        expected = (update.step.square() / update.gain).sum().sqrt()
        torch.testing.assert_close(problem.step_norm, expected, **close)
        torch.testing.assert_close(euclidean, update.step.norm(), **close)
        assert problem.lr == update.lr

    def test_bias_in_another_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("primum.kernel.builder.sample_blocks", two_outputs)
        head, owners = head_of("AdamW", True, apart=True)
        seen = captured((5, 3))
        x = F.pad(seen.inputs, (0, 1), value=1.0)
        rows = gradients_of(MatrixFree(x, seen.output_grads, 1.0))
        update = predict_head(head, owners, rows.sum(0))
        with torch.no_grad():
            problem = Builder()._in_blocks(Head(head, owners), seen, Primum())
        gram, drift = problem.gram, problem.drift
        assert isinstance(gram, Dense)
        torch.testing.assert_close(gram.matrix, gram_of(rows, update.gain), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(drift, (rows * update.step).sum((1, 2)), rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("kind", ["SGD", "AdamW"])
    @pytest.mark.parametrize("shape", [(16,), (16, 3)])
    def test_same_answer_both_ways(
        self, kind: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        head, owners = head_of(kind, True)
        stir(owners["weight"])
        answers = []
        for in_blocks in (False, True):
            monkeypatch.setattr(Builder, "_goes_in_blocks", lambda *args, value=in_blocks: value)
            with torch.no_grad():
                problem = Builder().build(Head(head, owners), captured(shape), Primum())
                solution = Primum()(problem)
            answers.append((problem.drift, solution.extra_weights, solution.objective))
        for found, expected in zip(*answers, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
        assert answers[0][1].max() > 0

    def test_an_optimizer_without_a_rule_is_seen_whole(self) -> None:
        class Own(optim.SGD):
            def step(self, closure: Any = None) -> None:
                super().step(closure)

        head = nn.Linear(6, 4).double()
        own = Own(head.parameters(), lr=0.1)
        reducer = primum.attach(head, own)
        seen = captured((5, 3), 4)
        (head(seen.inputs) * seen.output_grads).sum().backward()
        assert report_of(reducer).reason == ""
        assert report_of(reducer).fallbacks == 0


class TestTokens:
    @BOTH
    @pytest.mark.parametrize("bias", [True, False])
    def test_against_explicit_gradients_of_every_token(
        self, kind: Any, options: Any, bias: bool
    ) -> None:
        model, optimizer = make(kind, options, bias=bias)
        reducer = primum.attach(model, optimizer, per="token", **PRECISE)
        rng = torch.Generator().manual_seed(3)
        inputs = torch.randn(4, 5, 6, generator=rng, dtype=torch.float64)
        labels = torch.randint(4, (4, 5), generator=rng)
        labels[1, 2:] = -100  # padding
        twin = copy.deepcopy(model)

        def loss_of(net: nn.Module, reduction: str = "mean") -> Tensor:
            logits = net(inputs).flatten(0, 1)
            return F.cross_entropy(logits, labels.flatten(), reduction=reduction)

        loss_of(model).backward()
        report = report_of(reducer)
        assert report.extra_weights.shape == (20,)
        assert report.extra_weights.max() > 0.01
        padding = (labels == -100).flatten()
        assert report.drift[padding].abs().max() == 0
        losses = loss_of(twin, "none") / 17
        rows = []
        for loss in losses:
            grads = torch.autograd.grad(loss, list(twin[2].parameters()), retain_graph=True)
            rows.append(torch.cat([each.flatten() for each in grads]))
        per_token = torch.stack(rows)
        before = torch.cat([p.detach().flatten() for p in twin[2].parameters()])
        stepper = kind(twin.parameters(), **options)
        loss_of(twin).backward()
        stepper.step()
        after = torch.cat([p.detach().flatten() for p in twin[2].parameters()])
        step = (after - before) / options["lr"]
        torch.testing.assert_close(report.drift, per_token @ step, rtol=1e-6, atol=1e-10)
        if kind is optim.SGD:
            reach = 0.1 * step.norm()  # the default for tokens
            expected = solve(Problem.dense(per_token @ per_token.t(), per_token @ step, reach))
            torch.testing.assert_close(report.objective, expected.objective, rtol=1e-6, atol=1e-12)
        other, _ = make(kind, options, bias=bias)
        ((1 + report.extra_weights) * loss_of(other, "none")).sum().div(17).backward()
        assert_close(gradients(model), gradients(other), 1e-12)

    @pytest.mark.parametrize("shape", [(4, 5), (20,)])
    def test_explicit_form(self, shape: tuple[int, ...]) -> None:
        (one, first), (two, second) = make(), make()
        primum.attach(one, first, per="token")
        reducer = primum.attach(two, second, per="token")
        inputs, labels = torch.randn(4, 5, 6, dtype=torch.float64), torch.randint(4, (20,))
        F.cross_entropy(one(inputs).flatten(0, 1), labels).backward()
        losses = F.cross_entropy(two(inputs).flatten(0, 1), labels, reduction="none")
        reducer(losses.view(shape)).backward()
        assert_close(gradients(two), gradients(one), 1e-12)
        with pytest.raises(ValueError, match="the head saw 20 tokens, but there are 4 losses"):
            reducer(F.cross_entropy(two(inputs)[:, 0], labels[:4], reduction="none"))

    def test_of_flat_inputs_they_are_the_samples(self) -> None:
        (one, first), (two, second) = make(), make()
        primum.attach(one, first)
        primum.attach(two, second, per="token", radius=0.4)
        for net in (one, two):
            torch.manual_seed(0)
            F.cross_entropy(net(torch.randn(9, 6).double()), torch.randint(4, (9,))).backward()
        assert_close(gradients(two), gradients(one), 0.0)

    @pytest.mark.parametrize("per", ["tokens", None, 1])
    def test_unknown(self, per: Any) -> None:
        model, optimizer = make()
        with pytest.raises(ValueError, match='per must be "auto", "sample" or "token", got'):
            primum.attach(model, optimizer, per=per)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel, by /proc")
class TestMemory:
    @pytest.mark.parametrize("kind", ["SGD", "AdamW"])
    @pytest.mark.parametrize("per", ["sample", "token"])
    def test_language_model_head(self, kind: str, per: str) -> None:
        """32,000 words: at the peak, no more than plain training.

        Measured by the kernel, in processes of their own that give memory back at once.
        """
        frugal = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        peaks = []
        for arm in ("plain", per):
            run = subprocess.run(
                [sys.executable, str(Path(__file__).parents[1] / "lm_head.py"), kind, arm],
                capture_output=True,
                text=True,
                check=True,
                env=os.environ | frugal,
            )
            start, peak = map(int, run.stdout.split())
            peaks.append(peak - start)
        assert peaks[0] > 200 << 10  # KiB: the logits are there
        assert peaks[1] <= 1.02 * peaks[0], peaks
