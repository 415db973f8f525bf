"""The words follow the intervals."""

from __future__ import annotations

from primum.experiments.summary import summarise
from primum.experiments.verdict import NOT_SEEN, details, headline

from .conftest import MakeResults


def test_no_difference(make_results: MakeResults) -> None:
    words = headline(summarise(make_results(), "cnn-sgd"))
    assert NOT_SEEN in words
    assert "higher" not in words


def test_better_and_worse(make_results: MakeResults) -> None:
    better = headline(summarise(make_results({"base": 0.0, "primum": 2.0}), "cnn-sgd"))
    assert "accuracy, higher by 2.0 points" in better
    assert "loss, lower by 0.200" in better
    worse = headline(summarise(make_results({"base": 0.0, "primum": -2.0}), "cnn-sgd"))
    assert "accuracy, lower by 2.0 points" in worse
    assert "loss, higher by 0.200" in worse


def test_a_gain_is_held_against_the_controls(make_results: MakeResults) -> None:
    gains = {"base": 0.0, "primum": 2.0, "permuted": 0.0, "lr-matched": 0.0}
    beaten = headline(summarise(make_results(gains), "cnn-sgd"))
    assert "higher than that of the controls (permuted, lr-matched)" in beaten
    matched = headline(summarise(make_results(gains | {"lr-matched": 2.0}), "cnn-sgd"))
    assert "not seen to be higher than with lr-matched" in matched


def test_one_seed_says_nothing(make_results: MakeResults) -> None:
    gains = {"base": 0.0, "primum": 2.0, "permuted": 0.0}
    summary = summarise(make_results(gains, seeds=1), "cnn-sgd")
    assert "nothing can be said" in headline(summary)
    assert not any("against" in sentence for sentence in details(summary))


def test_base_alone(make_results: MakeResults) -> None:
    summary = summarise(make_results({"base": 0.0}), "cnn-sgd")
    assert "nothing to compare" in headline(summary)
    assert details(summary) == []


def test_details_name_controls_harm_and_time(make_results: MakeResults) -> None:
    text = " ".join(details(summarise(make_results(), "cnn-sgd")))
    assert "random samples" in text
    assert "learning rate" in text
    assert "40% of a batch" in text
    assert "it was 25%" in text
    assert "1.00 times" in text
