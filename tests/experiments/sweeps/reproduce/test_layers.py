"""Figure 1 from looks at a network."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from primum.experiments.inspection import Inspection
from primum.experiments.inspection.moment import Moment
from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.reproduce.layers import (
    judge_moments,
    networks,
    part_of,
    run_layers,
)
from primum.experiments.sweeps.store import Store


def moment(error: list[float], reor: float) -> Moment:
    table = {"weights": ["plain", "paper"], "reor": [0.0, reor]}
    return Moment(0, "", 0.1, 1.0, ("a", "b", "c"), [1.0] * 3, error, table, {}, {}, {})


def test_three_claims() -> None:
    good = judge_moments("net", [moment([0.0, 0.2, 0.5], 0.3)] * 2, "small")
    assert [finding.status for finding in good] == ["reproduced"] * 3
    bad = judge_moments("net", [moment([0.0, 0.9, 0.8], -0.3)], "small")
    assert [finding.status for finding in bad] == ["not reproduced"] * 3
    assert bad[0].ours == "0.80"


def test_steps_without_harm_do_not_count() -> None:
    some = [moment([0.0, 0.2, 0.5], reor) for reor in (math.nan, 0.4)]
    assert judge_moments("net", some, "small")[2].ours == "100%, mean +0.40"
    none = judge_moments("net", some[:1], "small")[2]
    assert none.status == "not reproduced"


def test_smoke(tmp_path: Path) -> None:
    found = run_layers("smoke", Place(Store(tmp_path)))
    assert len(found) == 6
    assert {finding.status for finding in found} == {"not judged"}


@pytest.mark.parametrize("pieces", [1, 2, 3, 6])
def test_cut_and_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    """After a look, between two steps, before the last look, and in the second network."""
    cut = Place(Store(tmp_path / "cut"), checkpoint_seconds=0)
    whole = Place(Store(tmp_path / "whole"))
    expected = run_layers("smoke", whole)
    taken: list[str] = []
    plain = Inspection.advance

    def counted(self: Inspection) -> bool:
        taken.append(self.settings.model)
        return plain(self)

    def interrupted(self: Inspection) -> bool:
        if len(taken) == pieces:
            raise KeyboardInterrupt
        return counted(self)

    monkeypatch.setattr(Inspection, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_layers("smoke", cut)
    assert len(list((tmp_path / "cut" / "checkpoints").iterdir())) == 1
    monkeypatch.setattr(Inspection, "advance", counted)
    assert run_layers("smoke", cut) == expected
    assert taken == ["cnn-small"] * 4 + ["vit-micro"] * 4  # a look, two steps, a look: none twice
    assert not list((tmp_path / "cut" / "checkpoints").iterdir())
    names = [path.name for path in (tmp_path / "whole" / "parts").iterdir()]
    for name in names:
        own, other = ((place.store.folder / "parts" / name) for place in (cut, whole))
        assert own.read_text() == other.read_text()
    assert run_layers("smoke", cut) == expected
    assert len(taken) == 8


def test_parts_are_the_same_wherever_the_data_are(tmp_path: Path) -> None:
    here, there = (
        Place(Store(tmp_path), data_dir=folder, threads=n) for n, folder in ((1, "a"), (2, None))
    )
    keys = [[part_of(n).key for n in networks("full", place)] for place in (here, there)]
    assert keys[0] == keys[1]
    assert len({*keys[0], *(part_of(n).key for n in networks("full", here, "cuda"))}) == 4


def test_full_is_the_papers_setting(tmp_path: Path) -> None:
    place = Place(Store(tmp_path), data_dir="somewhere")
    models = [network.settings.model for network in networks("full", place)]
    assert models == ["resnet20", "vit-small"]
    assert all(n.settings.train_steps == 39_000 for n in networks("full", place))
