"""Alg. 3 against numpy.linalg and against its transcription."""

import numpy as np
import pytest
import torch

from paper import transcribed
from primum.paper.low_rank import gram_matrices
from primum.paper.spectrum import extremal_eigenvalues, lanczos, lanczos_iterations


def gram(batch: int, rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    rng = torch.Generator().manual_seed(batch)
    rows = torch.randn(batch, rank, generator=rng, dtype=torch.float64)
    return (rows @ rows.t()).to(dtype)


@pytest.mark.parametrize(
    ("batch", "iterations"), [(1, 20), (640, 20), (671, 20), (672, 21), (4096, 128), (10**5, 128)]
)
def test_number_of_iterations(batch, iterations):
    assert lanczos_iterations(batch) == iterations


@pytest.mark.parametrize("batch", [1, 2, 32, 256])
def test_up_to_256_samples_the_spectrum_is_exact(batch):
    matrix = gram(batch, 2 * batch)
    smallest, largest = extremal_eigenvalues(matrix, torch.Generator())
    spectrum = np.linalg.eigvalsh(matrix.numpy())
    assert smallest.item() == pytest.approx(spectrum[0], rel=1e-9)
    assert largest.item() == pytest.approx(spectrum[-1], rel=1e-12)


@pytest.mark.parametrize("batch", [257, 700])
def test_beyond_256_samples_algorithm_3_takes_over(batch):
    matrix = gram(batch, batch)
    found = extremal_eigenvalues(matrix, torch.Generator().manual_seed(3))
    start = torch.randn(batch, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    by_hand = transcribed.lanczos(matrix.numpy(), start.numpy(), lanczos_iterations(batch))
    assert found[0].item() == pytest.approx(by_hand[0], rel=1e-8)
    assert found[1].item() == pytest.approx(by_hand[1], rel=1e-10)
    assert found[0].item() > 10 * np.linalg.eigvalsh(matrix.numpy())[0]  # it is not the exact one


def test_exact_up_to_is_a_setting():
    matrix, rng = gram(40, 80), torch.Generator().manual_seed(0)
    exact = torch.linalg.eigvalsh(matrix)[0]
    assert extremal_eigenvalues(matrix, rng, exact_up_to=40)[0] == exact
    assert extremal_eigenvalues(matrix, rng, exact_up_to=39)[0] != exact


@pytest.mark.parametrize("batch", [1, 2, 9])
def test_as_many_iterations_as_samples_give_the_whole_spectrum(batch):
    matrix, start = gram(batch, 2 * batch), torch.ones(batch, dtype=torch.float64)
    found = torch.linalg.eigvalsh(lanczos(matrix, start, batch))
    np.testing.assert_allclose(found.numpy(), np.linalg.eigvalsh(matrix.numpy()), rtol=1e-8)


def test_ritz_values_lie_inside_the_spectrum_of_captured_matrices(captured):
    for moment in captured:
        if moment.batch == 512 and moment.number in (0, 8, 64):
            matrix = gram_matrices(moment.double().gram, 10)[0]  # full rank: no approximation
            smallest, largest = extremal_eigenvalues(matrix, torch.Generator().manual_seed(0))
            spectrum = np.linalg.eigvalsh(matrix.numpy())
            assert largest.item() == pytest.approx(spectrum[-1], rel=1e-6)
            assert smallest.item() >= spectrum[0]


@pytest.mark.parametrize("batch", [8, 300])
def test_smallest_eigenvalue_is_floored_at_the_resolution(batch):
    matrix = gram(batch, 3, torch.float32)  # rank 3
    smallest, largest = extremal_eigenvalues(matrix, torch.Generator().manual_seed(0))
    assert smallest == largest * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("batch", [4, 300])
def test_exhausted_krylov_space_adds_no_eigenvalue(batch):
    matrix = 3 * torch.eye(batch)
    start = torch.zeros(batch)
    start[1] = 1.0  # exact arithmetic: the first residual is exactly zero
    assert torch.equal(lanczos(matrix, start, 4), 3 * torch.eye(4))
    assert extremal_eigenvalues(matrix, torch.Generator()) == pytest.approx((3.0, 3.0))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("batch", [4, 300])
def test_values_that_are_not_finite_do_not_raise(batch, value):
    matrix = torch.eye(batch)
    matrix[0, 0] = value
    assert extremal_eigenvalues(matrix, torch.Generator()) == (0.0, 0.0)


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    extremal_eigenvalues(gram(300, 300), torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.get_rng_state())
