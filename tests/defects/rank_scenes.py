"""One rank of a scene, for `test_ranks.py`.

    python -m defects.rank_scenes FOLDER RANK RANKS SCENE SETTINGS    (in the folder `tests`)

SETTINGS is a list; writes what the scene returns for each to `FOLDER/result-RANK.json`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import primum
from rank_group import run_rank

from .scene import batch, solver

STEPS = 6


class Optional(nn.Module):
    """A network whose head is not used for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, use_head: bool = True) -> Tensor:
        features = self.body(x)
        made: Tensor = self.head(features) if use_head else features
        return made


def model_of(seed: int = 0) -> Optional:
    torch.manual_seed(seed)
    return Optional().double()


def values(model: nn.Module) -> list[float]:
    found = []
    for param in model.parameters():
        full = param.full_tensor() if isinstance(param, DTensor) else param
        found += full.detach().flatten().tolist()
    return found


def attach(model: nn.Module, optimizer: optim.Optimizer, radius: float | None) -> Any:
    """None leaves primum out: what a plain loop does."""
    return None if radius is None else primum.attach(model, optimizer, radius=radius)


def micro_batches(rank: int, ranks: int, radius: float | None) -> dict[str, Any]:
    """Token-budget batching: the first rank accumulates over three batches, the others over one."""
    model = model_of()
    net = DistributedDataParallel(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reducer = attach(net, optimizer, radius)
    parts = 3 if rank == 0 else 1
    largest = 0.0
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(parts):
            inputs, labels = batch(100 * step + 10 * part + rank, 8)
            with contextlib.nullcontext() if part == parts - 1 else net.no_sync():
                (F.cross_entropy(net(inputs), labels) / parts).backward()
        optimizer.step()
        if reducer is not None and reducer.last is not None:
            largest = max(largest, float(reducer.last.extra_weights.max()))
    return {"params": values(model), "largest": largest}


def unused_head(rank: int, ranks: int, radius: float | None) -> dict[str, Any]:
    """In every third step the last rank's batch has no labels, and a loss on features alone."""
    model = model_of()
    net = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reducer = attach(net, optimizer, radius)
    largest = 0.0
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, labels = batch(100 * step + rank, 8)
        use_head = rank < ranks - 1 or step % 3 != 1
        output = net(inputs, use_head)
        loss = F.cross_entropy(output, labels) if use_head else output.square().mean()
        loss.backward()
        optimizer.step()
        if reducer is not None and reducer.last is not None:
            largest = max(largest, float(reducer.last.extra_weights.max()))
    return {"params": values(model), "largest": largest}


def sharded(rank: int, ranks: int, seeds: list[int], steps: int) -> dict[str, Any]:
    """AdamW under `fully_shard`; with one rank, a single process on the joined batch."""
    runs = [adamw_steps(seed, steps, rank, ranks) for seed in seeds]
    return {"weights": [run[0] for run in runs], "params": [run[1] for run in runs]}


def adamw_steps(seed: int, steps: int, rank: int, ranks: int) -> tuple[Any, list[float]]:
    model = model_of(seed)
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    reducer = primum.attach(model, optimizer, **solver(max_iters=20, tolerance=0.0, radius=0.4))
    weights = []
    for step in range(steps):
        parts = [batch(1000 * seed + 10 * step + each, 6) for each in range(2)]
        optimizer.zero_grad()
        if ranks > 1:
            inputs, labels = parts[rank]
        else:
            inputs, labels = (torch.cat(each) for each in zip(*parts, strict=True))
        F.cross_entropy(model(inputs), labels).backward()
        assert reducer.last is not None
        weights.append(reducer.last.extra_weights.tolist())
        optimizer.step()
    return weights, values(model)


def converted(rank: int, ranks: int) -> dict[str, Any]:
    """A sharded model is moved after a step, as for an export. What went wrong, by case."""
    trouble = {}
    for removed in (False, True):
        for how in ("cpu", "to"):
            model = model_of()
            fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
            optimizer = optim.SGD(model.parameters(), lr=0.1)
            reducer = primum.attach(model, optimizer)
            inputs, labels = batch(rank, 8)
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            if removed:
                reducer.remove()
            try:
                model.cpu() if how == "cpu" else model.to(dtype=torch.float32)
            except RuntimeError as error:
                trouble[f"{how}, removed={removed}"] = str(error)
    return trouble


SCENES: dict[str, Callable[..., dict[str, Any]]] = {
    each.__name__: each for each in (micro_batches, unused_head, sharded, converted)
}


def main(folder: Path, rank: int, ranks: int) -> None:
    runs: list[dict[str, Any]] = json.loads(sys.argv[5])
    result = [SCENES[sys.argv[4]](rank, ranks, **settings) for settings in runs]
    (folder / f"result-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    run_rank(main, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), seconds=15)
