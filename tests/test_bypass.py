"""What attaching says about losses that never call the head."""

from __future__ import annotations

import functools
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import report_of
from primum.setup.bypass import bypassed, fusing_package, looked_after

CODE = "def forward(self, *args, **kwargs): pass"


def of_package(name: str) -> ModuleType:
    """A forward whose code lives in a module of that name."""
    module = ModuleType(name)
    exec(CODE, vars(module))
    return module


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 5, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(torch.tanh(self.body(x)))


def attach(model: nn.Module, **options: Any) -> primum.Reducer:
    return primum.attach(model, optim.SGD(model.parameters(), lr=0.1), **options)


class TestSaidAtOnce:
    @pytest.mark.parametrize(
        ("name", "way"),
        [
            ("liger_kernel.transformers.model.llama", r"fused_linear_cross_entropy=False"),
            ("trl.trainer.utils", r"Override compute_loss"),
        ],
    )
    @pytest.mark.parametrize("how", [primum.attach, primum.observe])
    def test_a_replaced_forward(self, name: str, way: str, how: Any) -> None:
        model = Language()
        model.forward = of_package(name).forward.__get__(model)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        with pytest.warns(RuntimeWarning, match=rf"'lm_head'.*{way}.*call the head and compute"):
            how(model, optimizer)

    @pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch 2.13 and later")
    def test_torchs_own_loss(self) -> None:
        model = nn.ModuleDict({"body": nn.Linear(4, 4), "loss": nn.LinearCrossEntropyLoss(4, 5)})
        with pytest.warns(RuntimeWarning, match=r"LinearCrossEntropyLoss \('loss'\) never calls"):
            attach(model, head="loss.linear")

    @pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch 2.13 and later")
    def test_another_head_beside_it(self) -> None:
        model = nn.ModuleDict({"head": nn.Linear(4, 4), "loss": nn.LinearCrossEntropyLoss(4, 5)})
        attach(model, head="head")  # warnings are errors

    def test_real_liger(self) -> None:
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
            if fuses:
                with pytest.warns(RuntimeWarning, match="Liger replaced the model's forward"):
                    attach(model)
            else:
                attach(model)

    def test_not_if_the_caller_knows_more(self) -> None:
        model = Language()
        model.forward = of_package("trl.trainer.utils").forward.__get__(model)
        with looked_after():
            attach(model)
        assert bypassed(model, model.lm_head, "lm_head")

    def test_models_as_they_are(self) -> None:
        model = Language()
        assert bypassed(model, model.lm_head, "lm_head") == ""
        attach(model)

    def test_layers_alone_are_no_matter(self) -> None:
        """Liger also replaces norms; the head is called all the same."""
        model = nn.Sequential(nn.LayerNorm(4), Language())
        model[0].forward = of_package("liger_kernel.ops").forward.__get__(model[0])
        assert fusing_package(model) == ""

    def test_through_wrappers(self) -> None:
        model = Language()
        fused = functools.wraps(Language.forward)(of_package("trl.trainer.utils").forward)
        model.forward = functools.wraps(fused)(lambda *args: fused(*args))
        assert fusing_package(nn.Sequential(model)) == "trl"


class TestNoticedLater:
    def test_a_function_in_the_models_own_code(self) -> None:
        """Nothing shows when attaching; after two steps the way out is named."""
        model = Language()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        primum.attach(model, optimizer)
        inputs, targets = torch.randn(8, 4), torch.randint(5, (8,))

        def step() -> None:
            optimizer.zero_grad()
            hidden = torch.tanh(model.body(inputs))
            F.cross_entropy(F.linear(hidden, model.lm_head.weight), targets).backward()
            optimizer.step()

        step()
        with pytest.warns(RuntimeWarning, match=r"bypassed.*call the head and compute the loss"):
            step()

    def test_a_loss_in_chunks(self) -> None:
        """The head once per chunk: each call is weighed by itself, which is said."""
        model = Language()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        reducer = primum.attach(model, optimizer)
        inputs, targets = torch.randn(32, 4), torch.randint(5, (32,))

        def loss_in(chunks: int) -> Tensor:
            parts = zip(inputs.chunk(chunks), targets.chunk(chunks), strict=True)
            return sum(F.cross_entropy(model(x), y, reduction="sum") for x, y in parts) / 32

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_in(3).backward()  # views of a sample, several losses: nothing to be said
            assert len(report_of(reducer).extra_weights) in (10, 11, 12)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss_in(8)
        with pytest.warns(RuntimeWarning, match=r"the head ran 4 or more.*once, with all rows"):
            loss.backward()
        assert report_of(reducer).applied
