"""Train a language model's head for two steps and print memory in KiB: before, and at the peak."""

import re
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn, optim

import primum

WORDS, WIDTH, ROWS, TOKENS = 32_000, 128, 8, 96


def peak() -> int:
    """KiB of this program; what `getrusage` tells includes its parent, from before `exec`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def main(kind: str, arm: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    )
    make = {"SGD": optim.SGD, "AdamW": optim.AdamW}[kind]
    optimizer = make(model.parameters(), lr=1e-2, **({"momentum": 0.9} if kind == "SGD" else {}))
    reducer = None
    if arm != "plain":
        reducer = primum.attach(model, optimizer, per=arm)
    words = torch.randint(WORDS, (ROWS, TOKENS))
    for number in range(3):
        if number == 1:
            start = peak()
        optimizer.zero_grad()
        logits = model(words if number else words[:, :2])  # first a short one: imports, state
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), words[:, 1 : logits.shape[1]].flatten()
        )
        loss.backward()
        optimizer.step()
        if reducer is not None:
            assert reducer.last is not None
            assert reducer.last.applied
            assert reducer.last.fallbacks == 0
    if arm == "token":
        assert reducer is not None
        assert reducer.last is not None
        assert reducer.last.approximate
    print(start, peak())


if __name__ == "__main__":
    main(*sys.argv[1:])
