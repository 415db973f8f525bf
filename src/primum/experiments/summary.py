"""From runs to a table: mean and 95% interval over seeds per arm, and primum against the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from primum.experiments.recipes import Recipe
from primum.experiments.results import Results
from primum.experiments.statistics import Difference, Interval, difference, interval
from primum.experiments.train import Run

COLUMNS = (
    "test accuracy, %",
    "test loss",
    "harmed by plain step, %",
    "harmed by step taken, %",
    "mean extra weight",
    "time per step, x base",
    "time per step, ms",
)


@dataclass(frozen=True)
class Row:
    """One arm of one recipe; percentages from 0 to 100. `None` where nothing was measured."""

    arm: str
    accuracy: Interval
    loss: Interval
    harmed_before: Interval
    harmed_after: Interval | None
    extra_weight: Interval | None
    time_ratio: Interval
    milliseconds: Interval

    def cells(self) -> list[str]:
        """Text of the table's cells, in the order of `COLUMNS`."""
        return [
            show(self.accuracy, 1),
            show(self.loss, 3),
            show(self.harmed_before, 1),
            show(self.harmed_after, 1),
            show(self.extra_weight, 3),
            show(self.time_ratio, 2),
            show(self.milliseconds, 1),
        ]


@dataclass(frozen=True)
class Comparison:
    """Primum minus another arm; accuracy in points."""

    other: str
    accuracy: Difference
    loss: Difference


@dataclass(frozen=True)
class Summary:
    """One recipe: a row per arm, and primum against each of the others."""

    recipe: Recipe
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]

    def row(self, arm: str) -> Row | None:
        """The arm's row, if it was run."""
        return next((row for row in self.rows if row.arm == arm), None)


def summarise(results: Results, recipe: str) -> Summary:
    """The recipe's table."""
    arms = results.arms(recipe)
    base = arms["base"]
    comparisons = [
        Comparison(
            other,
            accuracy=difference(_accuracy(arms["primum"]), _accuracy(runs)),
            loss=difference(_loss(arms["primum"]), _loss(runs)),
        )
        for other, runs in arms.items()
        if other != "primum" and "primum" in arms
    ]
    return Summary(
        recipe=base[0].settings.recipe,
        seeds=tuple(run.settings.seed for run in base),
        rows=tuple(_row(arm, runs, results) for arm, runs in arms.items()),
        comparisons=tuple(comparisons),
    )


def text_table(summary: Summary) -> str:
    """The table for a terminal."""
    head = ["", "test acc %", "test loss", "harmed %", "after %", "extra w", "time x", "ms/step"]
    lines = [head, *([row.arm, *row.cells()] for row in summary.rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def show(value: Interval | None, digits: int) -> str:
    """`mean ± half-width`; the mean alone for one value; a dash for none."""
    if value is None:
        return "–"
    if value.count < 2:
        return f"{value.mean:.{digits}f}"
    return f"{value.mean:.{digits}f} ± {value.half_width:.{digits}f}"


def _row(arm: str, runs: list[Run], results: Results) -> Row:
    times = {
        (time.arm, time.seed): time.milliseconds
        for time in results.times
        if time.recipe == runs[0].settings.recipe.name
    }
    seeds = [run.settings.seed for run in runs]
    before = _over_seeds(runs, lambda run: 100 * fmean(run.harmed_before))
    after = {  # base and lr-matched take the plain step
        "primum": _over_seeds(runs, lambda run: 100 * fmean(run.harmed_after)),
        "permuted": None,
    }
    return Row(
        arm=arm,
        accuracy=interval(_accuracy(runs)),
        loss=interval(_loss(runs)),
        harmed_before=before,
        harmed_after=after.get(arm, before),
        extra_weight=_over_seeds(runs, lambda run: fmean(run.extra_weight))
        if arm in after
        else None,
        time_ratio=interval([times[arm, seed] / times["base", seed] for seed in seeds]),
        milliseconds=interval([times[arm, seed] for seed in seeds]),
    )


def _accuracy(runs: list[Run]) -> list[float]:
    return [100 * run.test_accuracy[-1] for run in runs]


def _loss(runs: list[Run]) -> list[float]:
    return [run.test_loss[-1] for run in runs]


def _over_seeds(runs: list[Run], figure: Callable[[Run], float]) -> Interval:
    return interval([figure(run) for run in runs])
