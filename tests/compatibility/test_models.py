"""Models: what sits below, beside and after the head, and heads that are not alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import primum
from compatibility.oracle import check_step, explicit
from loops import BOTH, SGD, assert_close, batch, gradients, make, report_of


class Net(nn.Module):
    """A body, a head, and something done to the logits."""

    def __init__(self, body: nn.Module, after: Callable[[Tensor], Tensor] = lambda z: z) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(8, 4)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.head(self.body(x)))


class Attention(nn.Module):
    """Sequences [B, 5, 6] through `nn.MultiheadAttention` to features [B, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x)
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return (tokens + mixed).mean(1)


class LogitScale(nn.Module):
    """A learned temperature, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, logits: Tensor) -> Tensor:
        return logits * self.log_scale.exp()


class Checkpointed(nn.Sequential):
    """A body whose activations are computed anew in the backward pass."""

    reentrant: bool

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return result


def body(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *more, nn.Tanh())


def checkpointed(reentrant: bool) -> Checkpointed:
    made = Checkpointed(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh())
    made.reentrant = reentrant
    return made


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm": (lambda: Net(body(nn.BatchNorm1d(8))), (24,)),
    "dropout": (lambda: Net(body(nn.Dropout(0.3))), (24,)),
    "logit scale": (lambda: Net(body(), lambda z: 3 * z), (24,)),
    "soft-capping": (lambda: Net(body(), lambda z: 2 * torch.tanh(z / 2)), (24,)),
    "nn.MultiheadAttention": (lambda: Net(Attention()), (24, 5)),
    "checkpointed body": (lambda: Net(checkpointed(False)), (24,)),
    "checkpointed body, reentrant": (lambda: Net(checkpointed(True)), (24,)),
}


def losses_on(number: int, *shape: int, seed: int = 0) -> Callable[[nn.Module], Tensor]:
    """Shares of the mean loss, with the same random numbers (dropout) at every call."""
    inputs, labels = batch(number, *shape)
    labels = labels if labels.dim() == 1 else labels[:, 0]

    def losses_of(model: nn.Module) -> Tensor:
        torch.manual_seed(seed)
        x = inputs.clone().requires_grad_()  # reentrant checkpoints need one
        return F.cross_entropy(model(x), labels, reduction="none") / len(labels)

    return losses_of


@BOTH
@pytest.mark.parametrize("name", MODELS)
def test_exact_whatever_surrounds_the_head(name: str, kind: Any, options: Any) -> None:
    torch.manual_seed(0)
    made, shape = MODELS[name]
    model = made().double()
    optimizer = kind(model.parameters(), **options)
    reducer = primum.attach(model, optimizer, head="head")
    most = [
        check_step(
            model,
            [optimizer],
            reducer,
            losses_on(number, *shape),
            head="head",
            lr=options["lr"],
            gain_one=kind is optim.SGD,
        )
        for number in range(4)
    ]
    assert max(most) > 0.01


def test_batch_norm_counts_its_batches_once() -> None:
    """No second forward pass: running statistics are those of plain training."""
    torch.manual_seed(0)
    model = Net(body(nn.BatchNorm1d(8))).double()
    optimizer = optim.SGD(model.parameters(), **SGD)
    plain = copy.deepcopy(model)
    primum.attach(model, optimizer, head="head")
    losses_of = losses_on(0, 24)
    for net in (model, plain):
        losses_of(net).sum().backward()
    for found, expected in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, expected)


class Tied(nn.Module):
    """A language model of one layer whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.mix = nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 30, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.mix(self.embedding(tokens)).tanh())
        return logits


