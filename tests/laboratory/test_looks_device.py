"""Inspection on an accelerator, checked without one: nothing that takes part stays on the CPU.

Run as a program it inspects on `phantom`, an accelerator without memory: every tensor is fake, and
an operation on tensors of two devices raises. Values that are read are made up, so this says where
things are, not what they are. The other test is for a machine with a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before torch.Generator is replaced, which it has in annotations
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only

from lab.images import load_data
from lab.looks import Looks
from lab.settings import LookSettings, RunSettings
from lab.trainer import Trainer
from primum.diagnostics import weights


class MadeUp(FakeTensorMode):
    """Fake tensors whose values, where somebody reads one, are made up."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.equal.default:
            return True
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.5 if args[0].is_floating_point() else 1
        return super().dispatch(func, types, args, kwargs)


def make_phantom() -> None:
    """The accelerator, and stand-ins for what cannot be done with fake tensors."""
    module: Any = backend_registration._DummyBackendModule()
    module.get_amp_supported_dtype = lambda: [torch.float16]
    module.get_rng_state = torch.get_rng_state = lambda *device: None  # type: ignore[assignment]
    module.set_rng_state = torch.set_rng_state = lambda *state: None  # type: ignore[assignment]
    backend_registration._setup_privateuseone_for_python_backend("phantom", module)
    generator = torch.Generator
    torch.Generator = lambda *device: generator()  # type: ignore[assignment,misc]
    Tensor.__deepcopy__ = lambda self, memo: self.detach().clone()  # type: ignore[method-assign]
    nn.Module.to = moved  # type: ignore[method-assign,assignment]


def moved(self: nn.Module, device: Any = None, **layout: Any) -> nn.Module:
    """`nn.Module.to` without swapping tensors under their references, which fake ones refuse."""
    for module in self.modules() if device is not None else ():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(param.detach().to(device))
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return self


def inspect(model: str, optimizer: str) -> None:
    """A step, a state taken from there and loaded, a step, the measurement at the end."""
    settings = RunSettings(
        model=model,
        data="generated",
        train_size=12,
        test_size=4,
        image_size=8,
        augment="none",
        optimizer=optimizer,  # type: ignore[arg-type]
        batch_size=4,
        steps=2,
        observe_every=1,
        look=LookSettings(every=99, lr_factors=(1.0,)),
        device="phantom",
    )
    data = load_data(settings.data_settings())
    with MadeUp(allow_non_fake_inputs=True):
        first, second = (Trainer(settings, data, [Looks()]) for _ in range(2))
        first.step()
        state = first.state_dict()
        state["random"] = [torch.zeros(1)]
        second.load_state_dict(tree_map_only(Tensor, lambda tensor: tensor.cpu(), state))
        second.step()
        assert second.finished
        looks = second.callbacks[0]
        assert len(looks.moments) == len(looks.curves["test_loss"]) == 2  # type: ignore[attr-defined]
        tensors = [*second.model.parameters(), second.loss, second.coming.ids]
        assert {tensor.device.type for tensor in tensors} == {"phantom"}
        with pytest.raises(RuntimeError, match="device"):  # it would have been noticed
            second.model(data.test.images[:4].float())
    print(model, optimizer)


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot make up an accelerator",
)
def test_on_an_accelerator_without_values() -> None:
    """In a process of its own: an accelerator, once registered, stays.

    As a program it takes any model: `test_looks_device.py vit-micro adamw` takes half a minute.
    """
    words = ("cnn-small", "sgd")
    ran = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", __file__, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == " ".join(words) + "\n"


@pytest.mark.cuda
def test_figure_1_on_a_gpu(tmp_path: Path) -> None:
    from lab.cli import main

    words = ["reproduce", "figure1", "--scale", "smoke", "--device", "cuda"]
    assert main([*words, "--out", str(tmp_path)]) == 0


if __name__ == "__main__":
    make_phantom()
    weights.NETWORK_ITERS = 2  # enough to see where it is solved
    inspect(*sys.argv[1:])
