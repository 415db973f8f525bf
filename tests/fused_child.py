"""One of two ranks that train with a fused loss, beside a twin whose head is called.

    python fused_child.py FOLDER RANK RANKS

Prints a line of JSON for each way to call the loss. The rendezvous is a file in FOLDER: no ports.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import primum
from rank_group import run_rank
from words import Language, Run


class Loss(nn.Module):
    """A model whose forward gives the loss: by the head, or by the reducer if it has one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.language = Language(37, 8, bias=True, tied=False).double()
        self.options, self.reducers = options, []

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if not self.reducers:
            logits = self.language(inputs)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        hidden = self.language.hidden(inputs)
        return self.reducers[0].linear_cross_entropy(hidden, targets, **self.options)


class Outside(Loss):
    """Gives hidden states; the loss is computed by the loop."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.language.hidden(inputs)


def train(rank: int, model: Loss, *, fused: bool) -> tuple[list[Tensor], primum.Reducer]:
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5, momentum=0.9)
    reducer = primum.attach(
        wrapped, optimizer, head="module.language.head", per="token", max_iters=20, tolerance=0.0
    )
    if fused and not isinstance(model, Outside):
        model.reducers.append(reducer)
    weights = []
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = Run.batch(Words(), 10 * step + rank, rows=4 + rank)
        found = wrapped(inputs, targets)
        if isinstance(model, Outside):
            found = reducer.linear_cross_entropy(found, targets)
        found.backward()
        optimizer.step()
        assert reducer.last is not None
        weights.append(reducer.last.extra_weights)
    return weights, reducer


class Words:
    words = 37


def main(folder: Path, rank: int, ranks: int) -> None:
    ways = {
        "whole": Loss(),
        "blocks": Loss(chunk_size=5),
        "one in blocks": Loss(chunk_size=5 if rank else None),
        "outside": Outside(),
    }
    expected, _ = train(rank, Loss(), fused=False)
    for name, model in ways.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found, reducer = train(rank, model, fused=True)
        total = torch.cat([p.detach().flatten() for p in model.parameters()]).sum()
        record = {
            "way": name,
            "counts": [len(each) for each in found],
            "largest": max(float(each.max()) for each in found),
            "apart": max(
                float((one - other).abs().max()) if one.shape == other.shape else -1.0
                for one, other in zip(found, expected, strict=True)
            ),
            "fallbacks": int(reducer.last.fallbacks) if reducer.last else -1,
            "said": [str(each.message) for each in said],
            "parameters": float(total),
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    run_rank(main, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
