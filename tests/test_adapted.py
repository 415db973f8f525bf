"""Which layer is measured in the place of a head that is frozen or no plain linear layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn, optim

import primum
from adapters import HEADS, Cosine, LoRA, OwnCosine, Residual, frozen, frozen_head, lora_below, net
from primum.adapted import find_place


def optimizers(model: nn.Module) -> list[optim.Optimizer]:
    return [optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)]


def names(model: nn.Module, head: nn.Module | str | None = None) -> tuple[str, str | None]:
    """Of the layer that is measured and of the module that is weighed."""
    place = find_place(model, head, optimizers(model))
    known = {each: name for name, each in model.named_modules()}
    return known[place.head], None if place.output is None else known[place.output]


@pytest.mark.parametrize("kind", HEADS)
def test_found(kind: str) -> None:
    make, layer, output = HEADS[kind]
    assert names(make()) == (layer, output)


def test_finding_changes_nothing() -> None:
    """To read a weight under spectral norm is one more iteration of it."""
    model = net(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)))
    before = [each.clone() for each in model.buffers()]
    assert before
    primum.attach(model, *optimizers(model))
    for found, expected in zip(model.buffers(), before, strict=True):
        assert torch.equal(found, expected)


def test_a_plain_head_is_measured_and_weighed_itself() -> None:
    assert names(net(nn.Linear(8, 4))) == ("2", None)
    model = net(nn.Linear(8, 4))
    model[0].requires_grad_(False)
    assert names(model) == ("2", None)
    assert names(model, "2") == ("2", None)


@pytest.mark.parametrize("head", ["4", "2.mix.lora_b"])
def test_the_frozen_head_or_the_layer_may_be_passed(head: str) -> None:
    model = lora_below()
    assert names(model, head) == ("2.mix.lora_b", "4")
    assert names(model, model.get_submodule(head)) == ("2.mix.lora_b", "4")


def test_another_layer_may_be_passed() -> None:
    assert names(lora_below(), "1.mix.lora_a") == ("1.mix.lora_a", "4")
    assert names(net(nn.Linear(8, 4)), "0") == ("0", "2")


@pytest.mark.parametrize("head", ["2", "2.base", "2.lora_b", "2.lora_a"])
def test_an_adapter_on_the_head_is_weighed_whole(head: str) -> None:
    measured = "2.lora_a" if head == "2.lora_a" else "2.lora_b"
    assert names(net(LoRA(nn.Linear(8, 4))), head) == (measured, "2")


class Transposed(nn.Linear):
    """Classes before positions, as `F.cross_entropy` takes them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)


class Grouped(nn.Linear):
    """Several classifiers in one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(-1, (2, -1))


@pytest.mark.parametrize("head", [Transposed(8, 4), Grouped(8, 4)])
def test_an_output_of_another_shape_is_no_plain_linear_layers(head: nn.Linear) -> None:
    """And the gradients are those of the weighted losses; with as many positions as classes too."""
    model = net(head).double()
    assert names(model) == ("0", "2")
    twin = copy.deepcopy(model)
    reducer = primum.attach(model, *optimizers(model))
    torch.manual_seed(0)
    inputs = torch.randn(12, 4, 6).double()
    losses = [(net(inputs) - 1).square().flatten(1).sum(1) for net in (model, twin)]
    losses[0].mean().backward()
    assert reducer.last is not None
    assert reducer.last.applied
    ((1 + reducer.last.extra_weights) * losses[1]).mean().backward()
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-12)


def test_an_output_of_another_type_is_still_a_linear_layers() -> None:
    class Logits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).float()

    assert names(net(Logits(8, 4)).bfloat16()) == ("2", None)


def test_heads_of_any_class_may_be_passed() -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.project, self.two = nn.Linear(6, 8), OwnCosine(8, 4), nn.Linear(6, 8)

    model = Unknown()
    with pytest.raises(ValueError, match="cannot tell which layer is the head"):
        names(model)
    assert names(model, "project") == ("one", "project")


def test_only_layers_that_an_optimizer_trains_count() -> None:
    model = lora_below()
    held = [p for name, p in model.named_parameters() if name.startswith("1.mix")]
    place = find_place(model, None, [optim.SGD(held, lr=0.1)])
    assert place.head is model[1].mix.lora_b


def test_what_is_registered_after_the_head_counts_last() -> None:
    class ValueHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.lm_head = Residual(8), frozen_head()
            self.value = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    model = ValueHead()
    assert names(model, "lm_head") == ("body.mix.lora_b", "lm_head")
    model.body.requires_grad_(False)
    assert names(model, "lm_head") == ("value.2", "lm_head")


class TestRefused:
    """Where nothing before the head is a trained linear layer, the message is as before."""

    @pytest.mark.parametrize(
        ("head", "message"),
        [
            (frozen(nn.Linear(8, 4)), r"1\.weight is frozen .*so no step changes it"),
            (
                nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)),
                r"1\.weight is computed from other parameters",
            ),
            (Cosine(8, 4), r"1 is a Cosine whose output is not weight @ input \+ bias"),
        ],
    )
    def test_no_linear_layer_before(self, head: nn.Module, message: str) -> None:
        model = nn.Sequential(nn.Conv1d(6, 8, 1), head)
        with pytest.raises(ValueError, match=message) as caught:
            primum.attach(model, *optimizers(model))
        assert "no trained nn.Linear before it" in str(caught.value)

    def test_no_linear_layer_before_a_convolution(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
        with pytest.raises(ValueError, match=r"come from 2 \(a convolution\), but"):
            primum.attach(model, *optimizers(model))

    @pytest.mark.parametrize("head", ["1", ""])
    def test_what_has_no_weight_makes_no_output(self, head: str) -> None:
        with pytest.raises(TypeError, match=r"head must be an nn\.Linear, got"):
            names(lora_below() if head == "" else net(nn.Linear(8, 4)), head)
