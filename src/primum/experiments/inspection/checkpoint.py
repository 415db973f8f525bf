"""Checkpoints of the model to look at: what may be in the file, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.experiments.inspection.settings import InspectError


@dataclass(frozen=True)
class Loaded:
    """What was in a checkpoint besides the model."""

    step: int | None
    with_optimizer: bool


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> Loaded:
    """Load a checkpoint into model and optimizer.

    The file holds a model's `state_dict`, or a dict with it under `model`, and, if they are known,
    that of the optimizer under `optimizer` and the number of steps under `step`. Without the
    optimizer's, the optimizer starts anew: no momentum, no moments.

    Raises:
        InspectError: it cannot be read, or does not fit.
    """
    content = _read(path)
    wrapped = "model" in content and not isinstance(content["model"], Tensor)
    state = content["model"] if wrapped else content
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        first = str(error).split("\n\t")
        raise InspectError(
            f"checkpoint {path} does not fit the model: {' '.join(first[1:3]) or error}"
        ) from error
    saved: Mapping[str, Any] = content if wrapped else {}
    optimizer.state.clear()
    if "optimizer" in saved:
        try:
            optimizer.load_state_dict(saved["optimizer"])
        except (ValueError, KeyError, TypeError) as error:
            raise InspectError(f"checkpoint {path}: its optimizer does not fit: {error}") from error
    step = saved.get("step")
    return Loaded(int(step) if step is not None else None, "optimizer" in saved)


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise InspectError(f"checkpoint {path} does not exist")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that is no checkpoint fails in many ways
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InspectError(f"checkpoint {path} cannot be read: {reason}") from error
    if not isinstance(content, Mapping):
        raise InspectError(
            f"checkpoint {path} holds a {type(content).__name__}, not a state_dict or a dict with "
            "one under 'model'"
        )
    return content
