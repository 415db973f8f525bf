"""One rank of small training runs whose head `fully_shard` has split, for `test_shards.py`.

    python shard_child.py FOLDER RANK RANKS

FOLDER has `runs.json`, as for `rank_child.py`, whose models and batches these are; see `DEFAULTS`.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import primum
import primum.kernel.recipe
from loops import PRECISE
from rank_child import DEFAULTS as OF_RANKS
from rank_child import batches, force, losses_of, model_of, optimizer_of, trouble
from rank_group import run_rank

DEFAULTS: dict[str, Any] = OF_RANKS | {
    "head": False,  # a group of its own
    "replicas": 1,  # more: HSDP
    "reshard": None,  # `reshard_after_forward` of the root
    "sync": True,  # False: gradients of micro-batches are reduced with the last one
    "all_reduce": True,  # False: over replicas with the last one
    "bf16": False,  # parameters; gradients are reduced in float32
    "divide": None,  # `set_gradient_divide_factor`
    "compiled": "",  # "blocks" or "model"
    "late": False,  # `fully_shard` after attach
    "kind": "train",
    "observe": False,
}


def shard(model: nn.Sequential, own: dict[str, Any], ranks: int) -> None:
    shape = (own["replicas"], ranks // own["replicas"])
    names = ("replicas", "shards")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    settings: dict[str, Any] = {"mesh": mesh if own["replicas"] > 1 else mesh["shards"]}
    if own["bf16"]:
        settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model[0], **settings)
    if own["head"]:
        fully_shard(model[2], **settings)
    fully_shard(model, reshard_after_forward=own["reshard"], **settings)
    if own["divide"]:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(own["divide"])


def make(own: dict[str, Any], ranks: int) -> tuple[Any, optim.Optimizer, primum.Reducer]:
    """Model, optimizer and reducer; in the order of an ordinary script, unless `late`."""
    model = model_of(own)
    if not own["late"]:
        shard(model, own, ranks)
    optimizer = optimizer_of(model, own)
    if own["compiled"] == "blocks":
        model[0].compile(backend="aot_eager")
    settings = PRECISE if own["recipe"] == "primum" else {}
    attach = primum.observe if own["observe"] else primum.attach
    reducer = attach(model, optimizer, recipe=own["recipe"], scope=own["scope"], **settings)
    if own["late"]:
        shard(model, own, ranks)
    return model, optimizer, reducer


def whole(model: nn.Module) -> dict[str, Any]:
    found = {}
    for name, value in model.state_dict().items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        found[name] = value.tolist()
    return found


def figures(reducer: primum.Reducer) -> dict[str, Any]:
    report = reducer.last
    assert report is not None
    found: dict[str, Any] = report.as_dict()
    found |= {"weights": report.extra_weights.tolist(), "drift": report.drift.tolist()}
    return found | {"own": [report.own.start, report.own.stop], "reason": report.reason}


def step(
    model: Any, optimizer: Any, reducer: Any, own: dict[str, Any], number: int, rank: int
) -> None:
    forward = torch.compile(model, backend="aot_eager") if own["compiled"] == "model" else model
    optimizer.zero_grad()
    for part in range(own["micro_batches"]):
        inputs, labels = batches(own, number, part)[rank]
        if own["trouble"] and number == 5 and rank == own["trouble_rank"]:
            if own["trouble"] == "recipe":
                fail_once(type(reducer._recipe))
            else:
                trouble(own["trouble"], model, inputs)
        if isinstance(model, FSDPModule):
            last = part == own["micro_batches"] - 1
            model.set_requires_gradient_sync(own["sync"] or last)
            if not own["all_reduce"]:
                model.set_requires_all_reduce(last)
        losses = losses_of(forward, inputs, labels) / own["micro_batches"]
        if own["trouble"] == "eval":
            model.train()
        (reducer(losses) if own["explicit"] else losses.mean()).backward()
    if own["clip"]:
        nn.utils.clip_grad_norm_(model.parameters(), own["clip"])
    optimizer.step()


def fail_once(recipe: Any) -> None:
    """The next solution is an error, on this rank alone and once nothing is sent any more."""
    solve = recipe.__call__

    def fails(*_: Any) -> None:
        recipe.__call__ = solve
        raise MemoryError("no room for the matrix")

    recipe.__call__ = fails


def train(own: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """One run: parameters, reports, bytes sent, warnings."""
    own = DEFAULTS | own
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer, reducer = make(own, ranks)
        reports = []
        for number in range(own["steps"]):
            step(model, optimizer, reducer, own, number, rank)
            reports.append(figures(reducer))
    shards = reducer._shards
    sent = 0 if shards is None else shards.ranks.bytes
    if shards is not None and shards.holders is not shards.ranks:
        sent += shards.holders.bytes
    return {
        "params": whole(model),
        "reports": reports,
        "bytes": sent,
        "rows": [0, 0] if shards is None else [shards.rows.start, shards.rows.stop],
        "warnings": [str(each.message) for each in caught if "primum" in str(each.message)],
    }


def resume(own: dict[str, Any], rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """A checkpoint after four steps, loaded into a model that was attached to before."""
    own = DEFAULTS | own
    model, optimizer, reducer = make(own, ranks)
    for number in range(4):
        step(model, optimizer, reducer, own, number, rank)
    parts = get_state_dict(model, optimizer)
    dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder / "checkpoint")
    torch.save(reducer.state_dict(), folder / f"reducer-{rank}.pt")
    keys = [*parts[0], *parts[1]["state"]]

    model, optimizer, reducer = make(own, ranks)
    blank = get_state_dict(model, optimizer)
    state = {"model": blank[0], "optimizer": blank[1]}
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    reducer.load_state_dict(torch.load(folder / f"reducer-{rank}.pt", weights_only=True))
    reports = []
    for number in range(4, own["steps"]):
        step(model, optimizer, reducer, own, number, rank)
        reports.append(figures(reducer))
    return {"params": whole(model), "reports": reports, "keys": keys}


def main(folder: Path, rank: int, ranks: int) -> None:
    results: dict[str, Any] = {}
    for name, own in json.loads((folder / "runs.json").read_text()).items():
        force(own.get("way"), own.get("dense"))
        if own.get("kind") == "resume":
            results[name] = resume(own, rank, ranks, folder)
        else:
            results[name] = train(own, rank, ranks)
    (folder / f"results-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    run_rank(main, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
