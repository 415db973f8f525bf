"""What `attach` was asked for and has found, for a Reducer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from primum.positions import Per
from primum.ranks import Scope
from primum.recipe import Recipe
from primum.shards import Shards


@dataclass(frozen=True)
class Options:
    """How a head is weighed.

    Attributes:
        model: As passed to `attach`.
        head: The layer whose rows of gradients are weighed.
        owners: The optimizers of its "weight" and, if one holds it, "bias".
        recipe: From a step's Gram operator and drift to extra weights.
        per: What gets a weight of its own.
        scaler: The loop's GradScaler, or None.
        scope: The ranks that solve together.
        name: The head's.
        check_output: Whether to check that the head's output reaches the model's.
        shards: Of a head that is split over ranks; None if it is whole.
    """

    model: nn.Module
    head: nn.Linear
    owners: dict[str, Optimizer]
    recipe: Recipe
    per: Per
    scaler: Any
    scope: Scope
    name: str
    check_output: bool = False
    shards: Shards | None = None
