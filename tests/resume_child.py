"""A training run that can be killed at any moment: `python resume_child.py FOLDER [STEP MOMENT]`.

Trains every case side by side, step by step, with dropout, clipping and (for AdamW) a GradScaler,
and writes a checkpoint every few steps. Started again, it goes on from the last one. With STEP and
MOMENT it kills itself there, as no handler can catch.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum

CASES = [(recipe, kind) for recipe in ("primum", "paper") for kind in ("SGD", "AdamW")]
STEPS, EVERY = 14, 3


class Run:
    """One model with everything a checkpoint must hold."""

    def __init__(self, recipe: str, kind: str) -> None:
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))
        options = {"momentum": 0.9} if kind == "SGD" else {"weight_decay": 0.05}
        self.optimizer = getattr(optim, kind)(self.model.parameters(), lr=0.02, **options)
        self.scheduler = optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=4, enabled=kind != "SGD")
        self.reducer = primum.attach(self.model, self.optimizer, recipe=recipe, scaler=self.scaler)

    def backward(self, inputs: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(F.cross_entropy(self.model(inputs), labels)).backward()

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in vars(self).items():
            part.load_state_dict(state[name])


def batch(step: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(step)
    return torch.randn(24, 6, generator=rng), torch.randint(3, (24,), generator=rng)


def write(state: dict[str, Any], path: Path, *, die: bool = False) -> None:
    """All or nothing: a kill in the middle leaves the file before it as it was."""
    content = io.BytesIO()
    torch.save(state, content)
    data, part = content.getvalue(), path.with_suffix(".part")
    with open(part, "wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        if die:
            kill()
        file.write(data[len(data) // 2 :])
        os.fsync(file.fileno())
    os.replace(part, path)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, die_at: int = -1, moment: str = "") -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    runs = {f"{recipe} {kind}": Run(recipe, kind) for recipe, kind in CASES}
    first, path = 0, folder / "checkpoint.pt"
    if path.exists():
        state = torch.load(path, weights_only=True)
        first = state["step"]
        torch.set_rng_state(state["rng"])
        for name, run in runs.items():
            run.load_state_dict(state["runs"][name])
    print(f"from step {first}", flush=True)
    for step in range(first, STEPS):
        for run in runs.values():
            run.backward(*batch(step))
            if (die_at, moment) == (step, "before the optimizer's step"):
                kill()
            run.step()
        if (step + 1) % EVERY == 0:
            state = {
                "step": step + 1,
                "rng": torch.get_rng_state(),
                "runs": {name: run.state_dict() for name, run in runs.items()},
            }
            write(state, path, die=(die_at, moment) == (step, "while saving"))
    for run in runs.values():
        assert run.reducer.last is not None
        assert run.reducer.last.applied
        assert run.reducer.last.mean_extra_weight > 0
    write({name: run.state_dict() for name, run in runs.items()}, folder / "end.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]), *sys.argv[3:])
