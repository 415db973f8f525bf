"""What is known when attaching about losses that never call the head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
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


def test_real_liger() -> None:
    """With the real package, which imports without a GPU but does not run."""
    liger = pytest.importorskip("liger_kernel.transformers")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
    )
    for fuses in (True, False):
        model = transformers.LlamaForCausalLM(config)
        liger._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=fuses)
        assert fusing_package(model) == ("liger_kernel" if fuses else "")


@pytest.mark.parametrize("attach", [primum.attach, primum.observe])
def test_said_when_attaching(attach: Callable[..., primum.Reducer]) -> None:
    model = Language("trl.trainer.utils")
    with pytest.warns(RuntimeWarning, match="trl replaced the model's forward"):
        attach(model, optim.SGD(model.parameters(), lr=0.1))


def test_a_function_in_the_models_own_code_is_noticed_after_two_steps() -> None:
    model = Language()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    primum.attach(model, optimizer)
    inputs, targets = torch.randn(8, 4), torch.randint(5, (8,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(F.linear(inputs, model.lm_head.weight), targets).backward()
        optimizer.step()

    step()
    with pytest.warns(RuntimeWarning, match=r"bypassed.*, call the head instead"):
        step()


def test_a_loss_in_chunks_weighs_each_call_by_itself() -> None:
    model = Language()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    reducer = primum.attach(model, optimizer)
    inputs, targets = torch.randn(32, 4), torch.randint(5, (32,))
    parts = zip(inputs.chunk(4), targets.chunk(4), strict=True)
    loss = sum(F.cross_entropy(model(x), y, reduction="sum") for x, y in parts) / 32
    with pytest.warns(RuntimeWarning, match=r"more than once.*once for all samples"):
        loss.backward()
    assert reducer.last is not None
    assert reducer.last.applied
    assert len(reducer.last.extra_weights) == 8
