"""Alg. 8 against explicit gradients of every tail parameter, plain training and `attach`."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

import primum
from paper import transcribed
from paper.explicit import per_sample_gradients
from primum.paper import Paper, PaperSettings
from primum.paper.multilayer import MultiLayer, split

CLASSES = 4


class Attention(nn.Module):
    """One pre-norm transformer block and a head over the mean of its tokens."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(
            width, 2, 12, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(tokens).mean(1))


def convolutional() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    backbone = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh())
    layers = [nn.Conv2d(4, 6, 3, stride=2), nn.GroupNorm(2, 6), nn.ReLU()]
    tail = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES))
    return backbone, tail, torch.randn(40, 1, 6, 6)


def transformer() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    return nn.Linear(5, 8), Attention(), torch.randn(40, 3, 5)


MODELS = {"convolution": convolutional, "transformer": transformer}
OPTIMIZERS = {
    "SGD": lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "Nesterov": lambda params: SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda params: AdamW(params, lr=0.01, weight_decay=0.1),
}
each_model = pytest.mark.parametrize("kind", MODELS)
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def made(kind: str) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """Backbone and tail in float64, all inputs, all labels."""
    backbone, tail, inputs = MODELS[kind]()
    labels = torch.randint(CLASSES, (len(inputs),))
    return nn.Sequential(backbone, tail).double(), inputs.double(), labels


def batches(inputs, labels, count: int, size: int = 10):
    for _ in range(count):
        rows = torch.randperm(len(labels))[:size]
        yield inputs[rows], labels[rows]


def gradients_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@each_model
@each_optimizer
def test_problem_and_weighted_gradients_are_those_of_explicit_ones(kind, name):
    """Q1, Q2 and q from one backward per sample and from the real step of a copy."""
    model, inputs, labels = made(kind)
    optimizer = OPTIMIZERS[name](model.parameters())
    reducer = MultiLayer(model[1], optimizer, cross_entropy)
    seen, solve = [], reducer.recipe.solve
    reducer.recipe.solve = lambda *problem: seen.append(problem) or solve(*problem)
    weighted = 0
    for x, y in batches(inputs, labels, 6):
        optimizer.zero_grad()
        plain, stepper = copy.deepcopy((model, optimizer))
        everything = per_sample_gradients(plain, list(plain.parameters()), x, y)
        cross_entropy(plain(x), y).backward()
        tail = list(plain[1].parameters())
        rows = everything[:, -sum(p.numel() for p in tail) :]
        gains, before = [], [p.detach().clone() for p in tail]
        for p in tail:
            state, group = stepper.state.get(p, {}), stepper.param_groups[0]
            gain = torch.full_like(p, 1.9 if name == "Nesterov" else 1.0)
            if name == "AdamW":
                t, (beta1, beta2) = int(state.get("step", 0)) + 1, group["betas"]
                v = beta2 * state.get("exp_avg_sq", 0) + (1 - beta2) * p.grad**2
                gain = (1 - beta1) / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + 1e-8)
            gains.append(gain.flatten())
        gain = torch.cat(gains)
        stepper.step()
        lr = stepper.param_groups[0]["lr"]
        moved = [(p - b).flatten() / lr for p, b in zip(tail, before, strict=True)]
        step = torch.cat(moved).detach()

        loss = reducer.backward(model[0](x), y)
        gram, metric, drift, step_squared, rate = seen[-1]
        assert loss.item() == pytest.approx(cross_entropy(model(x), y).item(), rel=1e-12)
        torch.testing.assert_close(gram, (rows * gain) @ rows.t(), rtol=1e-8, atol=1e-14)
        torch.testing.assert_close(metric, (rows * gain**2) @ rows.t(), rtol=1e-8, atol=1e-14)
        assert (metric is gram) == (name == "SGD")
        torch.testing.assert_close(drift, rows @ step, rtol=1e-8, atol=1e-13)
        assert step_squared.item() == pytest.approx(step.square().sum().item(), rel=1e-9)
        assert rate == lr
        weights = 1 + reducer.last.extra_weights
        expected = everything.t() @ weights  # of mean((1 + w) losses), backbone included
        torch.testing.assert_close(gradients_of(model), expected, rtol=1e-9, atol=1e-13)
        weighted += (weights > 1.01).sum().item()
        optimizer.step()
    assert weighted > 5


