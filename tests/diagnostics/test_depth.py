"""Optimal scale and error by depth, against the text of the paper (App. F)."""

import pytest
import torch
from torch import Tensor

from diagnostics.scenes import by_optimizer, close, gain_of, loop_gradients, scene
from primum.diagnostics import Interference, by_depth, measure
from primum.diagnostics.layers import layers_of


def with_gram(gram: Tensor) -> Interference:
    layers, batch = gram.shape[:2]
    nothing = gram.new_zeros(layers, batch)
    names = tuple(map(str, range(layers)))
    return Interference(names, gram, nothing, nothing[:, 0], nothing[0], 0.1)


def gradients(layers: int = 4, batch: int = 6, size: int = 5) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(layers, batch, size, generator=rng, dtype=torch.float64)
    return rows @ rows.transpose(1, 2)


@by_optimizer
def test_literally(kind):
    """`alpha = Tr(Q' Q_l:L) / ||Q_l:L||^2`, from explicit gradients of layers l to L."""
    probe = scene("cnn", kind)
    found, rows, layers = by_depth(measure(probe)), loop_gradients(probe), layers_of(probe)
    grams = []
    for first in range(len(layers)):
        names = [p for layer in layers[first:] for p in layer.params]
        g = torch.cat([rows[n].flatten(1) for n in names], 1)
        gains = [gain_of(probe.optimizer, probe.moved[n][0], rows[n].sum(0)) for n in names]
        grams.append(g @ torch.diag(torch.cat([k.flatten() for k in gains])) @ g.t())
    whole = grams[0]
    for number, partial in enumerate(grams):
        alpha = torch.trace(whole.t() @ partial) / torch.linalg.matrix_norm(partial) ** 2
        left = torch.linalg.matrix_norm(whole - alpha * partial)
        assert float(found.scale[number]) == pytest.approx(float(alpha), rel=1e-9)
        error = float(left / torch.linalg.matrix_norm(whole))
        assert float(found.error[number]) == pytest.approx(error, rel=1e-9, abs=1e-12)
    assert found.layers == tuple(layer.name for layer in layers)


def test_no_other_scale_is_better():
    gram = gradients()
    found = by_depth(with_gram(gram))
    whole = gram.sum(0)
    for first in range(4):
        partial = gram[first:].sum(0)
        for factor in (0.99, 1.01):
            other = (whole - factor * found.scale[first] * partial).norm() / whole.norm()
            assert other >= found.error[first] - 1e-12


def test_all_layers_are_all_there_is():
    found = by_depth(with_gram(gradients()))
    assert float(found.error[0]) < 1e-14
    assert float(found.scale[0]) == pytest.approx(1)
    assert (found.scale >= 1).all()  # the rest adds a positive matrix
    assert ((found.error >= 0) & (found.error < 1)).all()


def test_proportional_layers_stand_for_all():
    one = gradients(1)
    found = by_depth(with_gram(torch.cat((3 * one, one))))
    assert found.scale.tolist() == pytest.approx([1, 4])
    assert float(found.error.max()) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e30])
def test_units_do_not_matter(factor, dtype):
    """Squares of 1e-30 vanish in float32, and those of 1e30 overflow."""
    gram = gradients().to(dtype)
    found, expected = by_depth(with_gram(factor * gram)), by_depth(with_gram(gram))
    torch.testing.assert_close(found.scale, expected.scale)
    torch.testing.assert_close(found.error, expected.error, rtol=1e-4, atol=1e-6)


def test_last_layers_much_smaller_than_the_rest():
    gram = gradients(2).float()
    gram[1] *= 1e-25
    found = by_depth(with_gram(gram))
    expected = by_depth(with_gram(gram.double()))
    close(found.scale.double(), expected.scale, 1e-5)
    close(found.error.double(), expected.error, 1e-5)


def test_nothing_where_gradients_are_zero():
    found = by_depth(with_gram(torch.zeros(3, 4, 4)))
    assert found.scale.tolist() == found.error.tolist() == [0, 0, 0]
    gram = gradients(2)
    gram[1] = 0
    found = by_depth(with_gram(gram))
    assert float(found.scale[1]) == 0
    assert float(found.error[1]) == 1
