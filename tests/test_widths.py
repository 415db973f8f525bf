"""What modules take and give, read off their layers."""

import pytest
from primum.widths import children_of, entry, keeps_width, may_end, plain, takes, width
from torch import nn

MLP = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3))
CNN = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
GATE = nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8), nn.Sigmoid())


@pytest.mark.parametrize(
    ("module", "taken", "given"),
    [
        (MLP, (nn.Linear, 8), 3),
        (CNN, (nn.Conv2d, 3), 8),
        (nn.Sequential(MLP, nn.LayerNorm(3)), (nn.Linear, 8), 3),
        (nn.ConvTranspose2d(4, 5, 3), (nn.ConvTranspose2d, 4), 5),
        (nn.ReLU(), None, None),
    ],
)
def test_entry_and_width(module: nn.Module, taken: object, given: int | None) -> None:
    assert entry(module) == taken
    assert width(module) == given


def test_takes() -> None:
    assert takes(nn.Linear(3, 2), MLP[-1])
    assert not takes(nn.Linear(6, 2), MLP[-1])
    assert takes(nn.Linear(8, 2), CNN[0])
    assert takes(nn.Linear(8 * 25, 2), CNN[0])  # flattened
    assert not takes(nn.Linear(12, 2), CNN[0])
    assert takes(nn.Conv2d(8, 2, 1), CNN[0])
    assert not takes(nn.Conv2d(16, 2, 1), CNN[0])
    assert takes(GATE, CNN[0])
    assert not takes(GATE, nn.Conv2d(3, 4, 3))  # a gate flattens nothing
    assert takes(nn.ModuleList([CNN]), nn.Conv2d(3, 4, 3))  # a network may take anything


def test_kinds_of_modules() -> None:
    assert plain(MLP)
    assert not plain(CNN)
    assert not plain(nn.TransformerEncoderLayer(8, 2))
    assert may_end(CNN)
    assert not may_end(nn.TransformerEncoderLayer(8, 2))
    assert keeps_width(GATE)
    assert keeps_width(nn.Linear(4, 4))
    assert not keeps_width(MLP)


def test_children() -> None:
    model = nn.Module()
    model.drop, model.words, model.out = nn.Dropout(), nn.Embedding(9, 4), nn.Linear(4, 9)
    model.tables = nn.ModuleList([nn.Embedding(9, 4), nn.Dropout()])
    assert list(children_of(model)) == ["out"]
