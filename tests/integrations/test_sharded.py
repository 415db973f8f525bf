"""Frameworks that call fully_shard: the callbacks attach after that, to the sharded head.

On one CPU process. Lightning shards there by itself. Accelerate, and with it the Trainer, shards on
accelerators alone, so its state is set by hand to what it would be there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

import primum
from primum.integrations.lightning import PrimumCallback
from primum.integrations.transformers import PrimumCallback as TrainerCallback


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.body(inputs))
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels)}


def data() -> TensorDataset:
    rng = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(48, 6, generator=rng), torch.randint(4, (48,), generator=rng))


def loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(data(), batch_size=12)


def plain() -> dict[str, Tensor]:
    """The parameters of the same training without any framework and unsharded."""
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    primum.attach(model, optimizer)
    for inputs, labels in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model.state_dict()


def assert_like_plain(model: nn.Module) -> None:
    expected = plain()
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        torch.testing.assert_close(param.full_tensor(), expected[name], rtol=1e-4, atol=1e-6)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank; Accelerators share their state within a process."""
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def shard(accelerator: Accelerator) -> None:
    """What Accelerate's state is on several accelerators with `fsdp_version=2`."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10
    )
    accelerator.state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state._shared_state["fsdp_plugin"] = plugin
    assert accelerator.is_fsdp2


@pytest.mark.usefixtures("group")
def test_accelerate() -> None:
    accelerator = Accelerator(cpu=True)
    shard(accelerator)
    model = Network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    reducer = primum.attach(model, optimizer)
    for inputs, labels in loader():
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
    assert reducer.last is not None
    assert reducer.last.applied
    assert reducer.last.fallbacks == 0
    assert_like_plain(model)


@pytest.mark.usefixtures("group")
def test_trainer(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=12,
        num_train_epochs=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=0.0,
        optim="adamw_torch",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"inputs": x, "labels": y} for x, y in data()]
    trainer = Trainer(Network(), args, train_dataset=rows)
    trainer._get_train_sampler = lambda *_: None  # in order, as the plain loop does
    shard(trainer.accelerator)
    trainer.is_fsdp_enabled = True
    callback = TrainerCallback().add_to(trainer)
    seen: list[bool] = []
    begin = callback._attachment.begin

    def look(model: nn.Module, *rest: Any) -> None:
        seen.append(all(isinstance(p, DTensor) for p in model.parameters()))
        begin(model, *rest)

    callback._attachment.begin = look  # type: ignore[method-assign]
    trainer.train()
    assert seen == [True]  # attached after fully_shard
    assert callback.last is not None
    assert callback.last.applied
    assert callback.last.fallbacks == 0


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Network()

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.net.body, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: Any, number: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, number: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.filterwarnings("ignore")  # Lightning's own, about workers and deprecated names
def test_lightning() -> None:
    """After its sanity check the whole parameters are still there: attach shards them again."""
    callback, module = PrimumCallback(), Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1),
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        use_distributed_sampler=False,  # in order, as the plain loop does
    )
    try:
        trainer.fit(module, loader(), loader())
        assert callback.last is not None
        assert callback.last.applied
        assert callback.last.fallbacks == 0
        module.net.reshard()
        assert_like_plain(module.net)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