@each_model
@each_optimizer
def test_radius_zero_reproduces_plain_training_to_rounding(kind, name):
    ends = []
    for explicit in (False, True):
        torch.manual_seed(0)
        model, inputs, labels = made(kind)
        optimizer = OPTIMIZERS[name](model.parameters())
        reducer = MultiLayer(model[1], optimizer, cross_entropy, PaperSettings(radius=0.0))
        for x, y in batches(inputs, labels, 25):
            optimizer.zero_grad()
            if explicit:
                reducer.backward(model[0](x), y)
            else:
                cross_entropy(model(x), y).backward()
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-10)
    assert not torch.equal(ends[0], torch.zeros_like(ends[0]))


@each_optimizer
@pytest.mark.parametrize("batch", [10, 300])
def test_the_last_linear_layer_alone_is_what_attach_does(name, batch):
    """At full rank nothing is approximated. Nesterov's two matrices start Lanczos differently."""
    ends, weights = [], []
    for attached in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()
        backbone, tail = split(model, 1)
        optimizer = OPTIMIZERS[name](model.parameters())
        settings, found = PaperSettings(gain_rank=CLASSES), []
        if attached:
            reducer = primum.attach(model, optimizer, recipe=Paper(settings))
        else:
            reducer = MultiLayer(tail, optimizer, cross_entropy, settings)
        for _ in range(5):
            x, y = torch.randn(batch, 5).double(), torch.randint(CLASSES, (batch,))
            optimizer.zero_grad()
            if attached:
                cross_entropy(model(x), y).backward()
            else:
                reducer.backward(backbone(x), y)
            found.append(reducer.last.extra_weights)
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        weights.append(torch.stack(found))
    # Lanczos, beyond 256 samples, magnifies rounding.
    torch.testing.assert_close(*weights, rtol=0, atol=1e-9 if batch == 10 else 1e-4)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-10 if batch == 10 else 1e-5)
    assert weights[0].max() > 0.05


def test_solved_as_the_paper_solves_it():
    """From Q1, Q2 and q to weights by the transcription, over some steps of the guards."""
    model, inputs, labels = made("convolution")
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    reducer = MultiLayer(model[1], optimizer, cross_entropy)
    seen, solve = [], reducer.recipe.solve
    reducer.recipe.solve = lambda *problem: seen.append(problem) or solve(*problem)
    ema = kappa_1 = kappa_2 = None
    for x, y in batches(inputs, labels, 6):
        optimizer.zero_grad()
        reducer.backward(model[0](x), y)
        optimizer.step()
        gram, metric, drift, step_squared, lr = seen[-1]
        dg, Gdg, ema = transcribed.spike_guard(step_squared.item() * lr**2, drift.numpy() * lr, ema)
        Q1, norm, kappa_1 = transcribed.precondition(gram.numpy(), kappa_1)
        Q2, _, kappa_2 = transcribed.precondition(metric.numpy(), kappa_2)
        w, _ = transcribed.chambolle_pock(Q1, Q2, Gdg / lr, (0.2 / lr) ** 2 * dg, norm)
        np.testing.assert_allclose(reducer.last.extra_weights.numpy(), w, atol=1e-7)


@pytest.mark.parametrize("size", [1, 3, 10, 99])
def test_chunks_change_nothing_but_memory(size):
    model, inputs, labels = made("transformer")
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    found = []
    for chunk_size in (None, size):
        model.zero_grad()
        reducer = MultiLayer(model[1], optimizer, cross_entropy, chunk_size=chunk_size)
        reducer.backward(model[0](inputs[:10]), labels[:10])
        found.append(gradients_of(model))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-14)


