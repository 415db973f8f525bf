"""Figure 11: explicit gradients take more and more, and give the same step."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from primum.experiments.images import load_data
from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.reproduce.blocks import (
    Measured,
    TailStep,
    TailTraining,
    build_network,
    judge_blocks,
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
    TailStep(model, 0)(images, labels)
    TailStep(other, tail)(images, labels)
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


@pytest.mark.parametrize("steps", [1, 3, 4])
def test_cut_and_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """In the middle of an epoch, and between two lengths of the tail: the same but for times."""
    whole, cut = Place(Store(tmp_path / "whole")), Place(Store(tmp_path / "cut"), None, None, 0)
    run_blocks("smoke", whole)
    taken: list[int] = []
    plain = TailTraining.advance

    def interrupted(self: TailTraining) -> None:
        if len(taken) == steps:
            raise KeyboardInterrupt
        taken.append(self.tail)
        plain(self)

    monkeypatch.setattr(TailTraining, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_blocks("smoke", cut)
    monkeypatch.undo()
    assert len(list((tmp_path / "cut" / "checkpoints").iterdir())) == steps % 2
    monkeypatch.setattr(
        TailTraining, "advance", lambda self: taken.append(self.tail) or plain(self)
    )
    run_blocks("smoke", cut)
    assert taken == [0, 0, 1, 1, 3, 3]  # none twice
    assert not list((tmp_path / "cut" / "checkpoints").iterdir())
    assert results(cut) == results(whole)
    run_blocks("smoke", cut)
    assert len(taken) == 6


def results(place: Place) -> dict[str, dict[str, float]]:
    """All parts of a folder, without times and memory, which are measured anew each time."""
    found = {
        path.name: json.loads(path.read_text())["result"]
        for path in (place.store.folder / "parts").iterdir()
    }
    for result in found.values():
        assert result.pop("milliseconds") > 0
        assert result.pop("peak_bytes") > 0
    return found


@pytest.mark.parametrize("tail", [0, 2])
def test_taken_up_bit_for_bit(tail: int, tmp_path: Path) -> None:
    size = replace(size_of("smoke", Place(Store(tmp_path))), epochs=3)
    data = load_data(size.data)

    def start() -> TailTraining:
        return TailTraining(tail, size, data, torch.device("cpu"))

    whole, first, second = start(), start(), start()
    while not whole.finished:
        whole.advance()
    for _ in range(3):
        first.advance()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.times == first.times
    while not second.finished:
        second.advance()
    assert second.done == 6
    for own, other in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(own, other)


def test_small_fits_the_network(tmp_path: Path) -> None:
    size = size_of("small", Place(Store(tmp_path)))
    assert max(size.tails) <= len(build_network(10, blocks=size.blocks))
    data = load_data(size_of("smoke", Place(Store(tmp_path))).data)
    assert len(data.train) == 16
