"""Spreads over seeds, against the definition of the test and against simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from lab.runs import RunRecord, write_table
from lab.spread import main, over_settings, spread_of, spread_table, spreads
from lab.tables import group_runs
from laboratory.conftest import record

OWN, BASE = [90.1, 91.4, 89.7, 92.0, 90.8], [89.0, 94.9, 85.9, 90.7, 80.0]


def test_it_is_an_analysis_of_variance_of_deviations_from_the_median() -> None:
    deviations = [np.abs(np.array(each) - np.median(each)) for each in (OWN, BASE)]
    found = spread_of(OWN, BASE)
    assert found is not None
    assert found.p == pytest.approx(stats.f_oneway(*deviations).pvalue)
    assert found.ratio == pytest.approx(np.std(OWN) / np.std(BASE))


@pytest.mark.parametrize("values", [[1.0, 2.0], [3.0, 3.0, 3.0]])
def test_too_few_seeds_or_no_spread(values: list[float]) -> None:
    assert spread_of(values, BASE) is None
    assert spread_of(BASE, values) is None


def made(scale: float, settings: int = 12, seeds: int = 5) -> list[RunRecord]:
    """Settings of very different spreads, in which primum's is `scale` times base's."""
    random = np.random.default_rng(0)
    runs = []
    for setting in range(settings):
        for seed in range(seeds):
            for arm, factor in (("base", 1.0), ("primum", scale)):
                accuracy = 0.5 + 0.001 * (1 + setting) * factor * random.standard_normal()
                run = record(arm, seed, accuracy, losses=(1.0, float(random.standard_normal())))
                runs.append(replace(run, settings={"setting": setting}))
    return runs


def test_a_smaller_spread_is_found_over_settings_and_only_where_there_is_one() -> None:
    half = spreads(group_runs(made(0.4)), "primum", "accuracy")
    assert len(half) == 12
    assert over_settings(half) < 0.01
    same = spreads(group_runs(made(1.0)), "primum", "accuracy")
    assert over_settings(same) > 0.05
    assert spreads(group_runs(made(1.0)), "paper", "accuracy") == []
    assert np.isnan(over_settings([]))


def test_the_table_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = made(0.4)
    table = spread_table(group_runs(runs), {"primum": "ours"})
    rows = [row.split(" | ") for row in table.splitlines()[2:]]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("| ours", "test accuracy", "12"),
        ("| ours", "test loss", "12"),
    ]
    assert 0.2 < float(rows[0][3]) < 0.7
    write_table(tmp_path / "some.jsonl.gz", runs)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == table.replace("ours", "primum")
    assert main([str(tmp_path / "nothing")]) == 2
