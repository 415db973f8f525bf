"""One rank of small training runs, for the tests of several ranks.

    python -m distributed.rank_child FOLDER RANK RANKS     (in the folder `tests`)

FOLDER has `runs.json`: settings of runs by name, made one after the other; see `DEFAULTS`.
Rendezvous and results are files there, too: no ports. With one rank `train` takes the joined batch,
with the loss that the ranks' mean gradient belongs to.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import primum
from primum.distributed import over_ranks
from rank_group import run_rank

DEFAULTS: dict[str, Any] = {
    "optimizer": "SGD",
    "recipe": "primum",
    "radius": None,
    "counts": [12, 12],  # samples by rank
    "short": 0,  # fewer on the last rank, in every third step
    "steps": 20,
    "micro_batches": 1,
    "sync": True,  # False: gradients of micro-batches are reduced with the last one
    "last": False,  # of the micro-batches only the last one is weighted
    "way": None,  # "gather", "sum" or "local" instead of the cheaper one
    "scope": "auto",
    "tokens": 0,  # positions of a sequence; by rank r, r more
    "per": "auto",
    "picked": False,  # in the first step one position alone has a loss on the first rank
    "clip": 0.0,
    "join": False,  # every rank one step less than the one before
    "trouble": None,
    "wrap": True,
    "inner": False,  # attach to what is inside the wrapper
    "explicit": False,
    "compile": "",  # "blocks" or "model"
    "dtype": "float32",
    "bias": True,
    "observe": False,
    # Of `fully_shard` instead of DistributedDataParallel:
    "shard": False,
    "head": False,  # a group of its own
    "replicas": 1,  # more: HSDP
    "reshard": None,  # `reshard_after_forward` of the root
    "all_reduce": True,  # False: over replicas with the last micro-batch
    "bf16": False,  # parameters; gradients are reduced in float32
    "divide": None,  # `set_gradient_divide_factor`
    "late": False,  # after attach
    "resume": False,  # from a checkpoint after four steps
}


def model_of(own: dict[str, Any]) -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5, bias=own["bias"])
    return nn.Sequential(*body).to(getattr(torch, own["dtype"]))


def optimizer_of(model: nn.Module, own: dict[str, Any]) -> optim.Optimizer:
    if own["optimizer"] == "SGD":
        return optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return optim.AdamW(model.parameters(), lr=0.01)


def shard(model: nn.Sequential, own: dict[str, Any], ranks: int) -> None:
    shape = (own["replicas"], ranks // own["replicas"])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
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


def batches(own: dict[str, Any], step: int, part: int) -> list[tuple[Tensor, Tensor]]:
    """The samples of every rank: the same wherever they are made."""
    found = []
    for rank, count in enumerate(own["counts"]):
        rng = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
        if own["short"] and step % 3 == 2 and rank == len(own["counts"]) - 1:
            count -= own["short"]
        shape = (count, own["tokens"] + rank) if own["tokens"] else (count,)
        inputs = torch.randn(*shape, 6, generator=rng, dtype=torch.float64)
        labels = torch.randint(5, shape, generator=rng)
        found.append((inputs.to(getattr(torch, own["dtype"])), labels))
    return found


def losses_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """One for each sample."""
    logits = model(inputs)
    each = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return each.view(len(labels), -1).mean(1)


def joined(model: nn.Module, own: dict[str, Any], step: int, part: int) -> Tensor:
    """The loss of all samples in one process: each rank's mean, and the mean of these."""
    rows, weights = batches(own, step, part), []
    longest = max(labels[0].numel() for _, labels in rows)
    padded, targets = [], []
    for inputs, labels in rows:
        share = 1 / len(labels) / len(rows) / own["micro_batches"]
        if own["tokens"]:
            missing = longest - labels.shape[1]
            share /= labels.shape[1]
            inputs, labels = (
                F.pad(inputs, (0, 0, 0, missing)),
                F.pad(labels, (0, missing), value=-1),
            )
        padded.append(inputs)
        targets.append(labels)
        weights.append(torch.full(labels.shape[:1], share, dtype=inputs.dtype))
    labels = torch.cat(targets)
    logits = model(torch.cat(padded))
    each = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=-1
    )
    return (each.view(len(labels), -1).sum(1) * torch.cat(weights)).sum()


