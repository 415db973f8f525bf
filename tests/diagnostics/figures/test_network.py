"""Pictures of the whole network."""

import math

import pytest
import torch
from torch import nn

from primum import diagnostics
from primum.diagnostics.figures import error_by_depth, first_order_truth, reor_by_weighting


def depth(error, scale=None):
    layers = [f"layer{k}" for k in range(len(error))]
    return {"layers": layers, "error": error, "scale": scale or [1.0] * len(error)}


def test_error_and_scale_by_depth():
    figure = error_by_depth({"early": [depth([0.0, 0.2], [1, 3]), depth([0.0, 0.4], [1, 5])]})
    above, below = figure.axes
    assert above.get_lines()[0].get_ydata() == pytest.approx([0, 0.3])  # the median
    assert below.get_lines()[0].get_ydata() == pytest.approx([1, 4])
    assert [tick.get_text() for tick in below.get_xticklabels()] == ["layer0", "layer1"]


def test_many_layers_are_numbered():
    figure = error_by_depth({"deep": [depth([0.1] * 40)]})
    assert "index" in figure.axes[1].get_xlabel()


def test_large_scales_get_a_log_axis():
    assert error_by_depth({"": [depth([0, 0.9], [1, 300])]}).axes[1].get_yscale() == "log"
    assert error_by_depth({"": [depth([0, 0.9], [1, 3])]}).axes[1].get_yscale() == "linear"


def test_takes_what_the_diagnostics_give():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(8, 4), torch.randint(3, (8,))
    probe = diagnostics.Probe(model, optimizer, nn.CrossEntropyLoss(), images, labels)
    found = diagnostics.by_depth(diagnostics.measure(probe))
    line = error_by_depth({"run": [vars(found)]}).axes[0].get_lines()[0]
    assert line.get_ydata() == pytest.approx(found.error.tolist())


def dots(figure, marker):
    axes = figure.axes[0]
    return [
        value
        for line in axes.get_lines()
        if line.get_marker() == marker
        for value in line.get_ydata()
    ]


def test_every_reor_is_a_dot_by_weighting_and_group():
    figure = reor_by_weighting({"base": {"head": [0.2, 0.4], "uniform": [0.0]}})
    assert sorted(dots(figure, "o")) == pytest.approx([0.0, 0.2, 0.4])
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["head", "uniform"]
    two = reor_by_weighting({"early": {"head": [0.2]}, "late": {"head": [0.3]}})
    assert [text.get_text() for text in two.axes[0].get_legend().get_texts()] == ["early", "late"]


def test_far_below_zero_is_marked_at_the_edge_and_nothing_is_left_out():
    figure = reor_by_weighting({"base": {"head": [-5.0, 0.5, None, math.nan]}})
    assert dots(figure, 7) == [-1.0]
    assert dots(figure, "o") == [0.5]


def test_truth_by_learning_rate():
    tables = [
        {"factor": [0.25, 1, 4], "sign_right": [1, 0.9, 0.5]},
        {"factor": [0.25, 1, 4], "sign_right": [1, 0.7, 0.5]},
    ]
    axes = first_order_truth({"late": tables}).axes[0]
    assert axes.get_lines()[0].get_ydata() == pytest.approx([100, 80, 50])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1/4", "1", "4"]
