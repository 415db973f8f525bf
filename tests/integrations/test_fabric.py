"""Lightning Fabric needs no module of ours: `attach` looks through what `setup` returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

import primum
from integrations.plain import (
    BATCH,
    OPTIMIZERS,
    assert_equal,
    dataset,
    differs,
    network,
    trained,
)
from primum import Reducer

pytestmark = pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated",  # Lightning on a newer torch
)


def run(
    kind: str,
    settings: dict[str, Any] | None,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], Reducer | None]:
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    module, stepper = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(dataset(), batch_size=BATCH))
    reducer = None
    if settings is not None:
        scaler = getattr(fabric.strategy.precision, "scaler", None)
        reducer = primum.attach(module, stepper, scaler=scaler, **settings)
    for number, (inputs, labels) in enumerate(loader, 1):
        accumulating = number % accumulate != 0
        with fabric.no_backward_sync(module, enabled=accumulating):
            fabric.backward(F.cross_entropy(module(inputs), labels) / accumulate)
        if not accumulating:
            if clip is not None:
                fabric.clip_gradients(module, stepper, max_norm=clip)
            stepper.step()
            stepper.zero_grad()
    if reducer is not None:
        assert reducer.last is not None
        assert reducer.last.applied
        assert reducer.last.fallbacks == 0
    return model.state_dict(), reducer


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_same_parameters_as_a_plain_loop(kind: str) -> None:
    found, _ = run(kind, {})
    assert_equal(found, trained(kind, {}))
    assert differs(found, trained(kind, None))


def test_radius_zero_is_plain_fabric() -> None:
    assert_equal(run("AdamW", {"radius": 0})[0], run("AdamW", None)[0])


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.filterwarnings("ignore:The selected strategy does not support the `no_backward_sync`")
def test_accumulation_and_clipping(clip: float | None) -> None:
    found, _ = run("SGD", {}, accumulate=2, clip=clip)
    assert_equal(found, trained("SGD", {}, accumulate=2, clip=clip))


def test_bf16() -> None:
    """The wrapped forward casts its output to float32; the problem is the head's all the same."""
    found, reducer = run("SGD", {}, precision="bf16-mixed")
    assert reducer is not None
    assert reducer.last is not None
    assert reducer.last.mean_extra_weight > 0
    assert differs(found, run("SGD", None, precision="bf16-mixed")[0])


def test_scaler() -> None:
    """Weights come from unscaled gradients: they are those of training without a scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    plugin.forward_context = lambda: torch.autocast("cpu", enabled=False)  # float32
    plugin.convert_input = lambda data: data
    found, _ = run("SGD", {}, plugins=plugin)
    for name, value in trained("SGD", {}).items():
        torch.testing.assert_close(found[name], value)


def test_by_its_plain_name() -> None:
    found, _ = run("SGD", {"head": "2"})
    assert_equal(found, trained("SGD", {}))


def test_state_in_fabrics_checkpoints(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    model = network()
    module, optimizer = fabric.setup(model, OPTIMIZERS["SGD"](model.parameters()))
    reducer = primum.attach(module, optimizer, recipe="paper")
    inputs, labels = dataset().tensors
    fabric.backward(F.cross_entropy(module(inputs), labels))
    optimizer.step()
    state = {"model": module, "optimizer": optimizer, "primum": reducer}
    fabric.save(tmp_path / "state.ckpt", state)
    saved = reducer.state_dict()
    reducer.load_state_dict(saved | {"recipe_state": {"calls": 0, "averages": {}}})
    fabric.load(tmp_path / "state.ckpt", state)
    restored = reducer.state_dict()["recipe_state"]
    assert restored["calls"] == saved["recipe_state"]["calls"] == 1
    for name, value in saved["recipe_state"]["averages"].items():
        assert torch.equal(restored["averages"][name], value)
