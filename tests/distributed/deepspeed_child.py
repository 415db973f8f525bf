"""DeepSpeed itself on one process: what is refused, and stage 0, which is not."""

from __future__ import annotations

import os
import warnings
from typing import Any

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
os.environ.setdefault("MASTER_PORT", "29577")

import deepspeed
import torch
from torch import nn

import primum


def run(stage: int, order: str, *, bf16: bool = False) -> str:
    """Four steps; "applied", or what an error or a warning says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 24,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
    }
    reducer = primum.attach(model, optimizer) if order == "before" else None
    engine, wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    given = {
        "engine": (engine, wrapped),
        "module": (engine.module, wrapped),
        "optimizer": (engine.module, optimizer),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if reducer is None:
            try:
                reducer = primum.attach(*given[order])
            except (TypeError, ValueError) as error:
                return str(error)
        for _ in range(4):
            inputs = torch.randn(24, 6, dtype=torch.bfloat16 if bf16 else torch.float32)
            labels = torch.randint(4, (24,))
            engine.backward(nn.functional.cross_entropy(engine(inputs).float(), labels))
            engine.step()
    said = [str(each.message) for each in caught if "primum" in str(each.message)]
    assert reducer.last is not None
    return "applied" if reducer.last.applied else "\n".join(said)


if __name__ == "__main__":
    for order in ("before", "engine", "module", "optimizer"):
        assert run(0, order) == "applied"
        for stage, bf16 in ((0, True), (1, False), (1, True), (2, False), (3, False)):
            found = run(stage, order, bf16=bf16)
            assert "DeepSpeed" in found, (stage, order, bf16, found)
            assert "fully_shard" in found
