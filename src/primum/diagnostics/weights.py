"""Extra weights for one batch, computed in several ways, and the harm that each removes."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from primum.diagnostics.head import see_head
from primum.diagnostics.interference import Interference
from primum.diagnostics.probe import Probe
from primum.kernel.recipe import RADIUS, Primum, Recipe
from primum.kernel.solver import solve
from primum.paper import Paper, PaperSettings

NETWORK_ITERS = 100  # enough to converge: "network" is a reference


def reor(before: Tensor, after: Tensor) -> Tensor:
    """Relative effective objective reduction (REOR): the share of the harm that is removed.

    `(J(step) - J(step*)) / J(step)` with `J = sum(max(0, change))` (paper, Figure 1 bottom); 1 if
    no sample is harmed any more, negative if harm is added, NaN if there was none. `before` and
    `after` are the samples' loss changes under the two steps, to first order
    (`Interference.drift_after`, `FirstOrder.drift`) or measured (`RealStep.change`).

    PAPER: step* is printed as `step + G' w`; with extra weights w >= 0 it is `step - D G' w`.

    Shapes: before [B], after [..., B] -> [...].
    """
    harm = before.clamp_min(0).sum()
    return torch.where(harm > 0, (harm - after.clamp_min(0).sum(-1)) / harm, torch.nan)


def weightings(
    probe: Probe,
    interference: Interference,
    *,
    radius: float = RADIUS["sample"],
    max_extra_weight: float = 2.0,
    recipes: Mapping[str, Recipe] | None = None,
) -> dict[str, Tensor]:
    """Extra weights for the batch, computed in several ways. name -> [B].

    - "head": what `attach` would apply: the head's problem.
    - "paper": the paper's recipe at the head, with newly initialized moving averages.
    - "network": the same problem as "head", for the whole network.
    - "permuted": the weights of "head", shuffled over the batch.
    - "uniform": the mean weight of "head", for every sample.

    Args:
        probe: The probe that was measured.
        interference: `measure(probe)`.
        radius: Trust-region radius of "head", "paper" and "network".
        max_extra_weight: Upper bound on their extra weights.
        recipes: More recipes to apply at the head, for example a `Paper` with its averages from
            training. They are copied first, so their state does not change.
    """
    seen = see_head(probe)
    settings = PaperSettings(radius=radius, max_extra_weight=max_extra_weight)
    asked: dict[str, Recipe] = {
        "head": Primum(radius=radius, max_extra_weight=max_extra_weight),
        "paper": Paper(settings),
    }
    found = {key: seen.weights(recipe) for key, recipe in asked.items()}
    if radius == 0:
        found["network"] = torch.zeros_like(found["head"])
    else:
        problem = interference.problem(radius=radius, max_extra_weight=max_extra_weight)
        found["network"] = solve(problem, NETWORK_ITERS).extra_weights
    order = torch.randperm(
        probe.batch_size, generator=torch.Generator().manual_seed(probe.seed)
    ).to(probe.device)
    found["permuted"] = found["head"][order]
    found["uniform"] = found["head"].mean().expand_as(found["head"]).clone()
    for key, recipe in (recipes or {}).items():
        found[key] = seen.weights(copy.deepcopy(recipe))
    return found
