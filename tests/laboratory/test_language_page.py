"""Tables and plots of the page on language models, from runs made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.language_page import MAKERS, PLOTS, common, language_plots
from lab.runs import RunRecord, read_index
from lab.tables import Group, group_runs
from laboratory.conftest import record

INDEX = read_index(Path(__file__).resolve().parents[2] / "results" / "studies.json")
FADE = "primum@radius=0.4,radius_schedule=fade-linear"


def run(arm: str, seed: int, loss: float, **settings: Any) -> RunRecord:
    """A run that was evaluated at steps 250 and 3000."""
    made = record(arm, seed, 0.5, losses=(3.0, loss))
    radius = float(arm.partition("radius=")[2].partition(",")[0] or 0.1)
    return replace(
        made,
        settings={"task": "language", "lr": 0.1, "batch_size": 32, "length": 64} | settings,
        arm_settings={"radius": radius, "key": f"{arm}{seed}"},
        curves={
            "epoch": [0.1, 1.2],
            "step": [250, 3000],
            "test_loss": [3.0, loss],
            "seconds": [1.0, 12.0],
        },
        final={"test_loss": loss, "ms_per_step": 4.0},
    )


class Made:
    """Stands in for `Results`."""

    def __init__(self, **runs: list[RunRecord]) -> None:
        self.runs = {name: [] for name in INDEX if name.startswith("language")}
        self.runs |= {f"language-{name.replace('_', '-')}": some for name, some in runs.items()}
        self.studies = INDEX

    def groups(self, study: str) -> list[Group]:
        return group_runs(self.runs[study])

    def of(self, page: str) -> dict[str, list[RunRecord]]:
        return self.runs


def test_arms_with_their_radius_and_direction() -> None:
    runs = [run("base", seed, 2.0 + 0.001 * seed) for seed in range(3)]
    runs += [run("primum", seed, 1.9 + 0.001 * seed) for seed in range(3)]
    table = MAKERS["language-char"](Made(char=runs))  # type: ignore[arg-type]
    assert "| base | 3 | 2.001 ± 0.002 | – |" in table
    assert "| primum, radius 0.1 | 3 | 1.901 ± 0.002 | -0.100 ± 0.002 (<0.001) |" in table


def test_rates_take_the_lowest_loss() -> None:
    losses = {0.1: (2.2, 2.0), 0.2: (2.1, 1.9), 0.4: (2.3, 1.8)}
    runs = [
        run(arm, seed, loss + 0.001 * seed, lr=lr)
        for lr, pair in losses.items()
        for arm, loss in zip(("base", "primum"), pair, strict=True)
        for seed in range(2)
    ]
    made = Made(rates_char=runs)
    lines = MAKERS["language-rates-char"](made).splitlines()  # type: ignore[arg-type]
    assert lines[-3].startswith("| best | 2.101 ± 0.006 at 0.2 | 1.800 ± 0.006 at 0.4 (edge)")
    assert lines[-2].startswith("| best - best of base | – | -0.300 ± ")
    assert lines[-1].startswith("| time x | ")
    assert "language-rates-char" in language_plots(made)  # type: ignore[arg-type]


def test_radii_are_compared_over_common_seeds() -> None:
    runs = [run(arm, seed, 2.0) for arm in ("base", "primum") for seed in (0, 1, 2)]
    runs += [run(arm, seed, 1.9) for arm in ("primum@radius=0.4", FADE) for seed in (2, 3)]
    (group,) = group_runs(runs)
    assert {arm: [r.seed for r in some] for arm, some in common(group).arms.items()} == {
        "base": [2],
        "primum": [2],
        "primum@radius=0.4": [2],
        FADE: [2],
    }
    made = Made(radius=runs)
    table = MAKERS["language-radius"](made)  # type: ignore[arg-type]
    assert "| radius 0.4 to 0 | 1 | 1.900 | -0.100 (–) |" in table
    (axes,) = language_plots(made)["language-radius"].axes  # type: ignore[arg-type]
    assert axes.get_ylabel() == "held-out loss, nats per token"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.1", "0.4"]


def test_a_long_run_on_the_way() -> None:
    made = Made(long=[run("base", 0, 2.0), run("primum", 0, 1.9)])
    table = MAKERS["language-long"](made)  # type: ignore[arg-type]
    assert "| primum, radius 0.1 | 3.000 | – | – | – | 1.900 | 1.00 |" in table
    assert "language-long" in language_plots(made)  # type: ignore[arg-type]


def test_batches_one_line_each() -> None:
    runs = [
        run(arm, seed, 2.0 - 0.1 * (arm == "primum") + 0.001 * seed, batch_size=size)
        for size in (16, 32)
        for arm in ("base", "primum")
        for seed in range(2)
    ]
    table = MAKERS["language-batches"](Made(batches=runs))  # type: ignore[arg-type]
    assert "| 16 x 64 | 2 | 2.000 ± 0.006 | -0.100 ± 0.003 (<0.001) |" in table
    assert "base, nats" in table


def test_what_is_missing_is_listed() -> None:
    table = MAKERS["language-not-run"](Made(char=[run("base", 0, 2.0)]))  # type: ignore[arg-type]
    assert "| `language-char` |" in table
    assert "| 1 of 20 |" in table
    assert "| `language-long` | Characters, ten times the steps | 0 of 12 |" in table


def test_nothing_is_missing() -> None:
    made = Made()
    made.runs = {}
    assert MAKERS["language-not-run"](made) == "All planned runs were made."  # type: ignore[arg-type]


def test_every_study_has_a_table_and_every_plot_a_study() -> None:
    named = {name for name, study in INDEX.items() if study["page"] == "language"}
    assert named <= set(MAKERS)
    assert set(PLOTS) <= named
