"""What some run of a sweep would end on, said before the first one."""

from __future__ import annotations

from collections.abc import Sequence

from primum.experiments.models import build_model, find_model
from primum.experiments.sweeps.build import build_optimizer
from primum.experiments.sweeps.method import make_recipe
from primum.experiments.sweeps.ranks import check_device, current
from primum.experiments.sweeps.settings import RunSettings
from primum.experiments.sweeps.training import attached


def check_runs(runs: Sequence[RunSettings]) -> None:
    """Refuse devices, arms and models that cannot be had.

    A model is built where its data are known without loading them; for the others, whatever can
    be said without.
    """
    ranks = current()
    for run in runs:
        ranks.check(run)
    for device in dict.fromkeys(run.device for run in runs):
        check_device(device)
    for arm in dict.fromkeys(run.arm for run in runs):
        make_recipe(arm, seed=0)
    for run in {_model(run): run for run in runs}.values():
        _check_model(run)


def _model(run: RunSettings) -> tuple[object, ...]:
    return run.model, run.norm, run.optimizer, run.data_settings().known_shape


def _check_model(run: RunSettings) -> None:
    shape = run.data_settings().known_shape
    if shape is None:
        find_model(run.model, run.norm)
        return
    model = build_model(run.model, *shape, norm=run.norm, seed=run.seed)
    attached(run, model, build_optimizer(run, model)).reducer.remove()
