"""Figure 1 from looks at a network."""

from __future__ import annotations

import math
from pathlib import Path

from primum.experiments.inspection.moment import Moment
from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.reproduce.layers import judge_moments, networks, run_layers
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


def test_full_is_the_papers_setting(tmp_path: Path) -> None:
    place = Place(Store(tmp_path), data_dir="somewhere")
    models = [network.settings.model for network in networks("full", place)]
    assert models == ["resnet20", "vit-small"]
    assert all(n.settings.train_steps == 39_000 for n in networks("full", place))
