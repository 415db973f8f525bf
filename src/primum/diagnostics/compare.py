"""Compare all weightings of one batch, to first order and by real steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from primum.diagnostics.interference import FirstOrder, Interference, first_order, measure
from primum.diagnostics.probe import Probe
from primum.diagnostics.real import RealStep, real_steps
from primum.diagnostics.weights import reor, weightings
from primum.kernel.recipe import RADIUS, Recipe


@dataclass(frozen=True, eq=False)
class Comparison:
    """Effects of several weightings of one batch; the first entry, "plain", is the plain step.

    Attributes:
        interference: `measure(probe)`, for the whole network.
        extra_weights: name -> [B]; zeros for "plain".
        first: First-order effect of each weighting, under the optimizer's true step.
        real: Measured effect of each weighting.
    """

    interference: Interference
    extra_weights: dict[str, Tensor]
    first: dict[str, FirstOrder]
    real: dict[str, RealStep]

    def reor(self) -> dict[str, Tensor]:
        """Share of the whole network's first-order harm removed by each weighting. Scalars."""
        plain = self.first["plain"].drift
        return {key: reor(plain, found.drift) for key, found in self.first.items()}

    def real_reor(self) -> dict[str, Tensor]:
        """Share of the measured harm removed by each weighting. Scalars."""
        plain = self.real["plain"].change
        return {key: reor(plain, found.change) for key, found in self.real.items()}

    def table(self) -> dict[str, list[str] | list[float]]:
        """One row per weighting, for `pandas.DataFrame`. Waits for the device.

        Columns: `reor` (true step), `reor_fixed_gain` (as in the convex problem), `reor_real`;
        `harmed` and `harmed_real`, shares of the batch; `sign_right` and `correlation`, how well
        the first-order prediction matches the measured change; `mean_extra_weight`.
        """
        plain = self.first["plain"].drift
        columns: dict[str, list[Tensor]] = {
            "mean_extra_weight": [w.mean() for w in self.extra_weights.values()],
            "reor": list(self.reor().values()),
            "reor_fixed_gain": [
                reor(plain, self.interference.drift_after(w)) for w in self.extra_weights.values()
            ],
            "reor_real": list(self.real_reor().values()),
            "harmed": [(f.drift > 0).to(plain.dtype).mean() for f in self.first.values()],
            "harmed_real": [step.harmed for step in self.real.values()],
            "sign_right": [step.sign_right for step in self.real.values()],
            "correlation": [step.correlation for step in self.real.values()],
        }
        figures = torch.stack([torch.stack(column) for column in columns.values()]).tolist()
        names: dict[str, list[str] | list[float]] = {"weights": list(self.extra_weights)}
        return names | dict(zip(columns, figures, strict=True))


def compare(
    probe: Probe,
    *,
    radius: float = RADIUS["sample"],
    max_extra_weight: float = 2.0,
    recipes: Mapping[str, Recipe] | None = None,
) -> Comparison:
    """Measure a batch, compute all `weightings`, and take the step with each of them on copies.

    The keyword arguments are those of `weightings`.
    """
    interference = measure(probe)
    given = weightings(
        probe, interference, radius=radius, max_extra_weight=max_extra_weight, recipes=recipes
    )
    first = first_order(probe, given)
    everyone = {"plain": torch.zeros_like(interference.losses)} | given
    return Comparison(interference, everyone, first, real_steps(probe, given, first))
