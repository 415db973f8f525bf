"""What a probe accepts, finds and refuses."""

import copy

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy

from diagnostics.scenes import batch_of, cnn, frozen, mlp, scene
from primum.diagnostics import Probe, measure, per_sample_gradients

X, Y = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])


def probe_of(model, optimizer=None, inputs=X, targets=Y, **options):
    optimizer = optimizer or optim.SGD(model.parameters(), lr=0.1)
    return Probe(model, optimizer, cross_entropy, inputs, targets, **options)


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [(X, Y[:4]), (X[:0], Y[:0]), (X, torch.tensor(1)), ({"a": X, "b": X[:2]}, Y), (3, 4)],
    ids=["uneven", "empty", "no rows", "uneven dict", "no tensor"],
)
def test_one_row_per_sample(inputs, targets):
    with pytest.raises(ValueError, match="must be tensors with the same batch size"):
        probe_of(nn.Linear(3, 2), inputs=inputs, targets=targets)


def test_chunk_size():
    with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
        probe_of(nn.Linear(3, 2), chunk_size=0)


def test_an_optimizer_that_holds_nothing():
    with pytest.raises(ValueError, match="does not hold any trained parameter"):
        probe_of(nn.Linear(3, 2), optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1))


def test_an_optimizer_that_cannot_be_predicted():
    model = nn.Linear(3, 2)
    with pytest.raises(TypeError, match="LBFGS is not supported"):
        probe_of(model, optim.LBFGS(model.parameters()))


def test_half_of_it_maximizes():
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight], "maximize": True}, {"params": [model.bias]}]
    with pytest.raises(ValueError, match="maximize must be the same"):
        probe_of(model, optim.SGD(groups, lr=0.1))


def test_moved_are_those_that_take_a_gradient_and_have_an_optimizer():
    model = frozen()
    held = [p for n, p in model.named_parameters() if n != "0.weight"]
    probe = Probe(model, optim.SGD(held, lr=0.1), cross_entropy, *batch_of(model, 4))
    assert list(probe.trained) == ["0.weight", "1.weight", "1.bias", "3.bias", "7.weight"]
    assert list(probe.moved) == list(probe.trained)[1:]


def test_several_optimizers():
    model = mlp()
    one = optim.SGD(model[1].parameters(), lr=0.1)
    other = optim.AdamW(model[5].parameters(), lr=0.01)
    probe = Probe(model, (o for o in (one, other)), cross_entropy, *batch_of(model, 4))
    assert {n: o for n, (_, o) in probe.moved.items()} == {
        "1.weight": one, "1.bias": one, "5.weight": other, "5.bias": other
    }  # fmt: skip
    fractions, largest = probe.shares()
    assert largest == 0.1
    assert fractions["1.bias"] == 1
    assert fractions["5.bias"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)]
)
def test_layers_that_mix_samples_are_refused(norm):
    model = nn.Sequential(norm, nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"0 is a \w+ in training mode") as caught:
        probe_of(model)
    for way_out in (".eval()", "replace_all_batch_norm_modules_", "GroupNorm"):
        assert way_out in str(caught.value)


def test_batch_norm_in_eval_mode_is_measured_and_left_alone():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    model.train()(X)
    model[0].eval()
    kept = copy.deepcopy(model.state_dict())
    probe = probe_of(model)
    assert measure(probe).layers == ("0", "1")
    torch.testing.assert_close(model.state_dict(), kept, rtol=0, atol=0)
    model.train()  # later, by somebody else
    with pytest.raises(ValueError, match="BatchNorm1d in training mode"):
        measure(probe)


def test_batch_norm_replaced_as_the_message_says():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 4))
    torch.func.replace_all_batch_norm_modules_(model)
    probe = Probe(model, optim.SGD(model.parameters(), lr=0.1), cross_entropy, *batch_of(cnn(), 3))
    assert len(measure(Probe(model.double(), probe.optimizer, *probe_parts(probe))).layers) == 3


def probe_parts(probe):
    return probe.loss, probe.inputs, probe.targets


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["DataParallel", "compile"])
def test_wrapped_models_are_unwrapped(wrap):
    plain = scene("mlp")
    wrapped = Probe(wrap(plain.model), plain.optimizer, *probe_parts(plain))
    assert wrapped.model is plain.model
    for name, rows in per_sample_gradients(plain).items():
        assert torch.equal(per_sample_gradients(wrapped)[name], rows)
