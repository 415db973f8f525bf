"""Parts of experiments: kept once finished, taken up if cut."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from primum.experiments.images import DataSettings
from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.ranks import Ranks
from primum.experiments.sweeps.reproduce import parts
from primum.experiments.sweeps.reproduce.parts import Part, find_part, make_part, plain_data
from primum.experiments.sweeps.settings import SettingsError
from primum.experiments.sweeps.store import StoreError

PART = Part("count", "counting", {"up to": 4}, "cpu")


class Drawing:
    """Adds up random numbers; stops at `cut`."""

    total = 4

    def __init__(self, cut: int | None = None) -> None:
        self.numbers: list[float] = []
        self.begun: int | None = None
        self.cut = cut

    @property
    def done(self) -> int:
        return len(self.numbers)

    @property
    def finished(self) -> bool:
        return self.done == self.total

    def advance(self) -> None:
        self.begun = self.done if self.begun is None else self.begun
        if self.done == self.cut:
            raise KeyboardInterrupt
        self.numbers.append(float(torch.rand(())))

    def result(self) -> dict[str, Any]:
        return {"numbers": self.numbers, "none": [math.nan], "name": "x"}

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": list(self.numbers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.numbers = list(state["numbers"])


def files(place: Place) -> list[Path]:
    return [path for path in place.store.folder.rglob("*") if path.is_file()]


def test_a_finished_part_is_not_made_again(place: Place) -> None:
    made = make_part(PART, place, Drawing)
    assert files(place) == [PART.path(place)]
    content = json.loads(PART.path(place).read_text())
    assert content["settings"] == {"up to": 4, "device": "cpu"}
    assert content["command"] == "primum compare"
    PART.checkpoint_path(place).touch()  # as if killed before it was removed

    def never() -> Drawing:
        raise AssertionError

    again = make_part(PART, place, never)
    assert again["numbers"] == made["numbers"]
    assert math.isnan(made["none"][0])
    assert math.isnan(again["none"][0])
    assert files(place) == [PART.path(place)]


@pytest.mark.parametrize("cut", range(4))
def test_a_cut_part_ends_as_if_it_had_not_been(place: Place, tmp_path: Path, cut: int) -> None:
    """Random numbers included, whatever the program drew in between."""
    whole = make_part(PART, replace(place, store=replace(place.store, folder=tmp_path)), Drawing)
    careful = replace(place, checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        make_part(PART, careful, lambda: Drawing(cut))
    assert PART.checkpoint_path(place).exists() == (cut > 0)
    torch.manual_seed(99)
    expected = torch.get_rng_state()
    work = Drawing()
    assert make_part(PART, careful, lambda: work)["numbers"] == whole["numbers"]
    assert work.begun == cut
    assert files(place) == [PART.path(place)]
    assert torch.equal(torch.get_rng_state(), expected)


def test_no_checkpoint_before_it_is_time(place: Place) -> None:
    with pytest.raises(KeyboardInterrupt):
        make_part(PART, replace(place, checkpoint_seconds=60), lambda: Drawing(3))
    assert files(place) == []


def test_a_checkpoint_that_is_damaged_or_anothers_means_starting_anew(place: Place) -> None:
    careful = replace(place, checkpoint_seconds=0)
    for content in (b"half a fi", b""):
        PART.checkpoint_path(place).write_bytes(content)
        with pytest.raises(KeyboardInterrupt):
            make_part(PART, careful, lambda: Drawing(0))
    torch.save({"key": "another", "work": {"numbers": [1.0]}}, PART.checkpoint_path(place))
    work = Drawing()
    make_part(PART, place, lambda: work)
    assert work.begun == 0


def test_the_key_is_of_what_the_numbers_depend_on() -> None:
    keys = {
        PART.key,
        replace(PART, settings={"up to": 5}).key,
        replace(PART, device="cuda").key,
        replace(PART, name="other").key,
    }
    assert len(keys) == 4
    assert replace(PART, label="in other words").key == PART.key
    here = DataSettings("cifar10", "here", "there", train_size=5)
    assert plain_data(here) == plain_data(DataSettings("cifar10", train_size=5))
    assert plain_data(here)["train_size"] == 5


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"format": "x"}', '{"format": "primum-part-1"}']
)
def test_a_file_that_cannot_be_read_is_named(place: Place, text: str) -> None:
    make_part(PART, place, Drawing)
    PART.path(place).write_text(text)
    with pytest.raises(StoreError, match=r"count-.*cannot be read.*remove it"):
        find_part(PART, place)


def test_several_processes_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "current", lambda: Ranks(0, 2))
    with pytest.raises(SettingsError, match="without torchrun"):
        make_part(PART, place, Drawing)
