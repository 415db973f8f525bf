"""Pictures: every arm is drawn, and nothing but the shape depends on the data."""

from __future__ import annotations

from primum.experiments import figures
from primum.experiments.arms import ARMS

from .conftest import MakeResults


def test_every_arm_has_a_colour_and_dashes() -> None:
    assert set(figures.COLOURS) == set(figures.DASHES) == set(ARMS)
    assert len(set(figures.COLOURS.values())) == len(ARMS)


def test_curves_draw_every_arm(make_results: MakeResults) -> None:
    svg = figures.curves(make_results().arms("cnn-sgd"), "test_loss")
    for arm in ARMS:
        assert figures.COLOURS[arm].lower() in svg.lower()
        assert f">{arm}<" in svg


def test_same_data_same_picture(make_results: MakeResults) -> None:
    arms = make_results().arms("cnn-sgd")
    assert figures.harmed_share(arms) == figures.harmed_share(arms)


def test_one_batch_is_labelled_for_readers_who_cannot_see_it(make_results: MakeResults) -> None:
    run = make_results().arms("cnn-sgd")["primum"][0]
    svg = figures.one_batch(run)
    assert svg.startswith('<svg role="img" aria-label="Group-norm CNN')
    assert "width=" not in svg.split(">", 1)[0]
