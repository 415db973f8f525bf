"""All weightings of a batch side by side."""

import pandas as pd
import pytest
import torch

from diagnostics.scenes import by_optimizer, close, scene, undisturbed
from primum.diagnostics import Probe, compare, first_order, measure, real_steps, reor, weightings
from primum.kernel.recipe import Primum


@by_optimizer
def test_it_is_its_parts(kind):
    probe = scene("cnn", kind)
    found = compare(probe)
    network = measure(probe)
    given = weightings(probe, network)
    first, real = first_order(probe, given), real_steps(probe, given)
    assert list(found.extra_weights) == ["plain", *given]
    assert not found.extra_weights["plain"].any()
    for name, weights in given.items():
        close(found.extra_weights[name], weights)
        close(found.reor()[name], reor(first["plain"].drift, first[name].drift))
        close(found.real_reor()[name], reor(real["plain"].change, real[name].change))


@by_optimizer
def test_the_table_is_for_pandas(kind):
    found = compare(scene("cnn", kind), recipes={"tight": Primum(radius=0.05)})
    frame = pd.DataFrame(found.table()).set_index("weights")
    names = ["plain", "head", "paper", "network", "permuted", "uniform", "tight"]
    assert list(frame.index) == names
    assert list(frame.columns) == [
        "mean_extra_weight", "reor", "reor_fixed_gain", "reor_real",
        "harmed", "harmed_real", "sign_right", "correlation",
    ]  # fmt: skip
    assert frame.notna().all().all()
    assert (frame.loc["plain", ["reor", "reor_fixed_gain", "reor_real"]].abs() < 1e-12).all()
    assert (frame.loc["network", ["reor", "reor_fixed_gain"]] > 0).all()
    for name in ("permuted", "uniform"):
        assert frame.mean_extra_weight[name] == pytest.approx(frame.mean_extra_weight["head"])
    drift = measure(scene("cnn", kind)).drift.sum(0)
    assert frame.harmed["plain"] == pytest.approx(float((drift > 0).double().mean()))
    if kind != "AdamW":
        torch.testing.assert_close(frame.reor.tolist(), frame.reor_fixed_gain.tolist())


def test_nothing_is_disturbed():
    probe = scene("cnn", "AdamW")
    with undisturbed(probe):
        compare(probe)


def test_settings_go_through():
    probe = scene("cnn")
    for weights in compare(probe, radius=0).extra_weights.values():
        assert not weights.any()
    assert compare(probe, max_extra_weight=0.01).extra_weights["network"].max() <= 0.01 + 1e-9


@pytest.mark.cuda
@by_optimizer
def test_on_a_gpu(kind):
    """The same numbers as on the CPU, float64 on both."""
    probe = scene("cnn", kind)
    expected = pd.DataFrame(compare(probe).table()).set_index("weights")
    model = probe.model.cuda()  # in place: the optimizer goes on with the same parameters
    probe.optimizer.load_state_dict(probe.optimizer.state_dict())  # its state follows them
    there = Probe(model, probe.optimizer, probe.loss, probe.inputs.cuda(), probe.targets.cuda())
    before = torch.cuda.get_rng_state()
    found = pd.DataFrame(compare(there).table()).set_index("weights")
    assert torch.equal(torch.cuda.get_rng_state(), before)
    pd.testing.assert_frame_equal(found, expected, rtol=1e-5)
