"""Which plots a group gives: those it has the data for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.plots import curves, group_plots
from lab.runs import RunRecord
from lab.tables import Group, group_runs
from laboratory.conftest import MakeRuns, record


def only(runs: list[RunRecord]) -> Group:
    (group,) = group_runs(runs)
    return group


def plots(*runs: RunRecord) -> dict[str, str]:
    """SVG by caption."""
    return {plot.caption: plot.svg for plot in group_plots(only(list(runs)))}


def test_everything_is_drawn_or_nothing(full: RunRecord) -> None:
    assert len(plots(full)) == 13
    assert plots(RunRecord("n", "base", 0)) == {}


def test_arms_without_a_column_are_left_out_of_its_plot(make_runs: MakeRuns) -> None:
    runs = make_runs({"base": 0.0, "primum": 1.0}, seeds=2)
    drawn = plots(*(replace(r, steps={}) if r.arm == "base" else r for r in runs))
    (share,) = (svg for caption, svg in drawn.items() if caption.startswith("Share of a batch"))
    assert "primum: weighted" in share
    assert "base" not in share


def test_captions_say_what_was_done(make_runs: MakeRuns, full: RunRecord) -> None:
    assert "Train loss. Bands are 95% intervals over seeds." in plots(*make_runs({"base": 0.0}))
    captions = list(plots(full))
    assert captions[0] == "Train loss."
    assert any("not applied in this run" in caption for caption in captions)


def test_curves_over_steps_and_time_where_these_are_known(make_runs: MakeRuns) -> None:
    runs = make_runs({"base": 0.0, "primum": 1.0}, seeds=2)
    known = {"step": [10, 20], "seconds": [1.0, 2.0]}
    timed = [replace(each, curves=each.curves | known) for each in runs]
    assert sum("training time" in caption for caption in plots(*runs)) == 0
    drawn = plots(*timed)
    assert sum("training time" in caption for caption in drawn) == 2
    for caption, svg in drawn.items():
        if caption.startswith(("Train", "Test")):
            over_time = "training time" in caption
            assert ("seconds of training" if over_time else ">step<") in svg
    cut = [replace(r, curves=r.curves | {"seconds": [None, None]}) for r in timed if r.seed == 0]
    assert not any("training time" in caption for caption in plots(*cut))


def test_curves_are_means_in_percent() -> None:
    runs = [record("base", seed, value) for seed, value in enumerate((0.4, 0.6))]
    (axes,) = curves({"base": runs}, "test_accuracy").axes
    assert axes.lines[0].get_ydata() == pytest.approx([10, 50])
    cut = replace(runs[0], curves={k: v[:1] for k, v in runs[0].curves.items()})
    (axes,) = curves({"base": [cut, runs[1]]}, "test_loss").axes
    assert list(axes.lines[0].get_xdata()) == [1.0]  # an unfinished run ends the line


def test_the_protected_samples_have_labels_and_counts(full: RunRecord) -> None:
    (svg,) = (svg for caption, svg in plots(full).items() if "most extra weight" in caption)
    assert "cat &lt;1&gt;" in svg
    assert "3 of 5, +1.2" in svg
    assert "data:image/png;base64" in svg


def test_first_middle_and_last_measurement(full: RunRecord) -> None:
    drawn = plots(full)
    (depth,) = (svg for caption, svg in drawn.items() if caption.startswith("How well"))
    (reor,) = (svg for caption, svg in drawn.items() if "removed by each weighting" in caption)
    assert all(f"step {step}<" in depth for step in (0, 10, 20))
    assert "step 10<" not in reor
