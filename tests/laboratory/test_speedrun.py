"""The speedrun: its runs, their order, and the command from end to end at a toy size."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.arms import Arm
from lab.cli import main
from lab.speedrun import (
    CONTROLS,
    DESIGNS,
    MAIN,
    RATES,
    SEEDS,
    SMALLEST,
    TUNING_SEED,
    best_precision,
    recipe,
    speedrun_runs,
    study_runs,
    tuned,
    tuning_runs,
)
from lab.store import Store


def test_learning_rate_and_decay_are_decoupled() -> None:
    """From the published numbers of airbench94: lr 11.5, decay 0.0153, momentum 0.85."""
    own = recipe(8, lr=11.5, weight_decay=0.0153, batch_size=1024)
    per_sample = 11.5 / (1024 * (1 + 1 / (1 - 0.85)))  # for a sum of losses
    assert own.rate == pytest.approx(1024 * per_sample)
    other = recipe(8, lr=23.0, weight_decay=0.0153, batch_size=512)
    assert other.rate == pytest.approx(own.rate)  # twice the rate, half the batch
    # The share that all steps over 1,024 samples take away is the same.
    assert 2 * other.rate * other.decay == pytest.approx(own.rate * own.decay)


def test_every_budget_is_a_whole_schedule() -> None:
    for epochs in DESIGNS["full"].budgets:
        assert tuned(epochs).epochs == epochs
        assert tuned(epochs).warmup == pytest.approx(0.23 * epochs, abs=0.005)


def test_stopped_anywhere_it_is_a_fair_comparison() -> None:
    runs = speedrun_runs("small", range(3))
    assert len(runs) == 3 * 3 * len((*MAIN, *SMALLEST, *CONTROLS))
    assert len({run.key for run in runs}) == len(runs)
    assert [run.arm for run in runs[:4]] == [Arm.parse(arm) for arm in MAIN]
    for stop in range(len(runs)):
        done: dict[tuple[int, Arm], int] = {}
        for run in runs[:stop]:
            done[run.epochs, run.arm] = done.get((run.epochs, run.arm), 0) + 1
        for budget in (2, 4, 8):
            for arms in (MAIN, (*SMALLEST, *CONTROLS)):
                counts = [done.get((budget, Arm.parse(arm)), 0) for arm in arms]
                assert max(counts) - min(counts) <= 1
    assert {run.train_size for run in runs} == {20_000}
    full = speedrun_runs("full", range(1), budgets=[2], train_size=30_000)
    assert {(run.train_size, run.epochs, run.views) for run in full} == {(30_000, 2, 6)}


@pytest.mark.parametrize(("fast", "precision"), [(True, "bf16"), (False, "fp32")])
def test_precision_is_what_the_processor_is_fast_in(
    monkeypatch: pytest.MonkeyPatch, fast: bool, precision: str
) -> None:
    monkeypatch.setattr("lab.speedrun.computes_bf16", lambda device: fast)
    assert best_precision("cpu") == precision
    assert {run.precision for run in speedrun_runs("small", precision=best_precision("cpu"))} == {
        precision
    }
    assert {run.precision for run in speedrun_runs("small")} == {"bf16"}  # keys do not depend on it


def test_tuning_uses_a_seed_that_is_not_compared_and_base_alone() -> None:
    runs = tuning_runs()
    assert {run.arm.name for run in runs} == {"base"}
    assert {run.seed for run in runs} == {TUNING_SEED}
    assert max(design.seeds for design in DESIGNS.values()) <= TUNING_SEED
    tried = {(run.epochs, run.rate, run.decay) for run in runs}
    assert tuple(RATES) == DESIGNS["full"].budgets  # base is tuned at every one of them
    assert all((b, tuned(b).rate, tuned(b).decay) in tried for b in RATES)


def test_the_command_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reproduce", "speedrun", "--scale", "smoke", "--out", str(tmp_path)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "| base |" in printed
    assert "| primum@radius=0.05 |" in printed
    assert "runs that reach" in printed
    folder = tmp_path / "smoke"
    assert str(tmp_path) not in (folder / "speedrun.md").read_text()
    assert (folder / "speedrun.png").stat().st_size > 5000
    store = Store(folder)
    for run in speedrun_runs("smoke", precision=best_precision("cpu")):
        record = store.find(run)
        assert record is not None
        assert record.final["views_test_accuracy"] is not None
        assert record.final["fallbacks"] == 0
    assert main(words) == 0
    assert "already finished" in capsys.readouterr().err
    assert main([*words, "--no-resume"]) == 2


def test_its_options_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["reproduce", "table1", "--train-size", "5"])
    assert "only apply to speedrun" in capsys.readouterr().err
    assert main(["reproduce", "--list"]) == 0
    assert f"speedrun         small: {len(speedrun_runs('small'))} runs" in capsys.readouterr().out


def test_the_study_has_all_budgets_and_three_seeds_or_more() -> None:
    runs = study_runs()
    assert len({run.key for run in runs}) == len(runs)
    assert {run.epochs for run in runs} == set(DESIGNS["full"].budgets)
    seeds: dict[tuple[int, Arm], set[int]] = {}
    for run in runs:
        seeds.setdefault((run.epochs, run.arm), set()).add(run.seed)
    for arms, counts in SEEDS.items():
        for arm in arms:
            found = {
                epochs: own for (epochs, other), own in seeds.items() if other == Arm.parse(arm)
            }
            assert found == {epochs: set(range(count)) for epochs, count in counts.items()}
    assert min(count for counts in SEEDS.values() for count in counts.values()) == 3
