"""UPGrad on the whole network and MGDA on groups, against explicit per-sample gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor, nn
from torchjd.aggregation import UPGradWeighting

from experiments.conftest import tiny
from primum.experiments.arms import Arm
from primum.experiments.epochs import Batch
from primum.experiments.errors import UserError
from primum.experiments.methods import Method, make_method

LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


def attached(arm: str) -> tuple[Method, nn.Module, nn.Module, Batch]:
    """The method, its model, a copy of that before TorchJD's hooks came, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = Batch(torch.randn(6, 4), LABELS, torch.arange(6))
    plain = copy.deepcopy(model)
    return make_method(tiny(arm), model, optimizer), model, plain, batch


def per_sample(model: nn.Module, batch: Batch) -> Tensor:
    """Gradients of each sample's loss; [B, parameters]."""
    rows = []
    for image, label in zip(batch.inputs, batch.targets, strict=True):
        loss = F.cross_entropy(model(image[None]), label[None])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([each.flatten() for each in gradients]))
    return torch.stack(rows)


def filled(model: nn.Module) -> Tensor:
    found = [param.grad for param in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in found if gradient is not None])


@pytest.mark.parametrize("scale", ["published", "mean-1"])
def test_upgrad_uses_the_gram_matrix_of_the_whole_network(scale: str) -> None:
    method, model, plain, batch = attached(f"upgrad-network@upgrad_scale={scale}")
    jacobian = per_sample(plain, batch)
    weights = UPGradWeighting()(jacobian @ jacobian.T) * len(LABELS)
    weights = weights / weights.mean() if scale == "mean-1" else weights
    method.backward(batch, 0, 3, observed=False)
    # The solver's own tolerance, on Gram matrices that differ by float32 rounding.
    torch.testing.assert_close(filled(model), weights @ jacobian / 6, rtol=1e-3, atol=1e-4)


def test_mgda_is_the_shortest_convex_combination_of_group_gradients() -> None:
    method, model, plain, batch = attached("mgda@groups=3")
    groups = per_sample(plain, batch).view(3, 2, -1).mean(1)
    mean = method.backward(batch, 0, 3, observed=False)
    gram = (groups @ groups.T).double().numpy()
    best = minimize(
        lambda w: w @ gram @ w,
        [1 / 3] * 3,
        bounds=[(0, 1)] * 3,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
    )
    found = filled(model)
    # TorchJD stops Frank-Wolfe's iteration at a tolerance of 0.001.
    assert float(found @ found) == pytest.approx(best.fun, rel=2e-2)
    assert float(found @ found) < float(groups.mean(0) @ groups.mean(0))
    losses = F.cross_entropy(model(batch.inputs), batch.targets)
    torch.testing.assert_close(mean, losses.detach())


def test_a_batch_that_cannot_be_cut() -> None:
    method, _, _, batch = attached("mgda@groups=4")
    with pytest.raises(UserError, match="batch of 6 cannot be split into 4 equal groups"):
        method.backward(batch, 0, 3, observed=False)
    with pytest.raises(UserError, match="groups must be >= 2 and finite, got 1"):
        Arm.parse("mgda@groups=1")
