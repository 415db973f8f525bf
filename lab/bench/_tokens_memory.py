"""Train a head of 32,000 words for two steps and print memory in KiB: before, and at the peak."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import primum

WORDS, WIDTH, TOKENS = 32_000, 768, 128


def peak() -> int:
    """Peak KiB of this process; `getrusage` would include its parent's from before `exec`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def main(kind: str, arm: str, sequences: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(WORDS, 8), nn.Linear(8, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    )
    optimizer: Optimizer = (
        SGD(model.parameters(), 1e-2, 0.9) if kind == "sgd" else AdamW(model.parameters())
    )
    reducer = None
    if arm == "primum":
        reducer = primum.attach(model, optimizer, per="token", radius=0.1)
    words = torch.randint(WORDS, (int(sequences), TOKENS + 1))
    for number in range(3):
        if number == 1:
            start = peak()
        some = words if number else words[:, :2]  # first a short batch: imports, optimizer state
        optimizer.zero_grad()
        logits = model(some[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten()).backward()
        del logits
        optimizer.step()
    if reducer is not None:
        assert reducer.last is not None
        assert reducer.last.applied, reducer.last.reason
        assert reducer.last.fallbacks == 0
    print(start, peak())


if __name__ == "__main__":
    main(*sys.argv[1:])