def test_frozen_parameters_take_no_part():
    model, inputs, labels = made("convolution")
    model[1][0].weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS["AdamW"](trained)
    reducer = MultiLayer(model[1], optimizer, cross_entropy)
    reducer.backward(model[0](inputs[:10]), labels[:10])
    assert model[1][0].weight.grad is None
    rows = per_sample_gradients(model, trained, inputs[:10], labels[:10])
    found = torch.cat([p.grad.flatten() for p in trained])
    torch.testing.assert_close(found, rows.t() @ (1 + reducer.last.extra_weights))


def test_a_frozen_backbone_is_not_run_backward():
    model, inputs, labels = made("convolution")
    model[0].requires_grad_(False)
    optimizer = OPTIMIZERS["SGD"](model[1].parameters())
    MultiLayer(model[1], optimizer, cross_entropy).backward(model[0](inputs), labels)
    assert all(p.grad is None for p in model[0].parameters())
    assert all(p.grad is not None for p in model[1].parameters())


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
def test_groups_with_learning_rates_of_their_own(lr):
    """Ten times the rate for the head; the displacement of a real step is the oracle."""
    model, inputs, labels = made("convolution")
    head, rest = list(model[1][-1].parameters()), list(model[1][:-1].parameters())
    groups = [{"params": rest, "lr": lr}, {"params": [*head, *model[0].parameters()]}]
    optimizer = AdamW(groups, lr=10 * lr, weight_decay=0.1, foreach=False)
    reducer = MultiLayer(model[1], optimizer, cross_entropy)
    seen, solve = [], reducer.recipe.solve
    reducer.recipe.solve = lambda *problem: seen.append(problem) or solve(*problem)
    for x, y in batches(inputs, labels, 3):
        optimizer.zero_grad()
        plain, stepper = copy.deepcopy((model, optimizer))
        tail = list(plain[1].parameters())
        rows = per_sample_gradients(plain, tail, x, y)
        cross_entropy(plain(x), y).backward()
        before = torch.cat([p.detach().flatten() for p in tail])
        stepper.step()
        moved = torch.cat([p.detach().flatten() for p in tail]) - before
        reducer.backward(model[0](x), y)
        _, _, drift, step_squared, rate = seen[-1]
        assert float(rate) == pytest.approx(0.1)
        # A tensor of float32 does not hold 0.01 any better than to 1e-7.
        torch.testing.assert_close(0.1 * drift, rows @ moved, rtol=1e-5, atol=1e-8)
        assert 0.01 * step_squared.item() == pytest.approx(moved.square().sum().item(), rel=1e-5)
        optimizer.step()


def test_what_has_accumulated_is_part_of_the_step():
    model, inputs, labels = made("convolution")
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    reducer = MultiLayer(model[1], optimizer, cross_entropy)
    seen, solve = [], reducer.recipe.solve
    reducer.recipe.solve = lambda *problem: seen.append(problem) or solve(*problem)
    x, y = inputs[:10], labels[:10]
    cross_entropy(model(inputs[10:30]), labels[10:30]).backward()
    first = gradients_of(model)
    rows = per_sample_gradients(model, list(model.parameters()), x, y)
    reducer.backward(model[0](x), y)
    total = first + rows.t() @ (1 + reducer.last.extra_weights)
    torch.testing.assert_close(gradients_of(model), total)
    params = torch.cat([p.detach().flatten() for p in model.parameters()])
    step = -(first + rows.sum(0) + 1e-3 * params)[-sum(p.numel() for p in model[1].parameters()) :]
    torch.testing.assert_close(seen[0][2], rows[:, -len(step) :] @ step)