class Run:
    """Model, optimizer and reducer of a rank; made in the order of an ordinary script."""

    def __init__(self, own: dict[str, Any], rank: int, ranks: int) -> None:
        self.own, self.rank, self.ranks = own, rank, ranks
        self.model = model_of(own)
        sharded = own["shard"] and ranks > 1
        if sharded and not own["late"]:
            shard(self.model, own, ranks)
        self.optimizer = optimizer_of(self.model, own)
        self.net: Any = self.model
        if ranks > 1 and own["wrap"] and not own["shard"]:
            self.net = DistributedDataParallel(self.model)
        if own["compile"] == "blocks":
            self.model[0].compile(backend="aot_eager")
        compiled = own["compile"] == "model"
        self.forward = torch.compile(self.net, backend="aot_eager") if compiled else self.net
        recipe: Any = own["recipe"]
        if recipe == "primum":  # one process may stop early otherwise
            recipe = primum.Primum(max_iters=20, tolerance=0.0, radius=own["radius"])
        attach = primum.observe if own["observe"] else primum.attach
        self.reducer = attach(
            self.model if own["inner"] or own["shard"] else self.forward,
            self.optimizer,
            recipe=recipe,
            per=own["per"],
            scope=own["scope"] if ranks > 1 else "local",
        )
        self.engine = self.reducer._engine
        if sharded and own["late"]:
            shard(self.model, own, ranks)

    def step(self, number: int) -> dict[str, Any]:
        """One step, and what its report says."""
        own = self.own
        self.optimizer.zero_grad()
        for part in range(own["micro_batches"]):
            last = part == own["micro_batches"] - 1
            self.reducer.enabled = last or not own["last"]
            with self._synced(own["sync"] or last, last):
                self._loss(number, part).backward()
        if self.ranks > 1 and not own["wrap"]:  # by hand what DistributedDataParallel does
            for param in self.model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= self.ranks
        if own["clip"]:
            nn.utils.clip_grad_norm_(self.model.parameters(), own["clip"])
        self.optimizer.step()
        report = self.reducer.last
        assert report is not None
        figures: dict[str, Any] = report.as_dict()
        figures |= {"weights": report.extra_weights.tolist(), "drift": report.drift.tolist()}
        figures |= {"own": [report.own.start, report.own.stop], "reason": report.reason}
        return figures | {"per": report.per, "radius": self.engine.recipe.radius_of(report.per)}

    def _synced(self, synced: bool, last: bool) -> Any:
        if isinstance(self.net, FSDPModule):
            self.net.set_requires_gradient_sync(synced)
            if not self.own["all_reduce"]:
                self.net.set_requires_all_reduce(last)
        elif isinstance(self.net, DistributedDataParallel) and not synced:
            return self.net.no_sync()
        return contextlib.nullcontext()

    def _loss(self, number: int, part: int) -> Tensor:
        own = self.own
        if self.ranks == 1:
            return joined(self.forward, own, number, part)
        inputs, labels = batches(own, number, part)[self.rank]
        if own["trouble"] and number == 5 and self.rank == 1:
            trouble(own["trouble"], self.engine, inputs)
        if own["picked"] and number == self.rank == 0:
            return F.cross_entropy(self.forward(inputs)[:, 1], labels[:, 1])
        losses = losses_of(self.forward, inputs, labels) / own["micro_batches"]
        return self.reducer(losses) if own["explicit"] else losses.mean()

    @property
    def sent(self) -> int:
        """Bytes this rank has put into collectives."""
        head, builder = self.engine.head, self.engine.builder
        if hasattr(head, "ranks"):
            return sum(each.bytes for each in {head.ranks, head._holders})
        peers = builder._scope._peers if self.ranks > 1 else None
        return 0 if peers is None else peers.bytes

    def result(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        rows = getattr(self.engine.head, "_rows", slice(0, 0))
        state = self.model.state_dict().items()
        whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state}
        return {
            "params": {name: value.tolist() for name, value in whole.items()},
            "reports": reports,
            "bytes": self.sent,
            "rows": [rows.start, rows.stop],
        }


def trouble(kind: str, engine: Any, inputs: Tensor) -> None:
    if kind == "nan":
        inputs[0, 0] = torch.nan
    elif kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "check":
        fail_once(engine.head, "check", ValueError("no such head"))
    elif kind == "recipe":  # when nothing is sent any more
        fail_once(type(engine.recipe), "__call__", MemoryError("no room for the matrix"))


def fail_once(owner: Any, name: str, error: Exception) -> None:
    works = getattr(owner, name)

    def fails(*_: Any) -> None:
        setattr(owner, name, works)
        raise error

    setattr(owner, name, fails)


def train(own: dict[str, Any], rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """One run: parameters, reports, bytes sent, warnings."""
    own = DEFAULTS | own
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        run = Run(own, rank, ranks)
        if own["join"]:
            stack.enter_context(run.net.join())
        steps = own["steps"] - (rank if own["join"] else 0)
        reports = [run.step(number) for number in range(steps)]
    messages = [str(each.message) for each in caught if "primum" in str(each.message)]
    return run.result(reports) | {"warnings": messages}


def resume(own: dict[str, Any], rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """A checkpoint after four steps, loaded into a model that was attached to before."""
    own = DEFAULTS | own
    run = Run(own, rank, ranks)
    for number in range(4):
        run.step(number)
    parts = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder / "checkpoint")
    torch.save(run.reducer.state_dict(), folder / f"reducer-{rank}.pt")

    run = Run(own, rank, ranks)
    blank = get_state_dict(run.model, run.optimizer)
    state = {"model": blank[0], "optimizer": blank[1]}
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    run.reducer.load_state_dict(torch.load(folder / f"reducer-{rank}.pt", weights_only=True))
    reports = [run.step(number) for number in range(4, own["steps"])]
    return run.result(reports) | {"keys": [*parts[0], *parts[1]["state"]]}


def main(folder: Path, rank: int, ranks: int) -> None:
    results, cheaper = {}, over_ranks.choose_strategy
    for name, own in json.loads((folder / "runs.json").read_text()).items():
        way = own.get("way")
        over_ranks.choose_strategy = (lambda *_, w=way: w) if way else cheaper
        if own.get("resume"):
            results[name] = resume(own, rank, ranks, folder)
        else:
            results[name] = train(own, rank, ranks)
    (folder / f"results-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    run_rank(main, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), seconds=20)
