"""SGD with the bias in a group of its own: the usual way to keep weight decay off it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import batch, report_of, stir
from primum import Primum, Problem, Recipe, Solution, StepProblem, solve
from primum.kernel.gram import Dense, MatrixFree
from primum.paper import Paper, PaperSettings
from primum.paper.low_rank import gram_matrices

PRECISE = Primum(radius=0.2, max_iters=40, tolerance=0.0)


def no_decay(bias_lr: float = 0.1, **options: Any) -> tuple[nn.Linear, optim.SGD]:
    torch.manual_seed(0)
    head = nn.Linear(6, 4).double()
    groups = [
        {"params": [head.weight], "weight_decay": 1e-2},
        {"params": [head.bias], "weight_decay": 0.0, "lr": bias_lr},
    ]
    return head, optim.SGD(groups, lr=0.1, momentum=0.9, **options)


class Kept(Recipe):
    """A recipe that keeps the problems it was given."""

    def __init__(self, recipe: Any) -> None:
        self.recipe, self.name, self.metric = recipe, recipe.name, recipe.metric
        self.products = recipe.products
        self.problems: list[StepProblem] = []

    def __call__(self, problem: StepProblem) -> Solution:
        self.problems.append(problem)
        found: Solution = self.recipe(problem)
        return found


def one_step(head: nn.Linear, optimizer: optim.SGD, recipe: Kept) -> tuple[Tensor, Tensor, Tensor]:
    """After two steps: extra weights, explicit per-sample gradients, the step really taken."""
    reducer = primum.attach(head, optimizer, recipe=recipe)
    for number in range(2):
        inputs, labels = batch(number, 24)
        optimizer.zero_grad()
        F.cross_entropy(head(inputs), labels).backward()
        optimizer.step()
        stir(optimizer)
    inputs, labels = batch(2, 24)
    optimizer.zero_grad()
    losses = F.cross_entropy(head(inputs), labels, reduction="none") / 24
    losses.sum().backward(retain_graph=True)
    weights = report_of(reducer).extra_weights
    assert weights.max() > 0.01
    reducer.remove()
    rows = []
    for loss in losses:
        of_weight, of_bias = torch.autograd.grad(loss, [head.weight, head.bias], retain_graph=True)
        rows.append(torch.cat((of_weight, of_bias.unsqueeze(1)), 1))
    optimizer.zero_grad()
    losses.sum().backward()
    before = torch.cat((head.weight, head.bias.unsqueeze(1)), 1).detach()
    optimizer.step()
    moved = torch.cat((head.weight, head.bias.unsqueeze(1)), 1).detach() - before
    return weights, torch.stack(rows), moved


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_one_lr_the_gain_is_one_number(nesterov: bool) -> None:
    head, optimizer = no_decay(nesterov=nesterov)
    recipe = Kept(PRECISE)
    weights, rows, moved = one_step(head, optimizer, recipe)
    found = recipe.problems[-1].gram
    assert isinstance(found, Dense)  # factorised: two small products
    gain = 1.9 if nesterov else 1.0
    step = moved / 0.1
    gram = gain * rows.flatten(1) @ rows.flatten(1).t()
    torch.testing.assert_close(found.matrix, gram, rtol=1e-9, atol=1e-12)
    reach = 0.2 * step.norm() / gain**0.5
    expected = solve(Problem.dense(gram, rows.flatten(1) @ step.flatten(), reach), 40)
    torch.testing.assert_close(weights, expected.extra_weights, rtol=1e-6, atol=1e-9)


def test_the_papers_recipe_takes_its_branch_for_sgd() -> None:
    """Eq. 10: one matrix, where the branch for AdamW has two."""
    head, optimizer = no_decay()
    recipe = Kept(Paper())
    weights, rows, moved = one_step(head, optimizer, recipe)
    problem = recipe.problems[-1]
    assert isinstance(problem.gram, MatrixFree)
    assert problem.gram.gain == 1.0
    first, second = gram_matrices(problem.gram, 1)
    assert first is second
    step, flat = moved / 0.1, rows.flatten(1)
    gram = flat @ flat.t()
    torch.testing.assert_close(first, gram, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(problem.drift, flat @ step.flatten(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(problem.step_norm, step.norm())
    oracle = Paper()
    for earlier in recipe.problems[:-1]:  # its guards remember
        oracle(earlier)
    literal = oracle.solve(gram, gram, flat @ step.flatten(), step.square().sum(), 0.1)
    torch.testing.assert_close(weights, literal.extra_weights, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "recipe", [PRECISE, Paper(PaperSettings(gain_rank=4))], ids=["ours", "paper"]
)
@pytest.mark.parametrize("bias_lr", [0.02, 0.5])
def test_with_two_rates_everything_is_exact(bias_lr: float, recipe: Any) -> None:
    head, optimizer = no_decay(bias_lr)
    kept = Kept(recipe)
    weights, rows, moved = one_step(head, optimizer, kept)
    problem = kept.problems[-1]
    largest = max(bias_lr, 0.1)
    gain = torch.full((1, 7), 0.1 / largest, dtype=torch.float64)
    gain[0, -1] = bias_lr / largest
    step, flat = moved / largest, rows.flatten(1)
    gram, drift = (rows * gain).flatten(1) @ flat.t(), flat @ step.flatten()
    assert float(problem.lr) == pytest.approx(largest)
    torch.testing.assert_close(problem.drift, drift, rtol=1e-9, atol=1e-12)
    if recipe is PRECISE:
        assert isinstance(problem.gram, Dense)
        torch.testing.assert_close(problem.gram.matrix, gram, rtol=1e-9, atol=1e-12)
        reach = 0.2 * (step / gain.sqrt()).norm()
        expected = solve(Problem.dense(gram, drift, reach), 40).extra_weights
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-9)
    else:
        assert list(problem.gram.gain.shape) == [1, 7]
        torch.testing.assert_close(problem.gram.gain, gain)
        torch.testing.assert_close(problem.step_norm, step.norm())
        first, second = gram_matrices(problem.gram, 4)
        torch.testing.assert_close(first, gram, rtol=1e-6, atol=1e-9)
        squared = (rows * gain).flatten(1)
        torch.testing.assert_close(second, squared @ squared.t(), rtol=1e-6, atol=1e-9)
