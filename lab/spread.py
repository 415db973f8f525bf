"""Test whether runs of an arm vary less between seeds than those of base (Brown-Forsythe).

    python -m lab.spread results     # a folder of runs, or tables of them

A single setting has too few seeds to estimate a spread well. So there is a test for each setting,
with Holm's correction over all settings of the arm, and one test over settings: the signed-rank
test of the log ratios of the two spreads.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from lab.cli import guarded
from lab.formatting import p_value
from lab.runs import read_runs
from lab.statistics import LEVEL, holm
from lab.tables import Group, group_runs
from lab.text_tables import markdown_table

ARMS = ("primum", "primum@radius=0.4", "paper")
METRICS = {"accuracy": "test accuracy", "loss": "test loss"}
LEAST = 3  # seeds


@dataclass(frozen=True)
class Spread:
    """Spreads of an arm and of base in one setting.

    Attributes:
        ratio: Standard deviation of the arm over that of base.
        p: Two-sided p-value of the Brown-Forsythe test (deviations from the median).
    """

    ratio: float
    p: float


def spread_of(own: Sequence[float], base: Sequence[float]) -> Spread | None:
    """Compare two groups of runs; None if one has fewer than three runs or no spread."""
    if min(len(own), len(base)) < LEAST or min(np.ptp(own), np.ptp(base)) == 0:
        return None
    test = stats.levene(own, base, center="median")
    return Spread(float(np.std(own, ddof=1) / np.std(base, ddof=1)), float(test.pvalue))


def spreads(groups: Sequence[Group], arm: str, metric: str) -> list[Spread]:
    """An arm against base in every setting that has both."""
    pairs = [group.pair(arm, "base", metric) for group in groups]
    found = [spread_of(*pair) for pair in pairs if pair is not None]
    return [each for each in found if each is not None]


def over_settings(found: Sequence[Spread]) -> float:
    """P-value of the signed-rank test that the log ratios of the spreads are symmetric about 0."""
    if not found:
        return math.nan
    return float(stats.wilcoxon([math.log(each.ratio) for each in found]).pvalue)


def spread_table(groups: Sequence[Group], names: dict[str, str] | None = None) -> str:
    """A Markdown table with one row per arm and metric."""
    rows = []
    for arm in ARMS:
        for metric, words in METRICS.items():
            found = spreads(groups, arm, metric)
            if not found:
                continue
            ratio = math.exp(float(np.mean([math.log(each.ratio) for each in found])))
            adjusted = holm([each.p for each in found])
            seen = [e for e, p in zip(found, adjusted, strict=True) if p < 1 - LEVEL]
            plain = sum(each.p < 1 - LEVEL for each in found)
            smaller = sum(each.ratio < 1 for each in found)
            rows.append([
                (names or {}).get(arm, arm), words, str(len(found)), f"{ratio:.2f}",
                f"{smaller} of {len(found)}", str(plain),
                f"{sum(e.ratio < 1 for e in seen)} and {sum(e.ratio > 1 for e in seen)}",
                p_value(over_settings(found)),
            ])  # fmt: skip
    head = ["", "of", "settings", "spread / base's", "smaller in", "p < 0.05, not corrected",
            "seen: smaller and larger", "over settings, p"]  # fmt: skip
    return markdown_table(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of some runs; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare the spread over seeds with base's.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run files, tables or "
                        "folders of them")  # fmt: skip
    arguments = parser.parse_args(argv)

    def work() -> int:
        print(spread_table(group_runs(read_runs(arguments.runs))))
        return 0

    return guarded("spread", work)


if __name__ == "__main__":
    sys.exit(main())