def test_maximize_protects_from_falling():
    """What is maximised is minus a loss: the same run with the loss negated."""
    found = []
    for sign, maximize in ((1, False), (-1, True)):
        torch.manual_seed(0)
        model, inputs, labels = made("convolution")
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, maximize=maximize)
        reducer = MultiLayer(model[1], optimizer, lambda o, t, s=sign: s * cross_entropy(o, t))
        for x, y in batches(inputs, labels, 4):
            optimizer.zero_grad()
            reducer.backward(model[0](x), y)
            optimizer.step()
        found.append(reducer.last.extra_weights)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    assert found[0].max() > 0.01


def test_per_sample_and_mean_losses_are_the_same_here():
    model, inputs, labels = made("convolution")
    optimizer, found = OPTIMIZERS["SGD"](model.parameters()), []
    for reduction in ("mean", "none"):
        model.zero_grad()
        loss = nn.CrossEntropyLoss(reduction=reduction)
        MultiLayer(model[1], optimizer, loss).backward(model[0](inputs), labels)
        found.append(gradients_of(model))
    assert torch.equal(*found)


def test_half_precision_is_solved_in_single():
    model, inputs, labels = made("convolution")
    model, inputs = model.bfloat16(), inputs.bfloat16()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    reducer = MultiLayer(model[1], optimizer, cross_entropy)
    reducer.backward(model[0](inputs[:10]), labels[:10])
    assert reducer.last.extra_weights.dtype == torch.float32
    assert reducer.last.objective.isfinite()
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_a_batch_that_is_not_finite_gets_plain_gradients():
    model, inputs, labels = made("convolution")
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    reducer = MultiLayer(model[1], optimizer, cross_entropy)
    inputs[0] = torch.nan
    reducer.backward(model[0](inputs[:10]), labels[:10])
    assert reducer.last.objective.isposinf()
    assert torch.equal(reducer.last.extra_weights, torch.zeros(10).double())
    assert reducer.state_dict()["averages"]["spike"].isnan()


def test_state_goes_along():
    model, inputs, labels = made("convolution")
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    one, other = (MultiLayer(model[1], optimizer, cross_entropy) for _ in range(2))
    one.backward(model[0](inputs[:10]), labels[:10])
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    assert one.state_dict()["calls"] == 1


class Named(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 6, 3), norm
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


def test_batch_norm_in_training_is_refused_by_name():
    tail = Named(nn.BatchNorm2d(6))
    optimizer = OPTIMIZERS["SGD"](tail.parameters())
    with pytest.raises(ValueError, match=r"norm \(BatchNorm2d\) mixes the samples"):
        MultiLayer(tail, optimizer, cross_entropy)
    reducer = MultiLayer(tail.eval(), optimizer, cross_entropy)
    hidden, labels = torch.randn(5, 4, 5, 5), torch.randint(CLASSES, (5,))
    reducer.backward(hidden, labels)  # with its running statistics it mixes nothing
    tail.train()
    with pytest.raises(ValueError, match="BatchNorm2d"):
        reducer.backward(hidden, labels)


def test_batch_norm_without_running_statistics_always_mixes():
    tail = Named(nn.BatchNorm2d(6, track_running_stats=False)).eval()
    with pytest.raises(ValueError, match="BatchNorm2d"):
        MultiLayer(tail, OPTIMIZERS["SGD"](tail.parameters()), cross_entropy)


def test_other_mistakes_are_found_at_construction():
    tail = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"does not hold 1\.weight"):
        MultiLayer(tail, OPTIMIZERS["SGD"](tail[0].parameters()), cross_entropy)
    with pytest.raises(ValueError, match="no trained parameters"):
        MultiLayer(nn.ReLU(), OPTIMIZERS["SGD"](tail.parameters()), cross_entropy)


def test_split_keeps_order_parameters_and_repeated_layers():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, 2))
    for blocks in (1, 2, 4, 5):
        backbone, tail = split(model, blocks)
        assert [*backbone, *tail] == list(model)
        assert len(tail) == blocks
    x = torch.randn(6, 3)
    assert torch.equal(tail(backbone(x)), model(x))
    for blocks in (0, 6):
        with pytest.raises(ValueError, match=f"between 1 and 5, got {blocks}"):
            split(model, blocks)
