"""Sentences follow from the rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.runs import RunRecord
from lab.tables import Group, group_runs
from lab.verdicts import details, headline, whole_network
from laboratory.conftest import MakeRuns, as_language


def only(runs: list[RunRecord]) -> Group:
    (group,) = group_runs(runs)
    return group


def test_a_gain_is_stated_with_its_interval(make_runs: MakeRuns) -> None:
    said = headline(only(make_runs({"base": 0.0, "primum": 2.0})))
    assert said == (
        "Primum compared with base: test accuracy higher by 2.0 points (95% interval +1.8 to "
        "+2.2); test loss lower by 0.200 (95% interval -0.202 to -0.198)."
    )


def test_nothing_seen_says_what_could_have_been(make_runs: MakeRuns) -> None:
    said = headline(only(make_runs({"base": 0.0, "primum": 0.01})))
    assert said.startswith("No difference between primum and base was seen in test accuracy or ")
    assert said.endswith("points in test accuracy or 0.004 in test loss.")


@pytest.mark.parametrize(
    ("gains", "end"),
    [
        ({"permuted": 0.0, "lr-matched": 0.5}, "that of the controls (permuted, lr-matched)."),
        ({"permuted": 2.0, "lr-matched": 0.0}, "than with permuted, so the cause is open."),
    ],
)
def test_controls(gains: dict[str, float], end: str, make_runs: MakeRuns) -> None:
    group = only(make_runs({"base": 0.0, "primum": 2.0} | gains))
    assert headline(group).endswith(end)
    assert details(group)[0].startswith(
        "Primum compared with the same weights given to random samples: test accuracy "
    )


@pytest.mark.parametrize(
    ("gains", "end"),
    [
        ({"permuted": 0.0}, "Its loss was also lower than that of the controls (permuted)."),
        ({"permuted": 2.0}, "Its loss was not seen to be lower than with permuted, so the cause "
         "is open."),
    ],
)  # fmt: skip
def test_a_lower_loss_of_a_language_model_is_a_gain(
    gains: dict[str, float], end: str, make_runs: MakeRuns
) -> None:
    group = only(as_language(make_runs({"base": 0.0, "primum": 2.0} | gains)))
    said = headline(group)
    assert said.startswith(
        "Primum compared with base: held-out loss lower by 0.200 nats per token (95% interval "
        "-0.202 to -0.198). "
    )
    assert said.endswith(end)
    assert details(group)[-1].endswith("tokens, and 25% with the weights of primum.")


def test_a_higher_loss_of_a_language_model_is_none(make_runs: MakeRuns) -> None:
    group = only(as_language(make_runs({"base": 0.0, "primum": -2.0, "permuted": 0.0})))
    assert "held-out loss higher by 0.200 nats per token" in headline(group)
    assert "controls" not in headline(group)
    same = only(as_language(make_runs({"base": 0.0, "primum": 0.0})))
    assert headline(same).endswith("a difference of 0.004 nats per token in held-out loss.")


def test_details_about_harm_and_unfinished_runs(make_runs: MakeRuns) -> None:
    runs = make_runs({"base": 0.0, "primum": 2.0})
    runs[-1] = replace(runs[-1], complete=False)
    said = details(only(runs))
    assert "would have raised the loss of 40% of a batch's samples." in said[0]
    assert said[1].endswith("samples, and 25% with the weights of primum.")
    assert said[-1] == "1 of 6 runs are unfinished and not counted."


@pytest.mark.parametrize(
    ("gains", "change", "words"),
    [
        ({"base": 0.0}, {}, "Only base was run"),
        ({"primum": 0.0, "permuted": 0.0}, {}, "no finished runs of both primum and base"),
        ({"base": 0.0, "primum": 1.0}, {"final": {}}, "no test metrics"),
    ],
)
def test_nothing_to_compare(gains: dict, change: dict, words: str, make_runs: MakeRuns) -> None:
    assert words in headline(only(make_runs(gains, **change)))


def test_one_seed(make_runs: MakeRuns) -> None:
    group = only(make_runs({"base": 0.0, "primum": 1.0, "permuted": 0.0}, seeds=1))
    assert headline(group).startswith("One seed gives no interval")
    assert not any("compared with" in sentence for sentence in details(group))


def test_whole_network(full: RunRecord) -> None:
    said = whole_network(only([full]))
    assert said.startswith("At step 20 the next step raises the loss of 45% of its own batch (40%")
    assert "The head's weights would remove 30% of the whole network's harm" in said
    assert headline(only([full])) == said
