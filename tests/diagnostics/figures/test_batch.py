"""One batch, sorted."""

import pytest
import torch

from primum.diagnostics.figures import one_batch


def test_sorted_by_the_plain_step_and_paired():
    before, after = [0.3, -0.2, 0.1], [0.2, -0.1, -0.3]
    first, second = one_batch(before, after).axes[0].get_lines()[-2:]
    assert first.get_ydata().tolist() == [-0.2, 0.1, 0.3]
    assert second.get_ydata().tolist() == [-0.1, -0.3, 0.2]
    assert first.get_label() == "plain step: 67% harmed"
    assert second.get_label() == "with weights: 33% harmed"


def test_takes_tensors_and_names():
    drift = torch.tensor([1.0, -1.0])
    figure = one_batch(drift, drift / 2, labels=("a", "b"), change="really")
    assert figure.axes[0].get_ylabel() == "really"
    assert figure.axes[0].get_lines()[-1].get_label() == "b: 50% harmed"


def test_one_change_per_sample():
    with pytest.raises(ValueError, match="2 and 1"):
        one_batch([1, 2], [1])
