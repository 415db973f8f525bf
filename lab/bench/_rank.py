"""One rank of `ranks.py`: interleaved training steps, plain and with weights in each way.

    python _rank.py FOLDER RANK RANKS

FOLDER holds `settings.json`. Rendezvous and results are files there too, so no ports are needed.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import primum
from lab.bench._common import take_turns
from lab.bench._scale import WAYS, Case
from lab.bench.overhead import optimizer_of, peak_memory
from primum.distributed import over_ranks

FEATURES, WIDTH = 256, 512  # of the network before the head
BATCHES = 4  # used in turn, so that gradients differ from step to step
LEAST = 5  # rounds


class Arm:
    """A model in training under DistributedDataParallel: plain, or with weights in one way."""

    def __init__(self, way: str, case: Case, rank: int) -> None:
        torch.manual_seed(0)
        below = [nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        below += [nn.Linear(WIDTH, case.inputs), nn.ReLU()]
        self.model = DistributedDataParallel(
            nn.Sequential(*below, nn.Linear(case.inputs, case.outputs))
        )
        self.params = sum(p.numel() for p in self.model.parameters())
        self.optimizer = optimizer_of(case.optimizer, self.model)
        generator = torch.Generator().manual_seed(rank)
        self.inputs = torch.randn(BATCHES, case.own, FEATURES, generator=generator)
        self.labels = torch.randint(case.outputs, (BATCHES, case.own), generator=generator)
        self.steps = 0
        self.way, self.reducer = way, None
        if way != "plain":
            scope = "local" if way == "local" else "global"
            self.reducer = primum.attach(self.model, self.optimizer, scope=scope)

    def step(self) -> None:
        """One training step; returns when the slowest rank has finished it."""
        over_ranks.choose_strategy = lambda *_: self.way  # not the cheapest, but this one
        inputs, labels = self.inputs[self.steps % BATCHES], self.labels[self.steps % BATCHES]
        self.steps += 1
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        loss.backward()
        self.optimizer.step()
        dist.barrier()

    def sent(self) -> int:
        """Bytes of payload so far."""
        if self.reducer is None or dist.get_world_size() == 1:
            return 0
        builder: Any = self.reducer._engine.builder
        peers = builder._scope._peers
        return 0 if peers is None else peers.bytes

    def held(self) -> int:
        """Peak bytes while the library computes weights, over what was held before."""
        if self.reducer is None:
            self.step()
            return 0
        reweight, peaks = self.reducer._engine.reweight, []

        def measured(*args: Any, **settings: Any) -> Any:
            found: list[Any] = []
            peaks.append(peak_memory(lambda: found.append(reweight(*args, **settings))))
            return found[0]

        with mock.patch.object(self.reducer._engine, "reweight", measured):
            self.step()
        return peaks[0]

    def bytes(self) -> tuple[int, int | None]:
        """Bytes of one step: payload, and what this process writes to its sockets, if known."""
        before, written = self.sent(), written_so_far()
        self.step()
        now = written_so_far()
        wire = None if written is None or now is None else now - written
        return self.sent() - before, wire

    def check(self) -> None:
        if self.reducer is not None:
            report = self.reducer.last
            assert report is not None
            assert report.applied, report.reason
            assert report.fallbacks == 0


def written_so_far() -> int | None:
    """Bytes this process has written, as the kernel counts; during a step only to sockets."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar:")), None)


def rounds(seconds: float, most: int, taken: float) -> int:
    """How many rounds of `taken` seconds fit into `seconds`; the first rank decides."""
    count = torch.tensor(max(LEAST, min(most, int(seconds / taken))))
    dist.broadcast(count, src=0)
    return int(count)


def measure(case: Case, seconds: float, most: int, rank: int) -> dict[str, Any]:
    """Times and bytes of every arm in one case."""
    ways = WAYS if case.ranks > 1 else WAYS[:1]
    arms = [Arm(way, case, rank) for way in ("plain", *ways)]
    for arm in arms:
        arm.step()  # without optimizer state yet
    found: dict[str, Any] = {arm.way: {"held": arm.held()} for arm in arms}
    begin = perf_counter()
    for arm in arms:
        found[arm.way]["payload"], found[arm.way]["wire"] = arm.bytes()
    count = rounds(seconds, most, perf_counter() - begin)
    times = take_turns([arm.step for arm in arms], 0, most=count, least=count)
    for arm, own in zip(arms, times, strict=True):
        arm.check()
        found[arm.way]["seconds"] = own
    return {"case": asdict(case), "params": arms[0].params, "arms": found}


def main(folder: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / f'rendezvous-{ranks}'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    settings = json.loads((folder / "settings.json").read_text())
    cases = [Case(**own, ranks=ranks) for own in settings["cases"]]
    results = []
    bar = tqdm(cases, desc=f"ranks: {ranks}", unit="case", disable=rank > 0, dynamic_ncols=True)
    for case in bar:
        bar.set_postfix_str(f"{case.optimizer} {case.head} B={case.batch}")
        results.append(measure(case, settings["seconds"], settings["repeats"], rank))
    if rank == 0:
        (folder / f"results-{ranks}.json").write_text(json.dumps(results))
    dist.barrier()  # gloo may abort a rank that exits while its last operation is cleaned up
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
