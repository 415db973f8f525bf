"""Which samples to weigh: several answers for one batch, and how much harm each removes."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from primum.diagnostics.head import see_head
from primum.diagnostics.interference import Interference
from primum.diagnostics.probe import Probe
from primum.paper import Paper, PaperSettings
from primum.positions import RADIUS
from primum.recipe import Primum, Recipe
from primum.solve import solve

NETWORK_ITERS = 100  # The yardstick shall not suffer from its solver.


def reor(before: Tensor, after: Tensor) -> Tensor:
    """Relative effective objective reduction: the share of the harm that is gone.

    `(J(step) - J(step*)) / J(step)` with `J = sum(max(0, change))` (paper, Figure 1 bottom); 1 if
    nobody is harmed any more, negative if there is more harm than before, NaN if there was none.
    `before` and `after` are the changes of the samples' losses under the two steps, to first order
    (`Interference.drift_after`, `FirstOrder.drift`) or real ones (`RealStep.change`).

    PAPER: it writes step* as `step + G' w`; with extra weights w >= 0 that is `step - D G' w`.

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
    """Extra weights for the batch, by the name of who gives them. name -> [B].

    - "head": what `attach` would apply: the head's problem.
    - "paper": the paper's recipe at the head, its moving averages as at the first step.
    - "network": the same problem as "head" for the whole network.
    - "permuted": those of "head", shuffled over the batch.
    - "uniform": the mean of those of "head", for every sample.

    Args:
        probe: What was measured.
        interference: `measure(probe)`.
        radius: Of all three problems.
        max_extra_weight: Of all three problems.
        recipes: More of them to ask at the head, for example a `Paper` with its averages from
            training. They are copied, not disturbed.
    """
    seen = see_head(probe)
    settings = PaperSettings(radius=radius, max_extra_weight=max_extra_weight)
    asked: dict[str, Recipe] = {
        "head": Primum(radius=radius, max_extra_weight=max_extra_weight),
        "paper": Paper(settings),
    }
    found = {key: seen.weigh(recipe) for key, recipe in asked.items()}
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
        found[key] = seen.weigh(copy.deepcopy(recipe))
    return found
