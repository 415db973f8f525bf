"""App. B against explicit per-sample gradients, numpy.linalg.svd and the paper's pseudocode."""

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paper import transcribed
from paper.explicit import per_sample_gradients
from primum.kernel.gram import MatrixFree
from primum.kernel.optimizers.predict import predict
from primum.paper.low_rank import gram_matrices, low_rank, weighted_gram

BATCH, D_IN, D_OUT = 12, 7, 5
WIDE = torch.float64


def explicit(bias: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features with their ones, gradients at the output, and G of a real cross-entropy head."""
    rng = torch.Generator().manual_seed(0)
    head = nn.Linear(D_IN, D_OUT, bias=bias, dtype=torch.float64)
    for param in head.parameters():
        nn.init.normal_(param, generator=rng)
    inputs = torch.randn(BATCH, D_IN, generator=rng, dtype=torch.float64)
    labels = torch.randint(D_OUT, (BATCH,), generator=rng)
    outputs = head(inputs).detach().requires_grad_()
    nn.functional.cross_entropy(outputs, labels).backward()
    features = nn.functional.pad(inputs, (0, 1), value=1.0) if bias else inputs
    rows = per_sample_gradients(head, list(head.parameters()), inputs, labels)
    return features, outputs.grad, rows


def a_gain(columns: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    return torch.rand(D_OUT, columns, generator=rng, dtype=torch.float64) + 0.1


def flat(gain: torch.Tensor, bias: bool) -> torch.Tensor:
    """In the order of the parameters: the weight, then the bias."""
    return torch.cat([gain[:, :-1].flatten(), gain[:, -1]]) if bias else gain.flatten()


@pytest.mark.parametrize("rank", [1, 3, 5, 99])
@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (1, 4)])
def test_no_matrix_of_that_rank_is_closer(shape, rank):
    gain = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, right = low_rank(gain, rank)
    singular = np.linalg.svd(gain.numpy(), compute_uv=False)
    error = (gain - left.t() @ right).norm().item()
    assert len(left) == len(right) == min(rank, *shape)
    assert error == pytest.approx(np.sqrt((singular[rank:] ** 2).sum()), abs=1e-13)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_weighted_gram_follows_pseudocode_2(rank):
    features, gradients, _ = explicit(bias=False)
    found = weighted_gram(features, gradients, a_gain(D_IN), rank)
    by_hand = transcribed.weighted_gram(
        features.numpy(), gradients.numpy(), a_gain(D_IN).numpy(), rank
    )
    np.testing.assert_allclose(found.numpy(), by_hand, atol=1e-15)


@pytest.mark.parametrize("bias", [True, False])
def test_at_full_rank_both_matrices_are_those_of_explicit_gradients(bias):
    features, gradients, rows = explicit(bias)
    gain = a_gain(features.shape[1])
    gram, metric = gram_matrices(MatrixFree(features, gradients, gain, has_bias=bias), D_OUT)
    torch.testing.assert_close(gram, (rows * flat(gain, bias)) @ rows.t())
    torch.testing.assert_close(metric, (rows * flat(gain, bias) ** 2) @ rows.t())


def test_gain_and_squared_gain_are_approximated_each_by_itself():
    """The square of a rank-r gain would be another matrix, of rank up to r^2."""
    features, gradients, rows = explicit()
    gain = a_gain(D_IN + 1)
    _, metric = gram_matrices(MatrixFree(features, gradients, gain, has_bias=True), 2)
    u, s, vh = np.linalg.svd(gain[:, :-1].numpy() ** 2, full_matrices=False)
    square = torch.from_numpy((u[:, :2] * s[:2]) @ vh[:2])
    both = torch.cat([square.flatten(), gain[:, -1] ** 2])
    torch.testing.assert_close(metric, (rows * both) @ rows.t())


def test_the_bias_is_exact_at_any_rank():
    """Inputs of zero leave the bias alone: nothing is approximated then."""
    features, gradients, _ = explicit()
    features[:, :-1] = 0
    gain = a_gain(D_IN + 1)
    gram, metric = gram_matrices(MatrixFree(features, gradients, gain, has_bias=True), 1)
    torch.testing.assert_close(gram, (gradients * gain[:, -1]) @ gradients.t())
    torch.testing.assert_close(metric, (gradients * gain[:, -1] ** 2) @ gradients.t())


@pytest.mark.parametrize("bias", [True, False])
def test_plain_sgd_has_one_matrix_for_both(bias):
    features, gradients, rows = explicit(bias)
    gram, metric = gram_matrices(MatrixFree(features, gradients, 1.0, has_bias=bias), 5)
    assert metric is gram
    torch.testing.assert_close(gram, rows @ rows.t())


@pytest.mark.parametrize("gain", [1.9, torch.tensor(1.9, dtype=torch.float64)])
def test_nesterov_has_two_that_are_proportional(gain):
    features, gradients, rows = explicit()
    gram, metric = gram_matrices(MatrixFree(features, gradients, gain, has_bias=True), 5)
    torch.testing.assert_close(gram, 1.9 * rows @ rows.t())
    torch.testing.assert_close(metric, 1.9**2 * rows @ rows.t())


def dead_features() -> tuple[Tensor, Tensor, Tensor]:
    """Features of which a third is always zero, gradients at the output, AdamW's gain."""
    rng = torch.Generator().manual_seed(3)
    weight = nn.Parameter(torch.zeros(10, 64))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    for _ in range(20):
        features = torch.randn(32, 64, generator=rng).relu()
        features[:, ::3] = 0
        gradients = torch.randn(32, 10, generator=rng) / 32
        gain = predict(optimizer, weight, gradients.t() @ features).gain
        weight.grad = gradients.t() @ features
        optimizer.step()
    assert isinstance(gain, Tensor)
    assert gain.max() > 1e4 * gain.min()
    return features, gradients, gain


def test_features_that_are_always_zero_cost_no_digits():
    """AdamW's gain is about 1 / eps there: a float32 SVD would lose those of the others."""
    features, gradients, gain = dead_features()
    found = gram_matrices(MatrixFree(features, gradients, gain), 5)
    for matrix, power in zip(found, (1, 2), strict=True):
        expected = by_many_digits(features.double(), gradients.double(), gain, power)
        assert (matrix - expected).abs().max() <= 1e-5 * expected.abs().max()


def by_many_digits(x: Tensor, g: Tensor, gain: Tensor, power: int) -> Tensor:
    """The Gram matrix of a power of the gain, approximated with rank 5, by an SVD of 50 digits."""
    with mpmath.workdps(50):
        wide = mpmath.matrix(gain.double().tolist()).apply(lambda value: value**power)
        u, s, v = mpmath.svd_r(wide)
        left = torch.tensor(
            [[float(u[i, k] * s[k]) for k in range(5)] for i in range(len(gain))], dtype=WIDE
        )
        right = torch.tensor(
            [[float(v[k, j]) for j in range(x.shape[1])] for k in range(5)], dtype=WIDE
        )
    return sum(((x * right[k]) @ x.t()) * ((g * left[:, k]) @ g.t()) for k in range(5))


def test_sequences_are_formed_exactly():
    rng = torch.Generator().manual_seed(2)
    features = torch.randn(4, 3, D_IN, generator=rng, dtype=torch.float64)
    gradients = torch.randn(4, 3, D_OUT, generator=rng, dtype=torch.float64)
    rows = torch.einsum("bto,bti->boi", gradients, features).flatten(1)
    gain = a_gain(D_IN)
    gram, metric = gram_matrices(MatrixFree(features, gradients, gain), 1)
    torch.testing.assert_close(gram, (rows * gain.flatten()) @ rows.t())
    torch.testing.assert_close(metric, (rows * gain.flatten() ** 2) @ rows.t())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gain_that_is_not_finite_does_not_raise(value):
    gain = torch.ones(3, 4)
    gain[1, 1] = value
    left, right = low_rank(gain, 2)
    assert torch.equal(left.t() @ right, torch.zeros(3, 4))
