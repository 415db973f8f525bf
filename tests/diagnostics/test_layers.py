"""Layers in the order in which they run, and which parameters belong to each."""

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy

from diagnostics.scenes import batch_of, scene, undisturbed
from primum.diagnostics import Probe
from primum.diagnostics.layers import in_turns, layers_of


def named(probe):
    return {layer.name: layer.params for layer in layers_of(probe)}


def test_weight_and_bias_together_first_to_last():
    assert named(scene("cnn")) == {
        "0": ("0.weight",),
        "1": ("1.weight", "1.bias"),
        "3": ("3.weight", "3.bias"),
        "7": ("7.weight", "7.bias"),
    }


def test_frozen_parameters_are_left_out():
    assert named(scene("frozen")) == {
        "0": ("0.weight",),
        "1": ("1.weight", "1.bias"),
        "3": ("3.bias",),
        "7": ("7.weight",),
    }


@pytest.mark.parametrize("chunk_size", [1, 16])
def test_the_order_is_that_of_the_calls_not_of_the_definition(chunk_size):
    """The head is defined first. What is not called, `out_proj`, stays with its parent."""
    assert list(named(scene("attention", chunk_size=chunk_size))) == [
        "Attention",
        "block.norm1",
        "block.self_attn",
        "block.self_attn.out_proj",
        "block.norm2",
        "block.linear1",
        "block.linear2",
        "head",
    ]


def test_a_shared_parameter_belongs_to_the_last_layer_that_holds_it():
    assert named(scene("tied")) == {
        "mix": ("mix.weight", "mix.bias"),
        "head": ("embed.weight", "head.bias"),
    }


def test_parametrised_layers_count_as_themselves():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    probe = Probe(model, optimizer, cross_entropy, torch.randn(3, 3), torch.zeros(3).long())
    assert {name: len(params) for name, params in named(probe).items()} == {"0": 3, "1": 2}


def test_every_moved_parameter_is_in_one_layer():
    for name in ("cnn", "frozen", "tied", "attention"):
        probe = scene(name)
        found = [param for layer in layers_of(probe) for param in layer.params]
        assert sorted(found) == sorted(probe.moved)


def test_nothing_is_disturbed():
    probe = scene("attention")
    with undisturbed(probe):
        layers_of(probe)


def test_turns_fit_into_memory():
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(5)), nn.Linear(10, 50))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = batch_of(model, 8)[0].flatten(1)[:, :10].float(), torch.zeros(8).long()
    one = 8 * 100 * 4  # bytes of a layer's per-sample gradients

    def sizes(max_bytes):
        probe = Probe(model, optimizer, cross_entropy, inputs, labels, max_bytes=max_bytes)
        return [len(turn) for turn in in_turns(probe, layers_of(probe))]

    assert sizes(100 * one) == [6]
    assert sizes(2 * one) == [2, 2, 1, 1]  # the last takes more than that, and goes alone
    assert sizes(1) == [1] * 6
