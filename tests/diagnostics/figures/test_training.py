"""Pictures over training: what is on the axes is what was in the tables."""

import numpy as np
import pytest

from primum.diagnostics.figures import harmed_share, solver_gap, weight_bands


def table(count=10, share=0.5, applied=True, **columns):
    filled = {
        "step": list(range(count)),
        "applied": [applied] * count,
        "harmed_before": [share] * count,
        "harmed_after": [share / 2] * count,
        "gap": [0.01] * count,
        "extra_weight_p50": [0.0] * count,
        "extra_weight_p90": [0.4] * count,
        "extra_weight_max": [1.5] * count,
        "mean_extra_weight": [0.1] * count,
    }
    return filled | columns


def lines(figure):
    return {line.get_label(): line for line in figure.axes[0].get_lines()}


def test_harmed_share_in_percent_before_and_after():
    drawn = lines(harmed_share({"mine": [table()]}))
    assert set(drawn) == {"mine: plain", "mine: weighted"}
    assert drawn["mine: plain"].get_ydata() == pytest.approx([50] * 10)
    assert drawn["mine: weighted"].get_ydata() == pytest.approx([25] * 10)
    assert drawn["mine: plain"].get_linestyle() != drawn["mine: weighted"].get_linestyle()


def test_watched_runs_have_no_weighted_step():
    assert set(lines(harmed_share({"": [table(applied=False)]}))) == {"plain"}


def test_seeds_are_averaged_and_their_range_is_a_band():
    figure = harmed_share({"mine": [table(share=0.2), table(share=0.4)]})
    assert lines(figure)["mine: plain"].get_ydata() == pytest.approx([30] * 10)
    heights = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((20, 40))


def test_long_runs_are_averaged_over_stretches():
    shares = np.linspace(0, 1, 600).tolist()
    line = lines(harmed_share({"": [table(600, harmed_before=shares)]}))["plain"]
    assert len(line.get_xdata()) == 60
    assert line.get_xdata()[0] == pytest.approx(4.5)  # the middle of steps 0 to 9
    assert line.get_ydata()[0] == pytest.approx(100 * np.mean(shares[:10]))


def test_figures_that_are_missing_are_left_out():
    shares = [None, float("nan"), *[0.3] * 8]
    line = lines(harmed_share({"": [table(harmed_before=shares)]}))["plain"]
    assert line.get_xdata().tolist() == list(range(2, 10))


def test_gap_on_a_log_scale_median_and_largest():
    figure = solver_gap({"run": [table(120, gap=[0.01, 0.04] * 60)]})
    assert figure.axes[0].get_yscale() == "log"
    drawn = lines(figure)
    assert drawn["run: largest"].get_ydata() == pytest.approx([4] * 60)
    assert drawn["run: median"].get_ydata() == pytest.approx([2.5] * 60)


def test_gaps_of_zero_do_not_break_the_log_scale():
    values = lines(solver_gap({"": [table(gap=[0.0] * 10)]}))["median"].get_ydata()
    assert np.all(np.asarray(values) > 0)


def test_weights_as_bands():
    figure = weight_bands([table(), table(mean_extra_weight=[0.3] * 10)])
    assert lines(figure)["mean"].get_ydata() == pytest.approx([0.2] * 10)
    tops = [band.get_paths()[0].vertices[:, 1].max() for band in figure.axes[0].collections]
    assert tops == pytest.approx([0.4, 1.5])
