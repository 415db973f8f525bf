"""The benchmark of the second look runs, and its parts of a change are what they say."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
KINDS = ["plain", "primum", "second look, head", "second look, network", "network's weights",
         "shuffled"]  # fmt: skip


def test_second_look(load, tmp_path, capsys):
    out = tmp_path / "second_look.json"
    assert load("second_look").main(["--quick", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    assert list(content["runs"]) == ["plain", "primum"]
    for run in content["runs"].values():
        assert list(run) == [*KINDS, "measurements"]
        plain, own, shuffled = (run[kind] for kind in ("plain", "primum", "shuffled"))
        assert own["head_first"]["harm"] < plain["head_first"]["harm"]
        assert own["extra_weight"] == pytest.approx(shuffled["extra_weight"], rel=1e-5)
        assert plain["extra_weight"] == 0
        # A first-order prediction of the whole network is not the real thing, but near it.
        predicted, real = plain["network_first"]["mean"], plain["batch"]["total"]["mean"]
        assert predicted == pytest.approx(real, rel=0.3)
    assert str(tmp_path) not in json.dumps(content["environment"])
    assert "| plain | second look, head |" in out.with_suffix(".md").read_text()
    assert "common shift" in capsys.readouterr().out


def test_a_change_is_split_by_its_cause(load):
    split = load("_second_look").split
    torch.manual_seed(0)
    features, moved = torch.randn(6, 3), torch.randn(6, 3)
    old, new = ((torch.randn(4, 3), torch.randn(4)) for _ in range(2))
    labels = torch.tensor([0, 1, 2, 3, 0, 1])

    def losses(x, head):
        return F.cross_entropy(F.linear(x, *head), labels, reduction="none")

    before = losses(features, old)
    row = split(features, moved, old, new, labels)
    expected = {
        "total": losses(moved, new) - before,
        "head": losses(features, new) - before,
        "backbone": losses(moved, old) - before,
    }
    expected["interaction"] = expected["total"] - expected["head"] - expected["backbone"]
    for name, change in expected.items():
        assert row[name]["mean"] == pytest.approx(float(change.mean()), rel=1e-4)
        assert row[name]["harm"] == pytest.approx(float(change.clamp_min(0).mean()), rel=1e-4)
        assert row[name]["harmed"] == pytest.approx(float((change > 0).float().mean()))
    # Without interaction and with a backbone that stays, all is the head's.
    assert split(features, features, old, new, labels)["head_share"] == pytest.approx(1, rel=1e-5)


def test_a_step_of_the_bias_is_common_to_all_samples(load):
    split = load("_second_look").split
    torch.manual_seed(0)
    features, weight, bias = torch.randn(6, 3), torch.randn(4, 3), torch.zeros(4)
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    step = torch.tensor([3.0, 0.0, 4.0, 0.0])
    row = split(features, features, (weight, bias), (weight, bias + step), labels)
    assert row["common_shift"] == pytest.approx(5, rel=1e-5)
    assert row["own_shift"] == pytest.approx(0, abs=1e-5)
    assert row["common"] == pytest.approx(row["total"], rel=1e-4)
    assert row["own"]["spread"] == pytest.approx(0, abs=1e-5)


def test_the_guide_says_what_was_measured():
    runs = json.loads((BENCHMARKS / "results" / "second_look.json").read_text())["runs"]
    assert {run["measurements"] for run in runs.values()} == {26}
    plain, own = runs["plain"], runs["primum"]

    def real_harm(row) -> int:
        return round(1000 * row["batch"]["total"]["harm"])

    # The sentences below the table.
    assert [real_harm(plain[kind]) for kind in ("plain", "primum")] == [56, 34]
    assert [real_harm(own[kind]) for kind in ("plain", "primum")] == [89, 52]
    assert real_harm(plain["shuffled"]) > real_harm(plain["plain"])
    assert real_harm(own["shuffled"]) > real_harm(own["plain"])
    assert round(100 * plain["plain"]["batch"]["head_share"]) == 14
    assert round(100 * plain["plain"]["agreement"]["same_sign"]) == 76
    assert round(1000 * plain["plain"]["batch"]["common"]["harm"]) == 49
    falls = [plain["plain"], own["primum"]]
    assert [round(-1000 * row["batch"]["total"]["mean"]) for row in falls] == [20, 42]
    for look, low, high in (("head", 0.97, 0.99), ("network", 0.65, 0.68)):
        cosines = sorted(round(run[f"second look, {look}"]["cosine"], 2) for run in runs.values())
        assert cosines == [low, high]
