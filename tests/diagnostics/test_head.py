"""The head seen sample by sample is the head that `attach` sees in a backward pass."""

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy

import primum
from diagnostics.scenes import (
    ROWS,
    Tied,
    batch_of,
    by_model,
    by_optimizer,
    close,
    scene,
    undisturbed,
)
from primum.diagnostics import Probe
from primum.diagnostics.head import head_of, see_head
from primum.kernel.builder import Builder
from primum.kernel.recipe import Primum


def as_attach_sees_it(probe, recipe="primum", head=None):
    """The report of a real backward pass through the whole batch, gradients left alone."""
    with primum.observe(
        probe.model, probe.optimizer, recipe=recipe, head=head, per="sample"
    ) as reducer:
        probe.optimizer.zero_grad()
        probe.loss(probe.model(probe.inputs), probe.targets).backward()
        probe.optimizer.zero_grad()
        return reducer.last


@by_model
@by_optimizer
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_against_attach(name, kind, chunk_size):
    """Also where embedding and head are one matrix: `attach` sees the head's use of it alone."""
    probe = scene(name, kind, chunk_size=chunk_size, head="head" if name == "attention" else None)
    report = as_attach_sees_it(probe, head="head" if name == "attention" else None)
    seen = see_head(probe)
    close(seen.measure()[1], report.drift)
    close(seen.weights(Primum()), report.extra_weights, 1e-6)


@by_optimizer
def test_other_recipes(kind):
    probe = scene("cnn", kind)
    report = as_attach_sees_it(probe, "paper")
    close(see_head(probe).weights(primum.paper.Paper()), report.extra_weights, 1e-6)


def test_uniform_gain_stays_one_number():
    for kind, shape in (("momentum", ()), ("AdamW", (4, 7))):
        probe = scene("cnn", kind)  # held: the head is referred to weakly
        gain = see_head(probe).measure()[0].gain
        assert gain == 1.0 if shape == () else gain.shape == shape


def test_bias_with_its_own_learning_rate():
    probe = scene("cnn")
    body = [p for n, p in probe.model.named_parameters() if not n.startswith("7")]
    groups = [{"params": [*body, probe.model[7].weight]}, {"params": [probe.model[7].bias]}]
    groups[1]["lr"] = 0.7
    optimizer = optim.SGD(groups, lr=0.1, momentum=0.9)
    probe = Probe(probe.model, optimizer, cross_entropy, probe.inputs, probe.targets)
    report, seen = as_attach_sees_it(probe), see_head(probe)
    assert Builder().build(seen.head, seen.batch, Primum()).lr == 0.7
    close(seen.measure()[1], report.drift)
    close(seen.weights(Primum()), report.extra_weights, 1e-6)


class Sequence(nn.Module):
    """A head with several positions per sample; called twice if asked."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls
        self.body = nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return sum(self.head(hidden * (1 + i)) for i in range(self.calls))


def positions(outputs, targets):
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
def test_positions(kind):
    torch.manual_seed(0)
    model = Sequence(1).double()
    optimizer = kind(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(6, 4, 5).double(), torch.randint(3, (6, 4))
    probe = Probe(model, optimizer, positions, inputs, labels, chunk_size=4)
    report, seen = as_attach_sees_it(probe), see_head(probe)
    assert seen.measure()[0].features.shape == (6, 4, 7)
    close(seen.measure()[1], report.drift)
    close(seen.weights(Primum()), report.extra_weights, 1e-6)


def test_a_head_that_is_called_twice():
    torch.manual_seed(0)
    model = Sequence(2).double()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(6, 4, 5).double(), torch.randint(3, (6, 4))
    probe = Probe(model, optimizer, positions, inputs, labels)
    seen = see_head(probe)
    assert seen.measure()[0].features.shape == (6, 8, 7)
    total = cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    weight, bias = torch.autograd.grad(total, [model.head.weight, model.head.bias])
    step = -torch.cat((weight, bias.unsqueeze(1)), 1)
    gram, drift = seen.measure()
    close(drift, gram.along(step))
    close(Builder().build(seen.head, seen.batch, Primum()).step_norm, step.norm())


def test_which_head():
    probe = scene("mlp")
    assert head_of(probe) is probe.model[5]
    for given in ("3", probe.model[3]):
        other = Probe(*parts(probe), head=given)
        assert head_of(other) is probe.model[3]
        assert see_head(other).measure()[0].features.shape == (ROWS, 9)
    with pytest.raises(TypeError, match=r"head must be an nn\.Linear, got .*Tanh; pass head="):
        see_head(Probe(*parts(probe), head="2"))


def parts(probe):
    return probe.model, probe.optimizer, probe.loss, probe.inputs, probe.targets


def test_a_head_that_cannot_be_seen():
    probe = scene("mlp")
    held = optim.SGD(probe.model[1].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="in none of the probe's optimizers"):
        see_head(Probe(probe.model, held, *parts(probe)[2:]))
    unused = nn.ModuleDict({"body": nn.Linear(5, 3), "head": nn.Linear(3, 3)})
    unused.forward = lambda x: unused["body"](x)
    optimizer = optim.SGD(unused.parameters(), lr=0.1)
    inputs, labels = torch.randn(4, 5), torch.zeros(4).long()
    with pytest.raises(ValueError, match="never calls the head"):
        see_head(Probe(unused, optimizer, cross_entropy, inputs, labels, head="head"))


def test_nothing_is_disturbed_and_waiting_gradients_do_not_count():
    other = scene("tied", "AdamW")
    expected = see_head(other)
    probe = scene("tied", "AdamW")
    assert isinstance(probe.model, Tied)
    reducer = primum.attach(probe.model, probe.optimizer)
    with undisturbed(probe):
        found = see_head(probe)
    assert reducer.last is None
    assert torch.equal(found.measure()[1], expected.measure()[1])


def test_an_error_leaves_no_hook_behind():
    probe = scene("mlp")

    def broken(outputs, targets):
        raise RuntimeError("of the user")

    wrong = Probe(probe.model, probe.optimizer, broken, *batch_of(probe.model, 4))
    with undisturbed(wrong), pytest.raises(RuntimeError, match="of the user"):
        see_head(wrong)
