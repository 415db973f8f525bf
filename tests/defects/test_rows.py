"""Whether the rows of the head's output are the samples: what is refused, and what is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import primum

from .scene import (
    Net,
    assert_equal,
    batch,
    gradients,
    net,
    plain_gradients,
    relative_error,
    report_of,
    rows_of_gradients,
    sgd,
    warned,
)

B, C, T = 12, 3, 5


class Choices(Net):
    """Multiple choice: each answer is a row of the head's output, each question a sample."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = super().forward(x.flatten(0, 1))
        return scores.view(x.shape[:2])


class Gaussian(nn.Module):
    """Mean and scale of a distribution, by a layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.mean, self.scale = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        return self.mean(features).squeeze(1), F.softplus(self.scale(features)).squeeze(1)


class Normed(Net):
    """Batch norm after the head."""

    def __init__(self, affine: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def propagation() -> Tensor:
    """A row-normalised graph over the nodes of a batch."""
    rng = torch.Generator().manual_seed(3)
    edges = (torch.rand(B, B, generator=rng, dtype=torch.float64) < 0.3).double() + torch.eye(B)
    return edges / edges.sum(1, keepdim=True)


@dataclass(frozen=True)
class Mixed:
    """A model whose rows are not samples, and its loss on what it makes of a batch."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy
    shape: tuple[int, ...] = (B,)
    labels: Callable[[Tensor], Tensor] = lambda labels: labels
    head: str = "head"

    def run(self, model: nn.Module, number: int) -> Tensor:
        inputs, labels = batch(number, *self.shape)
        return self.loss(model(inputs), self.labels(labels))


def mixed(finish: Callable[[Tensor, Tensor], Any]) -> Mixed:
    return Mixed(lambda: Net(4, finish))


MIXED = {
    "multiple choice": Mixed(Choices, shape=(B, C), labels=lambda labels: labels[:, 0] % C),
    "two output layers": Mixed(
        Gaussian,
        loss=lambda output, labels: F.gaussian_nll_loss(output[0], labels.double(), output[1]),
        head="mean",
    ),
    "batch norm": Mixed(lambda: Normed(True)),
    "batch norm, not affine": Mixed(lambda: Normed(False)),
    "centred over the batch": mixed(lambda logits, _: logits - logits.mean(0)),
    "softmax over the batch": mixed(lambda logits, _: 5 * torch.softmax(logits, 0)),
    "graph propagation": mixed(lambda logits, _: propagation() @ logits),
}


