"""The benchmark of accumulation and clipping runs, and its yardsticks are right."""

import json
from types import ModuleType

import pytest
import torch
from torch import nn


@pytest.fixture
def loops(load) -> ModuleType:
    return load("loops")


def moment_of(loops: ModuleType, kind: str):
    options = loops.parse(["--quick"])
    for moment, _, _ in loops.moments(kind, 64, options, 0, lambda params: None):
        if moment is not None:
            return moment
    raise AssertionError("no moment")


def test_quick(loops, tmp_path, capsys):
    out = tmp_path / "loops.json"
    assert loops.main(["--quick", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    ways = ["plain gradients", "one", "2 parts", "2 parts, radius / sqrt(2)"]
    assert [row["way"] for row in content["accumulation"]] == 2 * ways
    for row in content["accumulation"]:
        if row["way"] == "plain gradients":
            assert row["removed"] == row["bent"] == 0
        else:
            assert 0 < row["bent"] <= 0.4
            assert row["removed"] > 0.1
        if row["way"] == "one":
            assert row["cosine"] == pytest.approx(1)
            assert row["bent"] <= 0.2 * 1.01
    assert len(content["clipping"]) == 8
    for row in content["clipping"]:
        assert 0 < row["factor"] <= 1
        assert row["removed_known"] > 0.1
        if row["clipping"].startswith("norm"):  # measured exactly: the library's is the last
            assert row["removed"]["primum"] == pytest.approx(row["removed"]["last"], abs=1e-3)
    assert "harm removed" in capsys.readouterr().out
    assert out.with_suffix(".md").read_text().count("| SGD |") == 8
    assert {"torch", "cpu", "command", "seconds"} <= content["environment"].keys()


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_harm_is_that_of_a_small_real_step(loops, kind):
    """To first order; the backbone stands still, for the harm asked for is the head's."""
    moment = moment_of(loops, kind)
    double = moment.model.double()  # of the benchmark's own copy; the optimizer's state follows
    moment.optimizer.load_state_dict(moment.optimizer.state_dict())
    images = moment.images.double()
    moment = loops.Moment(double, moment.optimizer, images, moment.labels)
    model, optimizer, _ = moment.backward(radius=None)
    for param in model[:-1].parameters():
        param.grad = None
    optimizer.param_groups[0]["lr"] = 1e-6

    def losses() -> torch.Tensor:
        with torch.no_grad():
            return nn.functional.cross_entropy(model(images), moment.labels, reduction="none")

    before = losses()
    taken = loops.take(model, optimizer, moment.per_sample_gradients())
    change = (losses() - before) / len(before) / 1e-6
    assert taken.harm == pytest.approx(change.clamp_min(0).sum().item(), rel=1e-2)
    assert taken.harm > 0


def test_what_clipping_leaves(loops):
    model = moment_of(loops, "sgd").backward(radius=None)[0]
    norm = loops.gradients(model).norm().item()
    left = loops.left_by(lambda params: nn.utils.clip_grad_norm_(params, norm / 4), model)
    assert left == pytest.approx(0.25, rel=1e-3)
    values = loops.gradients(model[-1])
    largest = values.abs().max().item()
    left = loops.left_by(lambda params: nn.utils.clip_grad_value_(params, largest / 2), model)
    clipped = values.clamp(-largest / 2, largest / 2)
    assert left == pytest.approx((clipped @ values / (values @ values)).item(), rel=1e-5)
