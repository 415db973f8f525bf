"""The paper's tables: its own sentences about them hold for what is written down here."""

from __future__ import annotations

import pytest

from lab.claims import TABLES, Cell
from lab.models import MODELS


def cells(name: str, start: str) -> list[Cell]:
    return [cell for cell in TABLES[name].cells if cell.label.startswith(start)]


@pytest.mark.parametrize(
    ("start", "gains"),
    [
        ("ResNet-44, CIFAR-10,", (0.22, 0.26, 0.15, -0.22)),
        ("ResNet-44, CIFAR-100,", (0.28, 0.57, 0.86, 0.88)),  # the text says 0.25
        ("ViT, CIFAR-10,", (0.40, 0.34, 0.58, 0.70)),  # the text says 0.49
        ("ViT, CIFAR-100,", (0.58, 0.79, 1.38, 2.24)),
    ],
)
def test_gains_of_table_1_are_those_of_the_text(start: str, gains: tuple[float, ...]) -> None:
    found = cells("table1", start)
    assert [cell.settings.batch_size for cell in found] == [128, 256, 512, 1024]
    assert [cell.ours - cell.base for cell in found] == pytest.approx(gains)


def test_gains_of_table_2b_are_those_of_the_text() -> None:
    gains = [cell.ours - cell.base for cell in TABLES["table2b"].cells]
    assert gains == pytest.approx([0.16, 1.16, 0.30, 0.36])


def test_radius_is_smaller_in_one_cell_of_table_1() -> None:
    small = [cell.label for cell in TABLES["table1"].cells if cell.radius != 0.2]
    assert small == ["ResNet-44, CIFAR-10, B=1024"]


def test_table_5_agrees_with_table_1_where_they_meet() -> None:
    first = {
        (cell.settings.data, cell.settings.batch_size): cell for cell in cells("table1", "ResNet")
    }
    for cell in TABLES["ablation-radius"].cells:
        other = first[cell.settings.data, cell.settings.batch_size]
        assert cell.base == other.base
        assert cell.settings == other.settings  # so runs are shared
        if cell.radius == 0.2:
            assert cell.ours == other.ours
    assert len(TABLES["ablation-radius"].cells) == 20


def test_learning_rates_grow_with_the_root_of_the_batch() -> None:
    rates = [cell.settings.rate for cell in cells("table1", "ViT, CIFAR-10,")]
    assert rates == pytest.approx([1e-3 * 2 ** (n / 2) for n in range(4)])
    assert TABLES["table2a"].cells[0].settings.rate == pytest.approx(0.1)


@pytest.mark.parametrize("name", list(TABLES))
def test_models_exist_and_labels_differ(name: str) -> None:
    table = TABLES[name]
    assert all(cell.settings.model in MODELS for cell in table.cells)
    assert len({cell.label for cell in table.cells}) == len(table.cells)


def test_the_average_is_reported_where_the_paper_does() -> None:
    reported = {cell.label: cell.metric for cell in TABLES["table2a"].cells}
    assert reported["ConvNeXt-T, with Mixup"] == "ema_accuracy"
    assert all(cell.metric == "accuracy" for cell in TABLES["table2b"].cells)