def made(case: Mixed) -> nn.Module:
    torch.manual_seed(0)
    return case.make().double()


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_are_not_samples_stay_plain_and_the_explicit_form_is_named(name: str) -> None:
    """From the first step on: it is the only one in which everything is still to lose."""
    case = MIXED[name]
    model = made(case)
    optimizer = sgd(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        primum.attach(model, optimizer, head=case.head)
        for number in range(3):
            expected = plain_gradients(model, lambda twin, n=number: case.run(twin, n))
            optimizer.zero_grad()
            case.run(model, number).backward()
            assert_equal(gradients(model), expected)
            optimizer.step()
    own = [each for each in caught if "primum" in str(each.message)]
    assert len(own) == 1
    assert issubclass(own[0].category, RuntimeWarning)
    assert "reducer(losses)" in str(own[0].message)


def test_a_value_layer_beside_the_policy() -> None:
    """An actor-critic with a shared trunk, as in PPO."""

    class ActorCritic(Gaussian):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            features = self.body(x)
            return {"logits": self.mean(features), "value": self.scale(features).squeeze(1)}

    torch.manual_seed(0)
    model = ActorCritic().double()
    optimizer = sgd(model)

    def run(net: nn.Module) -> Tensor:
        inputs, labels = batch(0, B)
        output = net(inputs)
        policy = F.cross_entropy(output["logits"], labels)
        return policy + 0.5 * F.mse_loss(output["value"], labels.double())

    expected = plain_gradients(model, run)
    primum.attach(model, optimizer, head="mean")
    with warned() as messages:
        run(model).backward()
    assert_equal(gradients(model), expected)
    assert len(messages) == 1
    assert "reducer(losses)" in messages[0]


# --- what must go on as it is ---------------------------------------------------------------------


@dataclass(frozen=True)
class Ordinary:
    """A model whose rows are samples; `losses` are one per row that gets a weight."""

    finish: Callable[[Tensor, Tensor], Any] | None
    losses: Callable[[Any, Tensor], Tensor]
    shape: tuple[int, ...] = (B,)
    outputs: int = 4
    labels: Callable[[Tensor], Tensor] = lambda labels: labels
    total: Callable[[Any, Tensor], Tensor] | None = None  # instead of the mean of the losses
    beside: Callable[[Any], Tensor] = lambda output: torch.zeros(())


def each(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")


def with_loss(logits: Tensor, features: Tensor) -> dict[str, Any]:
    """As Transformers' models do: they know the labels, here those of the only batch."""
    _, labels = batch(0, B)
    loss = F.cross_entropy(logits, labels)
    return {"loss": loss, "logits": logits, "hidden_states": (features, 2 * features)}


ORDINARY = {
    "the head's own output": Ordinary(None, each),
    "one output, squeezed": Ordinary(
        lambda logits, _: logits.squeeze(1),
        lambda output, y: F.binary_cross_entropy_with_logits(output, y, reduction="none"),
        outputs=1,
        labels=lambda labels: (labels % 2).double(),
    ),
    "a language model": Ordinary(None, each, shape=(B, T)),
    "positions as rows, viewed": Ordinary(
        lambda logits, _: logits.view(B, T, 4), each, shape=(B * T,)
    ),
    "mean over positions": Ordinary(
        lambda logits, _: logits.mean(1), each, (B, T), labels=lambda labels: labels[:, 0]
    ),
    "LogSoftmax": Ordinary(
        lambda logits, _: nn.LogSoftmax(dim=-1)(logits),
        lambda output, y: F.nll_loss(output, y, reduction="none"),
    ),
    "a dict with loss and hidden states": Ordinary(
        with_loss,
        lambda output, y: each(output["logits"], y),
        total=lambda output, _: output["loss"],
    ),
    "a scalar loss beside the head": Ordinary(
        lambda logits, features: {"logits": logits, "balance": features.square().mean()},
        lambda output, y: each(output["logits"], y),
        beside=lambda output: 0.1 * output["balance"],
    ),
}


@pytest.mark.parametrize("given", [False, True], ids=["found", "given"])
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_heads_are_reweighted_without_a_word(name: str, given: bool) -> None:
    case = ORDINARY[name]
    model = net(case.outputs, case.finish)
    inputs, labels = batch(0, *case.shape)
    labels = case.labels(labels)
    reducer = primum.attach(model, sgd(model), head="head" if given else None)
    output = model(inputs)
    total = case.losses(output, labels).mean() if case.total is None else case.total(output, labels)
    (total + case.beside(output)).backward()  # a warning would be an error
    report = report_of(reducer)
    assert report.as_dict()["applied"] == 1
    assert report.fallbacks == 0
    assert report.extra_weights.max() > 0.05
    reducer.remove()
    found = gradients(model)
    output = model(inputs)
    losses = case.losses(output, labels)
    weighted = ((1 + report.extra_weights) * losses).mean() + case.beside(output)
    assert relative_error(found, torch.autograd.grad(weighted, list(model.parameters()))) < 1e-6


# --- several calls --------------------------------------------------------------------------------


class Critic(Net):
    """Real and fake samples by a call each, as a GAN's discriminator is trained."""

    def __init__(self) -> None:
        super().__init__(1, lambda logits, _: logits.squeeze(1))


def losses_of(critic: nn.Module, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
    score = F.binary_cross_entropy_with_logits
    ones, zeros = torch.ones(B).double(), torch.zeros(B).double()
    return (
        score(critic(real), ones, reduction="none"),
        score(critic(fake), zeros, reduction="none"),
    )


def critic() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Critic().double(), batch(0, B)[0], batch(1, B)[0]


def test_two_calls_in_one_backward_pass_name_the_explicit_form() -> None:
    model, real, fake = critic()
    primum.attach(model, sgd(model))
    first, second = losses_of(model, real, fake)
    with pytest.warns(RuntimeWarning, match=r"reducer\(losses\)"):
        (first.mean() + second.mean()).backward()


def test_the_explicit_form_solves_two_calls_as_one_call_on_all_rows() -> None:
    found = []
    for calls in (1, 2):
        model, real, fake = critic()
        reducer = primum.attach(model, sgd(model))
        if calls == 2:
            losses = torch.cat(losses_of(model, real, fake))
        else:
            targets = torch.cat((torch.ones(B), torch.zeros(B))).double()
            output = model(torch.cat((real, fake)))
            losses = F.binary_cross_entropy_with_logits(output, targets, reduction="none")
        reducer(losses).backward()
        found.append((report_of(reducer).extra_weights, gradients(model)))
    (w, expected), (v, of_two) = found
    assert w.max() > 0.05
    torch.testing.assert_close(v, w, rtol=1e-9, atol=1e-12)
    assert relative_error(of_two, expected) < 1e-12


# --- the right layer ------------------------------------------------------------------------------


class Unused(nn.Module):
    """A layer that nothing calls, registered after the one that makes the output."""

    def __init__(self, unused: bool = True) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.out = nn.Linear(8, 4)
        if unused:
            self.old = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.trunk(x))
        return made


def unused(is_there: bool = True) -> Unused:
    torch.manual_seed(0)
    return Unused(is_there).double()


def weights_of(model: nn.Module, **options: Any) -> Tensor:
    reducer = primum.attach(model, sgd(model), **options)
    inputs, labels = batch(0, B)
    F.cross_entropy(model(inputs), labels).backward()
    return report_of(reducer).extra_weights


def test_an_unused_layer_after_a_given_head_changes_nothing() -> None:
    expected = weights_of(unused(False))
    assert expected.max() > 0.05
    assert torch.equal(weights_of(unused(), head="out"), expected)


def test_an_unused_layer_is_not_taken_for_the_head_without_a_word() -> None:
    """Refused, passed over, or said in the first steps, with the way out."""
    model = unused()
    optimizer = sgd(model)
    try:
        reducer = primum.attach(model, optimizer)
    except ValueError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert "head=" in refused
        return
    with warned() as messages:
        for number in range(4):
            optimizer.zero_grad()
            inputs, labels = batch(number, B)
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    right = reducer.head_name == "out" and reducer.last is not None
    assert right or any("head=" in message for message in messages), messages


# --- rows of the report, the mode of the head -----------------------------------------------------


@pytest.mark.parametrize("per", ["sample", "token"])
def test_rows_without_a_loss_do_not_count_in_the_shares(per: str) -> None:
    model = net()
    shape = (B,) if per == "sample" else (B, T)
    inputs, labels = batch(0, *shape)
    ignored = torch.arange(labels.numel()).view(shape) % 3 != 0
    reducer = primum.attach(model, sgd(model), per=per)
    logits = model(inputs).flatten(0, -2)
    F.cross_entropy(logits, labels.masked_fill(ignored, -100).flatten()).backward()
    report = report_of(reducer)
    counted = report.drift[~ignored.flatten()]
    assert (counted > 0).any()
    assert report.drift[ignored.flatten()].eq(0).all()
    expected = (counted > 0).double().mean()
    assert float(report.harmed_before) == pytest.approx(float(expected))
    assert report.as_dict()["harmed_before"] == pytest.approx(float(expected))
    after = (report.drift_after[~ignored.flatten()] > 0).double().mean()
    assert float(report.harmed_after) == pytest.approx(float(after))


@pytest.mark.parametrize("part", ["model", "head"])
def test_weights_are_applied_in_eval_mode_if_the_head_is_trained(part: str) -> None:
    """Fine-tuning with frozen batch norm: `model.eval()` with gradients."""
    expected = weights_of(net())
    assert expected.max() > 0.05
    model = net()
    (model if part == "model" else model.head).eval()
    assert torch.equal(weights_of(model), expected)


def test_a_fisher_pass_in_eval_mode_is_not_told_to_train() -> None:
    """As elastic weight consolidation does it: gradients that are read, of each batch."""
    model = net()
    optimizer = sgd(model)
    primum.attach(model, optimizer)
    inputs, labels = batch(0, B)
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    model.eval()
    fisher = [torch.zeros_like(p) for p in model.parameters()]
    with warned() as messages:
        for number in range(3):
            inputs, labels = batch(number, B)
            loss = F.cross_entropy(model(inputs), labels)
            for total, grad in zip(
                fisher, torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                total += grad.square()
    assert not any("model.train()" in message for message in messages)


def test_rows_of_gradients_add_up() -> None:
    """Of the reference that other files use."""
    model = net()
    inputs, labels = batch(0, B)
    losses = F.cross_entropy(model(inputs), labels, reduction="none")
    rows = rows_of_gradients(losses, list(model.parameters()))
    expected = plain_gradients(model, lambda twin: F.cross_entropy(twin(inputs), labels))
    total = torch.cat([grad.flatten() for grad in expected if grad is not None])
    torch.testing.assert_close(rows.sum(0), total)
