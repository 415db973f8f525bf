"""Layer-wise Gram matrices and drift against explicit gradients and a copy that really steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn.functional import cross_entropy

from diagnostics.scenes import (
    ROWS,
    batch_of,
    by_model,
    by_optimizer,
    close,
    gain_of,
    loop_gradients,
    loop_losses,
    mlp,
    really_stepped,
    scene,
    undisturbed,
)
from primum.diagnostics import Probe, first_order, measure
from primum.diagnostics.head import see_head
from primum.diagnostics.layers import layers_of
from primum.kernel.builder import Builder
from primum.kernel.recipe import Primum

# Of the step, found as a difference of parameters: it loses digits to the size of the parameters.
OF_A_DIFFERENCE = 1e-8


def lr_of(probe, name):
    param, optimizer = probe.moved[name]
    return next(g["lr"] for g in optimizer.param_groups if any(p is param for p in g["params"]))


@by_model
@by_optimizer
def test_against_a_loop_and_a_real_step(name, kind):
    probe = scene(name, kind)
    found, rows = measure(probe), loop_gradients(probe)
    _, moved = really_stepped(probe, torch.ones(ROWS))
    close(found.losses, loop_losses(probe.model, probe))
    largest = max(lr_of(probe, n) for n in probe.moved)
    assert found.lr == largest
    for number, layer in enumerate(layers_of(probe)):
        gram, drift, squared = torch.zeros(ROWS, ROWS).double(), torch.zeros(ROWS).double(), 0.0
        for param in layer.params:
            each = rows[param].flatten(1)
            step = moved[param].flatten() / largest
            gradient = rows[param].sum(0)
            gain = gain_of(probe.optimizer, probe.moved[param][0], gradient).flatten()
            gram += each @ torch.diag(gain) @ each.t()
            drift += each @ step
            squared += float((step**2 / gain).sum())
        assert found.layers[number] == layer.name
        close(found.gram[number], gram)
        close(found.drift[number], drift, OF_A_DIFFERENCE)
        assert float(found.step_squared[number]) == pytest.approx(squared, rel=OF_A_DIFFERENCE)


@by_optimizer
def test_memory_and_chunks_do_not_change_the_result(kind):
    expected = measure(scene("cnn", kind))
    for options in ({"max_bytes": 1}, {"max_bytes": 40_000, "chunk_size": 3}, {"chunk_size": 1}):
        found = measure(scene("cnn", kind, **options))
        close(found.gram, expected.gram)
        close(found.drift, expected.drift)


def test_groups_with_their_own_learning_rates():
    """Everything per unit of the largest: drift * lr is what the real displacements do."""
    probe = scene("mlp")
    model = probe.model
    groups = [
        {"params": [model[1].weight], "lr": 0.01},
        {"params": [model[1].bias, model[3].weight], "lr": 0.2},
        {"params": [model[5].weight, model[5].bias], "lr": torch.tensor(0.05)},
    ]
    optimizer = optim.SGD(groups, lr=0.1, momentum=0.9)
    probe = Probe(model, optimizer, cross_entropy, probe.inputs, probe.targets)
    found, rows = measure(probe), loop_gradients(probe)
    _, moved = really_stepped(probe, torch.ones(ROWS))
    assert found.lr == 0.2
    for number, layer in enumerate(layers_of(probe)):
        drift = sum(rows[p].flatten(1) @ moved[p].flatten() for p in layer.params)
        close(found.drift[number] * 0.2, drift, OF_A_DIFFERENCE)
        gram = sum(
            rows[p].flatten(1) @ rows[p].flatten(1).t() * (float(lr_of(probe, p)) / 0.2)
            for p in layer.params
        )
        # The first lr of a tensor comes in float32.
        close(found.gram[number], gram, 1e-7)


def test_two_optimizers():
    probe = scene("mlp")
    model = probe.model
    pair = [
        optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9),
        optim.AdamW([*model[3].parameters(), *model[5].parameters()], lr=0.01),
    ]
    both = measure(Probe(model, pair, cross_entropy, probe.inputs, probe.targets))
    for number, optimizer in enumerate(pair):
        one = Probe(model, optimizer, cross_entropy, probe.inputs, probe.targets)
        alone, share = measure(one), (1.0, 0.1)[number]
        mine = slice(0, 1) if number == 0 else slice(1, 3)
        close(both.gram[mine], share * alone.gram)
        close(both.drift[mine], share * alone.drift)
        close(both.step_squared[mine], share * alone.step_squared)


@by_optimizer
def test_the_last_layer_is_the_head_as_the_core_sees_it(kind):
    probe = scene("cnn", kind)
    found, seen = measure(probe), see_head(probe)
    gram, drift = seen.measure()
    close(found.gram[-1], gram.dense().matrix)
    close(found.drift[-1], drift)
    ours = found.problem(-1, radius=0.3)
    core = Builder().build(seen.head, seen.batch, Primum())
    close(ours.trust_radius, 0.3 * core.step_norm)
    close(ours.gram.diagonal, core.gram.diagonal)


def test_the_problem_of_all_layers_is_the_sum():
    found = measure(scene("cnn"))
    whole = found.problem(radius=0.1, max_extra_weight=3.0)
    close(whole.gram.times(torch.ones(ROWS).double()), found.gram.sum((0, 2)))
    close(whole.drift, found.drift.sum(0))
    close(whole.trust_radius, 0.1 * found.step_squared.sum().sqrt())
    assert whole.max_extra_weight == 3.0


@by_model
@by_optimizer
def test_first_order_under_weights_against_a_real_step(name, kind):
    probe = scene(name, kind)
    weights = torch.linspace(0, 2, ROWS).double()
    found = first_order(probe, {"some": weights})
    rows = loop_gradients(probe)
    for key, each in {"plain": torch.ones(ROWS).double(), "some": 1 + weights}.items():
        _, moved = really_stepped(probe, each)
        drift = sum(rows[p].flatten(1) @ moved[p].flatten() for p in probe.moved)
        close(found[key].drift * measure(probe).lr, drift, OF_A_DIFFERENCE)
        for param, gradient in found[key].gradients.items():
            close(gradient, torch.einsum("b...,b->...", rows[param], each))


@pytest.mark.parametrize("kind", ["SGD", "momentum", "nesterov"])
def test_with_a_fixed_gain_the_gram_matrix_tells_it_all(kind):
    probe = scene("cnn", kind)
    found, weights = measure(probe), torch.rand(3, ROWS).double()
    close(found.drift_after(torch.zeros(ROWS).double()), found.drift.sum(0))
    after = first_order(probe, {str(i): w for i, w in enumerate(weights)})
    close(found.drift_after(weights), torch.stack([after[str(i)].drift for i in range(3)]))


def test_adamw_changes_its_gain_a_little():
    """A second moment that remembers moves less than 1% of the way; after 3 steps, more."""
    probe = scene("cnn", "AdamW", steps=60)
    weights = torch.rand(ROWS).double()
    exact = first_order(probe, {"some": weights})["some"].drift
    fixed = measure(probe).drift_after(weights)
    assert not torch.allclose(exact, fixed, rtol=1e-6, atol=0)
    assert (exact - fixed).norm() < 0.2 * fixed.norm()


def test_maximizing_is_descending_on_minus_the_objective():
    probe = scene("mlp", "SGD")
    up = optim.SGD(probe.model.parameters(), lr=0.1, maximize=True)
    minus = Probe(probe.model, up, lambda o, t: -cross_entropy(o, t), probe.inputs, probe.targets)
    weights = {"some": torch.rand(ROWS).double()}
    close(measure(minus).drift, measure(probe).drift)
    close(measure(minus).gram, measure(probe).gram)
    close(first_order(minus, weights)["some"].drift, first_order(probe, weights)["some"].drift)


@by_optimizer
def test_nothing_is_disturbed_and_waiting_gradients_do_not_count(kind):
    expected = measure(scene("cnn", kind))
    probe = scene("cnn", kind)
    with undisturbed(probe):
        found = measure(probe)
        first_order(probe, {"some": torch.ones(ROWS)})
    assert torch.equal(found.drift, expected.drift)


def test_float32_agrees_with_float64():
    wide = scene("cnn", "AdamW")
    model = scene("cnn", "AdamW").model.float()
    optimizer = optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    optimizer.load_state_dict(wide.optimizer.state_dict())
    narrow = Probe(model, optimizer, cross_entropy, wide.inputs.float(), wide.targets)
    found, expected = measure(narrow), measure(wide)
    assert found.gram.dtype == found.drift.dtype == torch.float32
    close(found.gram.double(), expected.gram, 1e-4)
    close(found.drift.double(), expected.drift, 1e-4)


@given(
    rows=st.integers(1, 5),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    same=st.booleans(),
    kind=st.sampled_from(["SGD", "AdamW"]),
)
@settings(max_examples=20, deadline=None)
def test_ugly_batches(rows, scale, same, kind):
    torch.manual_seed(0)
    model = mlp().double()
    lr = 0.1
    optimizer = (optim.SGD if kind == "SGD" else optim.AdamW)(model.parameters(), lr=lr)
    inputs, labels = batch_of(model, rows)
    inputs = scale * (inputs[:1].expand_as(inputs) if same else inputs)
    labels = labels[:1].expand_as(labels) if same else labels
    probe = Probe(model, optimizer, cross_entropy, inputs, labels)
    found = measure(probe)
    assert found.gram.isfinite().all()
    close(found.gram, found.gram.transpose(1, 2), 1e-12)
    least = torch.linalg.eigvalsh(found.gram.sum(0)).min()
    assert least >= -1e-12 * found.gram.sum(0).diagonal().sum()
    _, moved = really_stepped(probe, torch.ones(rows))
    drift = sum(r.flatten(1) @ moved[n].flatten() for n, r in loop_gradients(probe).items())
    # AdamW divides by gradients as small as 1e-6 times its eps, which only float64 survives.
    close(found.drift.sum(0) * lr, drift, 1e-6)
    if same:
        close(found.drift, found.drift[:, :1].expand_as(found.drift), 1e-9)


def test_a_parameter_that_no_sample_uses():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.idle = nn.Linear(3, 3)
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            return self.head(x)

    model = Idle()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    probe = Probe(model, optimizer, cross_entropy, torch.randn(4, 3), torch.zeros(4).long())
    found = measure(probe)
    assert found.layers == ("idle", "head")
    assert not found.gram[0].any()
    assert not found.drift[0].any()
