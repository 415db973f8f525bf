"""Sweeps: what is finished is skipped, errors lose nothing, workers change no number."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from lab import sweep
from lab.arms import Arm
from lab.errors import UserError
from lab.job import Place
from lab.plan import plan
from lab.progress import Progress
from lab.store import Store
from lab.sweep import check_workers, run_sweep
from lab.torchrun import Ranks
from laboratory.conftest import TINY, numbers, tiny

RUNS = plan([TINY], [Arm("primum"), Arm("lr-matched")], range(2))


def quiet() -> Progress:
    return Progress(io.StringIO())


def test_two_workers_make_the_same_runs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a process each that prepares batches."""
    monkeypatch.setattr(sweep, "cores", lambda: 2)
    alone = run_sweep(RUNS, place, quiet())
    store = Store(place.store.folder / "other")
    together = run_sweep(RUNS, replace(place, store=store, workers=2, data_workers=1), quiet())
    assert [numbers(run) for run in together] == [numbers(run) for run in alone]
    assert [(run.arm, run.seed) for run in together] == [(r.arm.label, r.seed) for r in RUNS]


def test_finished_runs_are_not_made_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_sweep(RUNS[:2], place, quiet())
    made: list[str] = []
    real = sweep.train_run

    def spy(run, *rest):  # type: ignore[no-untyped-def]
        made.append(run.key)
        return real(run, *rest)

    monkeypatch.setattr(sweep, "train_run", spy)
    every = run_sweep(RUNS, place, quiet())
    assert made == [run.key for run in RUNS[2:]]
    assert every[:2] == first


def test_a_checkpoint_of_a_finished_run_is_cleared_away(place: Place) -> None:
    run_sweep(RUNS[:1], place, quiet())
    place.store.save_checkpoint(RUNS[0], {"step": 1})  # as if killed before it was removed
    run_sweep(RUNS[:1], place, quiet())
    assert not place.store.checkpoint_path(RUNS[0]).exists()


def test_lr_matched_has_the_factor_of_its_seed(place: Place) -> None:
    made = {(run.arm, run.seed): run for run in run_sweep(RUNS, place, quiet())}
    for seed in range(2):
        extra = made["primum", seed].steps["mean_extra_weight"]
        expected = 1 + sum(extra) / len(extra)
        assert made["lr-matched", seed].arm_settings["lr_factors"] == [pytest.approx(expected)]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_stops_the_sweep_and_loses_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(sweep, "cores", lambda: 2)
    impossible = tiny("base", batch_size=64)
    place = replace(place, workers=workers)
    with pytest.raises(UserError, match="there are 32 samples"):
        run_sweep([RUNS[0], impossible], place, quiet())
    left = [path for path in place.store.folder.rglob("*") if path.is_file()]
    assert left in ([place.store.run_path(RUNS[0])], [])  # the two race for two workers


def test_more_workers_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "cores", lambda: 2)
    check_workers(2)
    with pytest.raises(UserError, match="3 workers were requested, but there are 2 cores"):
        check_workers(3)
    with pytest.raises(UserError, match=r"2 workers of 2 threads .* choose at most 1"):
        check_workers(2, threads=2)
    check_workers(1, data_workers=2)
    with pytest.raises(UserError, match=r"^3 data workers were .* choose at most 2"):
        check_workers(1, data_workers=3)
    with pytest.raises(UserError, match=r"2 data workers for each of 2 workers .* at most 1"):
        check_workers(2, data_workers=2)


def test_workers_and_ranks_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "current", lambda: Ranks(0, 2))
    with pytest.raises(UserError, match="leave --workers at 1"):
        run_sweep(RUNS, replace(place, workers=2), quiet())


def test_a_matched_run_whose_reference_is_missing(place: Place) -> None:
    with pytest.raises(UserError, match="lr-matched, seed 0: the runs it is matched to"):
        run_sweep([tiny("lr-matched")], place, quiet())


@pytest.mark.parametrize(
    ("precision", "fast", "warned"),
    [("bf16", False, True), ("bf16", True, False), ("fp32", False, False)],
)
def test_bf16_on_a_processor_without_it_is_announced(
    place: Place, monkeypatch: pytest.MonkeyPatch, precision: str, fast: bool, warned: bool
) -> None:
    monkeypatch.setattr(sweep, "computes_bf16", lambda device: fast)
    printed = io.StringIO()
    runs = [replace(run, precision=precision) for run in RUNS[:1]]
    run_sweep(runs, place, Progress(printed))
    assert (sweep.SLOW in printed.getvalue()) == warned
    again = io.StringIO()
    run_sweep(runs, place, Progress(again))  # nothing to do
    assert sweep.SLOW not in again.getvalue()
