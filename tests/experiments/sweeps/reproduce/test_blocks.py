"""Figure 11: explicit gradients take more and more, and give the same step."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from primum.experiments.images import load_data
from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.reproduce.blocks import (
    Measured,
    build_network,
    judge_blocks,
    make_step,
    peak_memory,
    run_blocks,
    size_of,
)
from primum.experiments.sweeps.store import Store


@pytest.mark.parametrize("tail", [1, 3])
def test_a_step_with_zero_weights_is_the_plain_step(tail: int) -> None:
    model = build_network(4, blocks=1).double()
    other = copy.deepcopy(model)
    images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    make_step(model, 0)(images, labels)
    make_step(other, tail)(images, labels)
    for own, explicit in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, explicit, rtol=1e-9, atol=1e-12)


def test_memory_holds_at_least_the_explicit_gradients() -> None:
    model = build_network(4, blocks=1)
    images, labels = torch.zeros(16, 3, 8, 8), torch.zeros(16, dtype=torch.long)
    tail = list(model)[-2:]
    size = 4 * 16 * sum(p.numel() for block in tail for p in block.parameters())
    assert peak_memory(model, 2, images, labels) >= size
    assert peak_memory(model, 0, images, labels) > 0


def test_judged_by_the_ends() -> None:
    found = [Measured(0, 0.5, 10, 100), Measured(1, 0.5, 10, 100), Measured(4, 0.51, 30, 120)]
    statuses = [finding.status for finding in judge_blocks(found, "small")]
    assert statuses == ["reproduced", "not reproduced", "reproduced"]


def test_smoke(tmp_path: Path) -> None:
    found = run_blocks("smoke", Place(Store(tmp_path)))
    assert {finding.status for finding in found} == {"not judged"}


def test_small_fits_the_network(tmp_path: Path) -> None:
    size = size_of("small", Place(Store(tmp_path)))
    assert max(size.tails) <= len(build_network(10, blocks=size.blocks))
    data = load_data(size_of("smoke", Place(Store(tmp_path))).data)
    assert len(data.train) == 16
