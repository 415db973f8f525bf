"""One rank of small training runs, for the tests of several ranks.

    python rank_child.py FOLDER RANK RANKS

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

import primum.weighing
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

import primum
import primum.distributed
from loops import PRECISE
from primum.distributed.over_ranks import Sizes, way_for
from rank_group import run_rank

DEFAULTS: dict[str, Any] = {
    "optimizer": "SGD",
    "recipe": "primum",
    "counts": [12, 12],  # samples by rank
    "short": 0,  # fewer on the last rank, in every third step
    "steps": 20,
    "micro_batches": 1,
    "way": None,  # "gather", "rows" or "sum" instead of the cheaper one
    "dense": None,  # whether "rows" forms the matrix, instead of the cheaper form
    "scope": "auto",
    "tokens": 0,  # positions of a sequence; by rank r, r more
    "per": "auto",
    "picked": False,  # in the first step one position alone has a loss on the first rank
    "clip": 0.0,
    "join": False,  # every rank one step less than the one before
    "trouble": None,
    "trouble_rank": 1,
    "wrap": True,
    "inner": False,  # attach to what is inside the wrapper
    "explicit": False,
    "compile": False,
    "dtype": "float32",
    "bias": True,
}


def model_of(own: dict[str, Any]) -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5, bias=own["bias"])
    return nn.Sequential(*body).to(getattr(torch, own["dtype"]))


def optimizer_of(model: nn.Module, own: dict[str, Any]) -> optim.Optimizer:
    if own["optimizer"] == "SGD":
        return optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return optim.AdamW(model.parameters(), lr=0.01)


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


def joined(model: nn.Module, own: dict[str, Any], step: int, part: int) -> None:
    """All samples in one process: each rank's mean, and the mean of these."""
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
    (each.view(len(labels), -1).sum(1) * torch.cat(weights)).sum().backward()


def together(
    model: nn.Module, reducer: Any, own: dict[str, Any], step: int, part: int, rank: int
) -> None:
    inputs, labels = batches(own, step, part)[rank]
    if own["trouble"] and step == 5 and rank == own["trouble_rank"]:
        trouble(own["trouble"], model, inputs)
    losses = losses_of(model, inputs, labels) / own["micro_batches"]
    if own["picked"] and step == rank == 0:
        losses = F.cross_entropy(model(inputs)[:, 1], labels[:, 1], reduction="none")
    if own["trouble"] == "eval":
        model.train()
    (reducer(losses) if own["explicit"] else losses.mean()).backward()


def trouble(kind: str, model: nn.Module, inputs: Tensor) -> None:
    if kind == "nan":
        inputs[0, 0] = torch.nan
    elif kind == "eval":
        model.eval()
    elif kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "memory":
        weigh = primum.distributed.weigh

        def fails(*args: Any) -> None:
            primum.distributed.weigh = weigh
            raise MemoryError("no room for the matrix")

        primum.distributed.weigh = fails
    elif kind == "raises":
        raise ValueError("this rank has had enough")


def train(own: dict[str, Any], rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """One run: parameters, reports, bytes sent, warnings."""
    own = DEFAULTS | own
    model = model_of(own)
    optimizer = optimizer_of(model, own)
    net: nn.Module = model
    if ranks > 1 and own["wrap"]:
        net = DistributedDataParallel(model)
    forward = torch.compile(net, backend="aot_eager") if own["compile"] else net
    scope = own["scope"] if ranks > 1 else "local"
    seen = model if own["inner"] else forward
    settings: dict[str, Any] = {"recipe": own["recipe"], "per": own["per"], "scope": scope}
    if own["recipe"] == "primum":
        settings |= PRECISE  # one process may stop early otherwise
    settings |= {"radius": own["radius"]} if "radius" in own else {}
    reducer = primum.attach(seen, optimizer, **settings)
    reports: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        if own["join"]:
            assert isinstance(net, DistributedDataParallel)
            stack.enter_context(net.join())
        for step in range(own["steps"] - (rank if own["join"] else 0)):
            optimizer.zero_grad()
            for part in range(own["micro_batches"]):
                if ranks == 1:
                    joined(forward, own, step, part)
                    continue
                last = part == own["micro_batches"] - 1
                quiet = isinstance(net, DistributedDataParallel) and not last
                with net.no_sync() if quiet else contextlib.nullcontext():
                    together(forward, reducer, own, step, part, rank)
            if ranks > 1 and not own["wrap"]:  # by hand what DistributedDataParallel does
                for param in model.parameters():
                    dist.all_reduce(param.grad)
                    param.grad /= ranks
            if own["clip"]:
                nn.utils.clip_grad_norm_(model.parameters(), own["clip"])
            optimizer.step()
            report = reducer.last
            assert report is not None
            figures: dict[str, Any] = report.as_dict()
            figures |= {"weights": report.extra_weights.tolist(), "drift": report.drift.tolist()}
            figures |= {"own": [report.own.start, report.own.stop], "reason": report.reason}
            figures |= {"per": report.per, "radius": getattr(reducer._recipe, "radius", None)}
            reports.append(figures)
    made = reducer._scope.ranks() if ranks > 1 and not own["join"] else None
    return {
        "params": {name: p.tolist() for name, p in model.state_dict().items()},
        "reports": reports,
        "bytes": 0 if made is None else made.bytes,
        "warnings": [str(each.message) for each in caught],
    }


def force(
    way: str | None, dense: bool | None, cheaper: Any = (way_for, Sizes.rows_are_dense)
) -> None:
    """Take this way, and this form of it, instead of the cheaper ones."""
    primum.weighing.way_for = cheaper[0] if way is None else lambda *_, **__: way
    Sizes.rows_are_dense = cheaper[1] if dense is None else property(lambda _: dense)


def main(folder: Path, rank: int, ranks: int) -> None:
    results = {}
    for name, own in json.loads((folder / "runs.json").read_text()).items():
        force(own.get("way"), own.get("dense"))
        results[name] = train(own, rank, ranks)
    (folder / f"results-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    run_rank(main, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), seconds=20)