@BOTH
def test_tied_head_removes_harm_of_the_real_step(kind: Any, options: Any) -> None:
    """The embedding's share of the gradient is not predicted, yet the step does less harm.

    Harm as the head's own use of the weight sees it, of the step that the shared weight takes.
    """
    torch.manual_seed(0)
    model = Tied().double()
    optimizer = kind(model.parameters(), **options)
    reducer = primum.attach(model, optimizer, per="sample")
    removed = 0.0
    for number in range(8):
        rng = torch.Generator().manual_seed(number)
        tokens = torch.randint(30, (16, 5), generator=rng)

        def losses_of(net: nn.Module, tokens: Tensor = tokens) -> Tensor:
            logits = net(tokens).transpose(1, 2)
            return F.cross_entropy(logits, tokens.roll(1, 1), reduction="none").mean(1) / 16

        plain = explicit(model, [optimizer], "lm_head", losses_of, lr=options["lr"])
        optimizer.zero_grad()
        losses_of(model).sum().backward()
        w = 1 + report_of(reducer).extra_weights
        ours = explicit(model, [optimizer], "lm_head", losses_of, lr=options["lr"], weights=w)
        removed += float((plain.harm - ours.harm) / plain.harm) if plain.harm else 0.0
        optimizer.step()
    assert removed / 8 > 0.15
    assert report_of(reducer).fallbacks == 0


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x).tanh()
        return self.actor(features), self.critic(features)


class TestSeveralHeads:
    def losses(self, model: nn.Module, number: int) -> tuple[Tensor, Tensor]:
        inputs, labels = batch(number, 24)
        logits, values = model(inputs)
        one = F.cross_entropy(logits, labels, reduction="none")
        return one, (values.squeeze(1) - labels).square()

    def run(self, head: str, loss_of: Callable[[Tensor, Tensor], Tensor], *, by_call: bool) -> Any:
        """Four steps; each gradient is that of the loss weighted as reported. -> the reducer."""
        torch.manual_seed(0)
        model = TwoHeads().double()
        optimizer = optim.SGD(model.parameters(), **SGD)
        reducer = primum.attach(model, optimizer, head=head)
        for number in range(4):
            twin = copy.deepcopy(model)
            optimizer.zero_grad()
            losses = loss_of(*self.losses(model, number))
            (reducer(losses) if by_call else losses.mean()).backward()
            w = report_of(reducer).extra_weights
            ((1 + w) * loss_of(*self.losses(twin, number))).mean().backward()
            assert_close(gradients(model), gradients(twin), 1e-12)
            optimizer.step()
        return reducer

    @pytest.mark.parametrize("head", ["actor", "critic"])
    def test_a_loss_that_uses_both_stays_plain(self, head: str) -> None:
        said = rf"'{head}' is only part of .* compute the loss as loss = reducer\(losses\)"
        with pytest.warns(RuntimeWarning, match=said) as caught:
            reducer = self.run(head, torch.add, by_call=False)
        assert len(caught) == 1
        assert report_of(reducer).extra_weights.max() == 0

    @pytest.mark.parametrize("head", ["actor", "critic"])
    def test_the_explicit_form_weighs_the_sum(self, head: str) -> None:
        reducer = self.run(head, torch.add, by_call=True)
        assert report_of(reducer).extra_weights.max() > 0.01

    def test_a_second_output_that_the_loss_does_not_use(self) -> None:
        """As the first pass shows, which is plain; no warning. The critic gets no gradient."""
        reducer = self.run("actor", lambda one, two: one + 0 * two, by_call=False)
        assert report_of(reducer).extra_weights.max() > 0.01
        assert report_of(reducer).fallbacks == 0


