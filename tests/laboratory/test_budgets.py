"""Gain against budget, from runs made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.budgets import Budgets, crossing, reached
from lab.runs import RunRecord
from laboratory.conftest import record


def run(arm: str, seed: int, epochs: int, accuracy: float) -> RunRecord:
    made = record(arm, seed, 0.5, views_test_accuracy=accuracy, ms=20.0 if arm == "slow" else 10.0)
    return replace(made, settings={"epochs": epochs})


@pytest.fixture
def budgets() -> Budgets:
    runs = []
    for seed in range(3):
        noise = 0.001 * seed
        for epochs, base in ((2, 0.60), (4, 0.70), (8, 0.80)):
            runs.append(run("base", seed, epochs, base + noise))
            runs.append(run("ahead", seed, epochs, base + 0.05 + noise))
            if seed < 2:  # stopped before the last seed
                runs.append(run("slow", seed, epochs, base - 0.02 + noise))
    return Budgets(runs[::-1])


def test_differences_over_common_seeds(budgets: Budgets) -> None:
    assert list(budgets.groups) == [2, 4, 8]
    assert budgets.arms[0] == "base"
    tests = budgets.tests()
    assert len(tests) == 6
    assert tests["ahead", 4].interval.mean == pytest.approx(5.0)
    assert tests["ahead", 4].interval.count == 3
    assert tests["slow", 8].interval.mean == pytest.approx(-2.0)
    assert tests["slow", 8].interval.count == 2


def test_how_much_shorter_a_schedule_may_be(budgets: Budgets) -> None:
    assert budgets.equal_at("base") == pytest.approx(8.0)
    assert budgets.equal_at("ahead") == pytest.approx(4 * 2**0.5)  # half-way between 75 and 85
    assert budgets.equal_at("slow") is None  # never
    assert crossing({2: 50.0, 4: 60.0}, 40.0) == 2.0
    assert crossing({}, 40.0) is None


def test_over_all_budgets(budgets: Budgets) -> None:
    ahead = budgets.overall("ahead")
    assert ahead is not None
    assert (ahead.mean, ahead.count) == (pytest.approx(5.0), 9)
    assert ahead.half_width < budgets.tests()["ahead", 4].interval.half_width
    assert budgets.overall("base") is None
    partly = Budgets([*(run("base", 0, n, 0.5) for n in (2, 4)), run("ahead", 0, 2, 0.6)])
    assert partly.overall("ahead") is None


def test_table_and_plot(budgets: Budgets) -> None:
    head, _, *rows = budgets.table({"ahead": "an arm"}).splitlines()
    assert head == "|  | 2 epochs | 4 epochs | 8 epochs | all | equal at | time x |"
    cells = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[1:] for row in rows}
    assert set(cells) == {"base", "an arm", "slow"}
    assert cells["base"][0] == "60.10 ± 0.25 [3]"
    assert cells["an arm"][1].startswith("+5.00 ± 0.23 (<0.001) [3]")
    assert cells["slow"][-1] == "2.00 |"
    assert cells["base"][3] == "–"
    assert cells["an arm"][3].startswith("+5.00 ± 0.10")  # three budgets: narrower than each alone
    figure = budgets.plot({"ahead": "an arm"})
    assert [axes.get_title() for axes in figure.axes] == ["an arm"]  # the other has two seeds
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["2", "4", "8"]
    assert figure.get_supxlabel().endswith("base has 60.1, 70.1, 80.1%")


def test_the_plot_has_a_panel_for_every_arm_with_most_budgets() -> None:
    runs = [run("base", 0, epochs, 0.5) for epochs in (2, 4, 8)]
    runs += [run(f"arm {n}", 0, epochs, 0.6) for n in range(4) for epochs in (2, 4, 8)[: n + 1]]
    shown = [axes.get_title() for axes in Budgets(runs).plot().axes if axes.axison]
    assert shown == ["arm 1", "arm 2", "arm 3"]
    assert not Budgets(runs[:3]).plot().axes[0].has_data()


def test_settings_without_base_are_left_out() -> None:
    assert Budgets([run("ahead", 0, 2, 0.5)]).groups == {}


def test_a_run_is_at_a_target_once_it_stays_there() -> None:
    curves = {
        "epoch": [1, 2, 3, 4, 5, 6],
        "test_accuracy": [0.5, 0.7, None, 0.6, 0.65, 0.7],
        "step": [10, 20, 30, 40, 50, 60],
        "seconds": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    }
    made = replace(run("base", 0, 2, 0.5), curves=curves)
    assert reached(made, 0.6) == (40, 4.0)
    assert reached(made, 0.65) == (50, 5.0)
    assert reached(made, 0.71) is None


def test_steps_and_seconds_to_what_every_run_of_base_reaches() -> None:
    def with_curve(arm: str, seed: int, *accuracies: float) -> RunRecord:
        count = len(accuracies)
        curves: dict[str, list[float | None]] = {
            "epoch": list(range(1, count + 1)),
            "test_accuracy": list(accuracies),
            "step": [100.0 * (place + 1) for place in range(count)],
            "seconds": [10.0 * (place + 1) for place in range(count)],
        }
        made = run(arm, seed, 4, accuracies[-1])
        return replace(made, curves=curves, final=made.final | {"test_accuracy": accuracies[-1]})

    runs = [
        with_curve("base", 0, 0.5, 0.6, 0.8),
        with_curve("base", 1, 0.5, 0.75, 0.78),
        with_curve("ahead", 0, 0.6, 0.79, 0.8),
        with_curve("ahead", 1, 0.5, 0.6, 0.7),
        run("base", 0, 2, 0.9),  # another budget
    ]
    head, _, base, ahead = Budgets(runs).to_target({"ahead": "an arm"}).splitlines()
    assert head == "|  | runs that reach 78.00% | steps | seconds |"
    assert base == "| base | 2 of 2 | 300 ± 0 | 30 ± 0 |"
    assert ahead == "| an arm | 1 of 2 | 200 | 20 |"
