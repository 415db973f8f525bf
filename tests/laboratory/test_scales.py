"""Smaller settings keep what the comparison is about."""

from __future__ import annotations

import pytest

from lab.claims import TABLES, Cell
from lab.images import load_data
from lab.scales import figure1_runs, scaled
from lab.trainer import Trainer

CELLS = [cell for table in TABLES.values() for cell in table.cells]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.label)
def test_small_keeps_what_the_table_compares(cell: Cell) -> None:
    full, small = cell.settings, scaled(cell.settings, "small")
    for name in ("optimizer", "schedule", "augment", "label_smoothing", "decay_norms", "decay"):
        assert getattr(small, name) == getattr(full, name), name
    assert small.data in ("cifar10", "cifar100")
    assert small.epochs <= 20
    assert (small.ema is None) == (full.ema is None)
    assert small.warmup / small.epochs == pytest.approx(full.warmup / full.epochs, abs=0.01)
    if full.norm is not None:
        assert small.norm == full.norm


def test_cells_stay_apart() -> None:
    for table in TABLES.values():
        for scale in ("small", "smoke"):
            points = [(scaled(cell.settings, scale), cell.radius) for cell in table.cells]  # type: ignore[arg-type]
            if scale == "small":
                assert len({(p.key, radius) for p, radius in points}) == len(table.cells)


def test_a_given_learning_rate_follows_the_batch() -> None:
    cell = next(cell for cell in CELLS if cell.label == "ConvNeXt-T, standard")
    small = scaled(cell.settings, "small")
    assert (small.batch_size, small.rate) == (512, pytest.approx(4e-3 / 8**0.5))
    assert scaled(cell.settings, "full") == cell.settings


def test_smoke_runs_on_generated_images() -> None:
    for cell in CELLS[:1] + CELLS[-25:-24]:
        point = scaled(cell.settings, "smoke")
        assert Trainer(point, load_data(point.data_settings())).steps == 2


def test_figures_at_every_scale() -> None:
    for scale in ("full", "small", "smoke"):
        for run in figure1_runs(scale).values():  # type: ignore[arg-type]
            assert run.look is not None
            assert run.steps is not None
            assert run.steps % run.look.every == 0
