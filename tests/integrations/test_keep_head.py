"""Which losses bypass the head, and the setting that keeps it."""

from __future__ import annotations

import functools
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import Trainer

from primum.integrations.keep_head import way_out
from primum.setup.bypass import fusing_package

CODE = "def forward(self, *args, **kwargs): pass\ndef compute_loss(self): pass"


def of_package(name: str) -> ModuleType:
    """Functions whose code lives in a module of that name."""
    module = ModuleType(name)
    exec(CODE, vars(module))
    return module


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(2, 3)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self) -> None:
        pass


@pytest.mark.parametrize("name", ["trl.trainer.utils", "liger_kernel.transformers.model.llama"])
def test_a_replaced_forward_is_noticed(name: str) -> None:
    package = name.partition(".")[0]
    model = Language()
    assert fusing_package(model) == ""
    model.forward = functools.partial(of_package(name).forward, model)
    assert fusing_package(model) == ""  # a partial says nothing about itself
    model.forward = of_package(name).forward.__get__(model)
    assert fusing_package(model) == package
    assert fusing_package(nn.Sequential(model)) == package


def test_through_wrappers() -> None:
    """TRL copies the name of the forward it replaces; mixed precision wraps it once more."""
    model = Language()
    fused = functools.wraps(Language.forward)(of_package("trl.trainer.utils").forward)
    assert fused.__module__ == Language.forward.__module__

    @functools.wraps(fused)
    def cast(*args: Any) -> Any:
        return fused(*args)

    model.forward = cast
    assert fusing_package(model) == "trl"


def test_layers_alone_are_no_matter() -> None:
    """Liger also replaces norms; the head is called all the same."""
    model = nn.Sequential(nn.LayerNorm(2), Language())
    model[0].forward = of_package("liger_kernel.ops").forward.__get__(model[0])
    assert fusing_package(model) == ""


class SFTConfig(SimpleNamespace):
    label_smoothing_factor = 0.0
    loss_type = "nll"


def test_what_keeps_the_head() -> None:
    theirs = type("SFTTrainer", (), {"compute_loss": of_package("trl.trainer").compute_loss})
    said = way_out("liger_kernel", SFTConfig())
    assert "use_liger_kernel=True" in said
    assert 'liger_kernel_config={"fused_linear_cross_entropy": False}' in said
    for trainer in (None, theirs()):
        assert "compute_loss_func=" in way_out("trl", SFTConfig(), trainer)
    said = way_out("trl", SFTConfig(loss_type="chunked_nll"))
    assert 'loss_type="chunked_nll". To make the loss call the head, set loss_type="nll"' in said
    assert "has no setting" in way_out("trl", SimpleNamespace())


def test_what_has_kept_it() -> None:
    theirs = type("SFTTrainer", (), {"compute_loss": of_package("trl.trainer").compute_loss})
    given = theirs()
    given.compute_loss_func = print
    overridden = type("Own", (theirs,), {"compute_loss": Trainer.compute_loss})()
    assert way_out("trl", SFTConfig(), given) == ""
    assert way_out("trl", SFTConfig(), overridden) == ""
    assert way_out("trl", SFTConfig(label_smoothing_factor=0.1)) == ""
