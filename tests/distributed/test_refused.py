"""What splits parameters or states so that no step can be predicted is refused by name."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import primum
from loops import batch

with warnings.catch_warnings():  # it still uses the deprecated TorchScript
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: Any, steps: int = 4) -> None:
    for number in range(steps):
        inputs, labels = batch(number, 24)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


@pytest.mark.usefixtures("group")
class TestShards:
    """Of `fully_shard`, everything but rows on one or two dimensions of a mesh."""

    def test_inputs(self) -> None:
        model = network()
        fully_shard(model, shard_placement_fn=lambda _: Shard(1) if _.dim() > 1 else None)
        with pytest.raises(ValueError, match=r"split along its inputs \(Shard\(1\)\).*Shard\(0\)"):
            primum.attach(model, sgd(model))

    def test_offload(self) -> None:
        model = network()
        fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
        with pytest.raises(ValueError, match=r"offloaded to the CPU .*without offload_policy"):
            primum.attach(model, sgd(model))

    def test_tensor_parallelism(self) -> None:
        model = network()
        parallelize_module(model, init_device_mesh("cpu", (1,)), {"2": ColwiseParallel()})
        with pytest.raises(ValueError, match="tensor parallelism is not supported for the head"):
            primum.attach(model, sgd(model))

    def test_tensor_parallelism_below_fully_shard(self) -> None:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        model = network()
        parallelize_module(model, mesh["tp"], {"2": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        with pytest.raises(ValueError, match=r"with placements \[.*tensor parallelism is not"):
            primum.attach(model, sgd(model))

    def test_a_part_of_the_model(self) -> None:
        model = nn.Sequential(network())
        fully_shard(model)
        with pytest.raises(ValueError, match="pass the outermost model to attach"):
            primum.attach(model[0], sgd(model))

    def test_optimizers_without_a_rule(self) -> None:
        class Own(optim.SGD):
            def step(self, closure: Any = None) -> None:
                super().step(closure)

        model = network()
        fully_shard(model)
        with pytest.raises(TypeError, match=r"Own is not supported under fully_shard.*AdamW"):
            primum.attach(model, Own(model.parameters(), lr=0.1))

    def test_an_optimizer_made_before(self) -> None:
        model = network()
        optimizer = sgd(model)
        fully_shard(model)
        with pytest.raises(ValueError, match=r"does not hold 2\.weight.*create it after fully_"):
            primum.attach(model, optimizer)

    def test_fully_shard_after_attach(self) -> None:
        """Also with a head in a group of its own, whose weight is split when gradients arrive."""
        for own_group in (False, True):
            model = network()
            optimizer = sgd(model)
            reducer = primum.attach(model, optimizer)
            if own_group:
                fully_shard(model[2])
            fully_shard(model)
            with pytest.warns(RuntimeWarning, match="fully_shard was called after attach; attach"):
                train(model, sgd(model), 1)
            assert reducer.last is not None
            assert not reducer.last.applied

    def test_process_group(self) -> None:
        model = network()
        fully_shard(model)
        with pytest.raises(ValueError, match="process group"):
            primum.attach(model, sgd(model), scope=dist.group.WORLD)

    def test_parameters_replaced_after_attaching(self) -> None:
        """Their optimizer steps others: plain gradients, and said."""
        model = network()
        fully_shard(model)
        reducer = primum.attach(model, sgd(model))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        with pytest.warns(RuntimeWarning, match=r"parameters were replaced .*attach again"):
            train(model, sgd(model), 1)
        assert reducer.last is not None
        assert not reducer.last.applied


@pytest.mark.usefixtures("group")
class TestTorch:
    @pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:FSDP")
    def test_fsdp1(self) -> None:
        model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
        with pytest.raises(ValueError, match=r"\(FSDP1\) is not supported.*use fully_shard"):
            primum.attach(model, sgd(model))

    def test_zero_redundancy_optimizer(self) -> None:
        """By its name, and so on every rank alike: it is the class that is looked at."""
        model = DistributedDataParallel(network())
        zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
        for given in (zero, [zero]):
            with pytest.raises(TypeError, match="ZeroRedundancyOptimizer is not supported for"):
                primum.attach(model, given)

    def test_a_plain_optimizer_for_the_head_beside_it(self) -> None:
        """The way out that the message names."""
        model = DistributedDataParallel(network())
        zero = ZeroRedundancyOptimizer(model.module[0].parameters(), optim.SGD, lr=0.1)
        own = sgd(model.module[2])
        for given in (own, [zero, own]):
            with primum.attach(model, given) as reducer:
                train(model, own, 1)
                assert reducer.last is not None
                assert reducer.last.applied


class TestDeepSpeed:
    """What is refused at once: tests/setup/test_validate.py. ZeRO stage 0 is part of the last."""

    def test_initialized_after_attach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """ZeRO puts flat copies in the place of the optimizer's parameters: plain, and said."""
        monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
        model = network()
        optimizer = sgd(model)
        reducer = primum.attach(model, optimizer)
        flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
        optimizer.param_groups[0]["params"] = [flat]
        with pytest.warns(RuntimeWarning, match=r"no longer holds .*: DeepSpeed's ZeRO"):
            train(model, optimizer, 1)
        assert reducer.last is not None
        assert not reducer.last.applied
        with pytest.raises(ValueError, match=r"does not hold 2\.weight.*DeepSpeed's ZeRO"):
            primum.attach(model, optimizer)

    def test_installed(self, tmp_path: Path) -> None:
        """In a process of its own: importing it changes torch."""
        pytest.importorskip("deepspeed")
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "deepspeed_child.py")],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
