"""Which pictures a group gives: those it has the data for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from primum.experiments.report.groups import Group, group_runs
from primum.experiments.report.parts import Picture
from primum.experiments.report.pictures import (
    batch_picture,
    network_pictures,
    protected_picture,
    training_pictures,
)
from primum.experiments.runs import RunRecord

from .conftest import MakeRuns

Draw = Callable[[Group], Iterator[Picture]]


def only(runs: list) -> Group:
    (group,) = group_runs(runs)
    return group


@pytest.mark.parametrize(
    ("draw", "count"),
    [(training_pictures, 6), (batch_picture, 1), (network_pictures, 5), (protected_picture, 1)],
)
def test_everything_is_drawn_or_nothing(draw: Draw, count: int, full: RunRecord) -> None:
    assert len(list(draw(only([full])))) == count
    assert list(draw(only([RunRecord("n", "base", 0)]))) == []


def test_arms_without_a_column_are_left_out_of_its_picture(make_runs: MakeRuns) -> None:
    runs = make_runs({"base": 0.0, "primum": 1.0}, seeds=2)
    runs = [replace(r, steps={}) if r.arm == "base" else r for r in runs]
    share = list(training_pictures(only(runs)))[-1]
    assert "primum: weighted" in share.svg
    assert "base" not in share.svg


def test_captions_say_what_was_done(make_runs: MakeRuns, full: RunRecord) -> None:
    several = next(training_pictures(only(make_runs({"base": 0.0}))))
    assert several.caption == "Training loss. Bands are 95% intervals over seeds."
    captions = [p.caption for p in training_pictures(only([full]))]
    assert captions[0] == "Training loss."
    assert "not applied in this run" in captions[4]


def test_curves_go_over_steps_and_over_time_where_these_are_known(make_runs: MakeRuns) -> None:
    runs = make_runs({"base": 0.0, "primum": 1.0}, seeds=2)
    known = {"step": [10, 20], "seconds": [1.0, 2.0]}
    timed = [replace(each, curves=each.curves | known) for each in runs]
    for group, axes in ((runs, ["epoch"] * 3), (timed, ["step", "step", "time", "step", "time"])):
        captions = [picture.caption for picture in training_pictures(only(group))]
        svgs = [picture.svg for picture in training_pictures(only(group))]
        for caption, svg, axis in zip(captions, svgs, axes, strict=False):
            assert ("over time" in caption) == (axis == "time")
            assert ("seconds of training" if axis == "time" else f">{axis}<") in svg
    cut = [replace(r, curves=r.curves | {"seconds": [None, None]}) for r in timed if r.seed == 0]
    captions = [picture.caption for picture in training_pictures(only(cut))]
    assert not any("over time" in caption for caption in captions)


def test_the_protected_samples_have_labels_and_counts(full: RunRecord) -> None:
    (picture,) = protected_picture(only([full]))
    assert "cat &lt;1&gt;" in picture.svg
    assert "3 of 5, +1.2" in picture.svg
    assert "data:image/png;base64" in picture.svg


def test_first_middle_and_last_look(full: RunRecord) -> None:
    depth, reor, *_ = network_pictures(only([full]))
    assert all(f"step {step}<" in depth.svg for step in (0, 10, 20))
    assert "step 10<" not in reor.svg
