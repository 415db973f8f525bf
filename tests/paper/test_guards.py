"""Alg. 2 and Alg. 4 over sequences of steps, against their transcription."""

import numpy as np
import pytest
import torch

from paper import transcribed
from primum.paper.guards import condition_guard, spike_guard
from primum.paper.low_rank import gram_matrices

NAN = torch.tensor(torch.nan, dtype=torch.float64)
RNG = torch.Generator()


def gram_of_condition(kappa: float, batch: int, rng: np.random.Generator) -> np.ndarray:
    basis, _ = np.linalg.qr(rng.standard_normal((batch, batch)))
    return (basis * np.geomspace(1, kappa, batch)) @ basis.T


@pytest.mark.parametrize("options", [{}, {"max_raise": 3.0, "momentum": 0.5}])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_spike_guard_follows_algorithm_2_over_many_steps(scale, options):
    rng = np.random.default_rng(0)
    average, ema_dg, fired = NAN, None, 0
    for step in range(300):
        dg = scale * float(np.exp(rng.standard_normal())) * (1e8 if step % 17 == 5 else 1)
        drift = rng.standard_normal(4)
        clipped, scaled, average = spike_guard(
            torch.tensor(dg, dtype=torch.float64), torch.from_numpy(drift), average, **options
        )
        by_hand = transcribed.spike_guard(dg, drift, ema_dg, *options.values())
        ema_dg = by_hand[2]
        fired += by_hand[0] < dg
        assert clipped.item() == pytest.approx(by_hand[0], rel=1e-12)
        np.testing.assert_allclose(scaled.numpy(), by_hand[1], rtol=1e-12)
        assert average.item() == pytest.approx(ema_dg, rel=1e-12)
    assert 17 <= fired < 300


def test_spike_guard_leaves_ordinary_steps_alone():
    drift = torch.tensor([0.1, -0.2])
    clipped, same, average = spike_guard(torch.tensor(0.3), drift, torch.tensor(0.3))
    assert clipped == torch.tensor(0.3)
    assert torch.equal(same, drift)
    assert average == pytest.approx(0.3)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.5, "max_raise": 2.0}])
@pytest.mark.parametrize("batch", [2, 7, 40])
def test_condition_guard_follows_algorithm_4_over_many_steps(batch, options):
    rng = np.random.default_rng(batch)
    average, kappa_bar, fired = NAN, None, 0
    for step in range(60):
        kappa = 100 * float(np.exp(0.3 * rng.standard_normal())) * (1e4 if step % 7 == 3 else 1)
        gram = gram_of_condition(kappa, batch, rng)
        guarded, norm, average = condition_guard(torch.from_numpy(gram), average, RNG, **options)
        by_hand, lam_max, kappa_bar = transcribed.precondition(
            gram, kappa_bar, None, *options.values()
        )
        fired += by_hand is not gram
        np.testing.assert_allclose(guarded.numpy(), by_hand, rtol=1e-8, atol=1e-8)
        assert norm.item() == pytest.approx(lam_max, rel=1e-10)
        assert average.item() == pytest.approx(kappa_bar, rel=1e-8)
    assert 8 <= fired < 60


def test_condition_guard_enforces_the_condition_it_aims_at():
    gram = gram_of_condition(1e5, 20, np.random.default_rng(0))
    guarded, norm, average = condition_guard(
        torch.from_numpy(gram), torch.tensor(80.0, dtype=torch.float64), RNG
    )
    assert np.linalg.cond(guarded.numpy(), 2) == pytest.approx(1.25 * 80, rel=1e-8)
    assert norm.item() == pytest.approx(np.linalg.norm(guarded.numpy(), 2), rel=1e-10)
    assert average.item() == pytest.approx(0.98 * 80 + 0.02 * 100)


def test_both_guards_on_captured_training(captured):
    """Whole runs at B = 32 and 128, with the exact spectrum; the guards' averages go along."""
    for optimizer in ("SGD", "AdamW"):
        for batch in (32, 128):
            average, kappa_bar = NAN, None
            for moment in captured:
                if (moment.optimizer, moment.batch) != (optimizer, batch):
                    continue
                gram, _ = gram_matrices(moment.double().gram, 5)
                guarded, norm, average = condition_guard(gram, average, RNG)
                by_hand, lam_max, kappa_bar = transcribed.precondition(gram.numpy(), kappa_bar)
                scale = lam_max * 1e-9
                np.testing.assert_allclose(guarded.numpy(), by_hand, rtol=1e-6, atol=scale)
                assert norm.item() == pytest.approx(lam_max, rel=1e-9)
                assert average.item() == pytest.approx(kappa_bar, rel=1e-5)  # cond. up to 1e8


@pytest.mark.parametrize("batch", [1, 5])
def test_a_matrix_of_zeros_passes_and_does_not_count(batch):
    guarded, norm, average = condition_guard(torch.zeros(batch, batch), torch.tensor(9.0), RNG)
    assert torch.equal(guarded, torch.zeros(batch, batch))
    assert norm == 0
    assert average.isnan()  # which the recipe does not keep


def test_one_sample_is_perfectly_conditioned():
    guarded, norm, average = condition_guard(torch.tensor([[3.0]]), torch.tensor(torch.nan), RNG)
    assert (guarded.item(), norm.item(), average.item()) == (3.0, 3.0, 1.0)