class Twice(nn.Module):
    """One head for two views of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh()) + self.head(self.body(-x).tanh())


def test_head_used_twice_is_exact_in_the_explicit_form() -> None:
    torch.manual_seed(0)
    model = Twice().double()
    optimizer = optim.SGD(model.parameters(), **SGD)
    reducer = primum.attach(model, optimizer)
    for number in range(4):
        inputs, labels = batch(number, 24)

        def losses_of(net: nn.Module, x: Tensor = inputs, y: Tensor = labels) -> Tensor:
            return F.cross_entropy(net(x), y, reduction="none") / len(y)

        expected = explicit(model, [optimizer], "head", losses_of, lr=SGD["lr"])
        twin = copy.deepcopy(model)
        reducer(24 * losses_of(model)).backward()
        report = report_of(reducer)
        torch.testing.assert_close(report.drift, expected.drift, rtol=1e-6, atol=1e-9)
        assert report.extra_weights.max() > 0.01
        ((1 + report.extra_weights) * losses_of(twin)).sum().backward()
        assert_close(gradients(model), gradients(twin), 1e-12)
        optimizer.step()
        optimizer.zero_grad()


def test_head_used_twice_removes_harm_under_the_hook() -> None:
    """There, each call is weighed by itself, and neither sees the other's gradient."""
    torch.manual_seed(0)
    model = Twice().double()
    optimizer = optim.SGD(model.parameters(), **SGD)
    primum.attach(model, optimizer)
    removed = 0.0
    for number in range(8):
        inputs, labels = batch(number, 24)

        def losses_of(net: nn.Module, x: Tensor = inputs, y: Tensor = labels) -> Tensor:
            return F.cross_entropy(net(x), y, reduction="none") / len(y)

        plain = explicit(model, [optimizer], "head", losses_of, lr=SGD["lr"])
        before = torch.cat([p.detach().flatten() for p in model.head.parameters()])
        loss = losses_of(model).sum()
        said = pytest.warns(RuntimeWarning, match="ran more than once in one backward pass")
        with nullcontext() if number else said:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after = torch.cat([p.detach().flatten() for p in model.head.parameters()])
        harm = (plain.gradients @ (after - before) / SGD["lr"]).clamp_min(0).sum()
        removed += float((plain.harm - harm) / plain.harm)
    assert removed / 8 > 0.15


@pytest.mark.parametrize("by_call", [False, True])
def test_parameters_after_the_head(by_call: bool) -> None:
    """The hook weighs what lies below the head's output; the explicit form weighs the loss."""
    torch.manual_seed(0)
    model = Net(body(), LogitScale()).double()
    optimizer = optim.SGD(model.parameters(), **SGD)
    reducer = primum.attach(model, optimizer, head="head")
    for number in range(4):
        twin, plain = copy.deepcopy(model), copy.deepcopy(model)
        shares = losses_on(number, 24)(model)
        (reducer(24 * shares) if by_call else shares.sum()).backward()
        w = report_of(reducer).extra_weights
        ((1 + w) * losses_on(number, 24)(twin)).sum().backward()
        losses_on(number, 24)(plain).sum().backward()
        scales = [dict(net.named_parameters())["after.log_scale"] for net in (model, twin, plain)]
        assert_close(gradients(model.body), gradients(twin.body), 1e-12)
        assert_close(gradients(model.head), gradients(twin.head), 1e-12)
        torch.testing.assert_close(scales[0].grad, scales[1 if by_call else 2].grad)
        assert not torch.allclose(scales[1].grad, scales[2].grad, rtol=1e-3)
        optimizer.step()
        optimizer.zero_grad()


def test_penalty_on_the_heads_weight_is_not_seen() -> None:
    """What reaches `.grad` past the head's output is not predicted: the drift is that without it.

    `weight_decay` of the optimizer is.
    """
    model, optimizer = make(optim.SGD, {"lr": 0.1, "momentum": 0.9})
    reducer = primum.attach(model, optimizer)
    inputs, labels = batch(0, 24)
    expected = explicit(model, [optimizer], "2", losses_on(0, 24), lr=0.1)
    loss = F.cross_entropy(model(inputs), labels)
    (loss + 0.1 * model[2].weight.square().sum()).backward()
    torch.testing.assert_close(report_of(reducer).drift, expected.drift, rtol=1e-6, atol=1e-9)
    assert report_of(reducer).applied
