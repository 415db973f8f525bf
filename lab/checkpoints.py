"""Models from a user's checkpoint files, for `inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lab.errors import UserError, reading


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> tuple[int | None, bool]:
    """Load a checkpoint; returns its step, if known, and whether it has the optimizer's state.

    The file holds a model's `state_dict`, or a dict with keys `model` and, optionally, `optimizer`
    and `step`. Without the optimizer's state there is no momentum.
    """
    content = _read(path)
    wrapped = "model" in content and not isinstance(content["model"], Tensor)
    try:
        model.load_state_dict(content["model"] if wrapped else content)
    except Exception as error:  # any key and any value may stand in it
        first = str(error).split("\n\t")
        raise UserError(
            f"checkpoint {path} does not match the model: {' '.join(first[1:3]) or error}"
        ) from error
    saved: Mapping[str, Any] = content if wrapped else {}
    optimizer.state.clear()
    if "optimizer" in saved:
        try:
            optimizer.load_state_dict(saved["optimizer"])
        except Exception as error:
            raise UserError(f"checkpoint {path}: optimizer does not match: {error}") from error
    step = saved.get("step")
    if step is not None and (not isinstance(step, int) or abs(step) > 2**53):
        raise UserError(f"checkpoint {path}: step must be an integer, got {str(step)[:40]}")
    return step, "optimizer" in saved


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise UserError(f"checkpoint {path} does not exist; pass a file written by torch.save")
    with reading(f"checkpoint {path}"):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, Mapping):
        raise UserError(
            f"checkpoint {path} holds a {type(content).__name__}, not a state_dict or a dict with "
            "one under 'model'"
        )
    return content
