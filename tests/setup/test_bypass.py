"""What is known when attaching about losses that never call the head."""

from __future__ import annotations

import functools
from types import ModuleType

import pytest
from torch import Tensor, nn

from primum.setup.bypass import bypassed, fusing_package, looked_after


class Language(nn.Module):
    def __init__(self, package: str = "") -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 5, bias=False)
        if package:
            self.forward = of_package(package).__get__(self)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lm_head(x)
        return output


def of_package(name: str) -> functools.partial[None]:
    """A forward whose code lives in a module of that name."""
    module = ModuleType(name)
    exec("def forward(self, *args, **kwargs): pass", vars(module))
    found: functools.partial[None] = module.forward
    return found


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("liger_kernel.transformers.model.llama", "fused_linear_cross_entropy=False"),
        ("trl.trainer.utils", "compute_loss"),
    ],
)
def test_a_replaced_forward(name: str, way: str) -> None:
    model = Language(name)
    said = bypassed(model, model.lm_head, "lm_head")
    assert "'lm_head' without calling" in said
    assert way in said
    assert "loss = reducer(losses)" in said
    with looked_after():
        assert bypassed(model, model.lm_head, "lm_head") == ""


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch 2.13 and later")
def test_torchs_own_loss() -> None:
    model = nn.ModuleDict({"head": nn.Linear(4, 4), "loss": nn.LinearCrossEntropyLoss(4, 5)})
    assert "LinearCrossEntropyLoss" in bypassed(model, model["loss"].linear, "loss.linear")
    assert bypassed(model, model["head"], "head") == ""


def test_models_as_they_are() -> None:
    model = Language()
    assert bypassed(model, model.lm_head, "lm_head") == ""


def test_layers_alone_are_no_matter() -> None:
    """Liger also replaces norms; the head is called all the same."""
    model = nn.Sequential(nn.LayerNorm(4), Language())
    model[0].forward = of_package("liger_kernel.ops").__get__(model[0])
    assert fusing_package(model) == ""


def test_through_wrappers() -> None:
    model = Language()
    fused = functools.wraps(Language.forward)(of_package("trl.trainer.utils"))
    model.forward = functools.wraps(fused)(lambda *args: fused(*args))
    assert fusing_package(nn.Sequential(model)) == "trl"
