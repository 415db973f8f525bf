"""Slow and literal: what the fast code is compared with. All in float64.

One row of G is the gradient of one sample's share of the loss, `L_i / B`, with respect to the head:
its weight, and its bias as one more column.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from primum.kernel.gram import Gram, MatrixFree
from primum.kernel.optimizers.predict import Update
from primum.kernel.problem import Solution, StepProblem
from primum.kernel.recipe import Recipe

Loss = Callable[[Tensor, Tensor], Tensor]  # outputs and targets of one sample to a number


def per_sample_gradients(head: nn.Linear, inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """G by automatic differentiation, one sample at a time. -> [B, d_out, d].

    Shapes: inputs [B, d_in] or [B, T, d_in]; targets, one entry of `loss` per sample, [B, ...].
    """
    params = {name: p.detach() for name, p in head.named_parameters()}

    def share(params: dict[str, Tensor], one_input: Tensor, one_target: Tensor) -> Tensor:
        output = torch.func.functional_call(head, params, (one_input,))
        return loss(output, one_target) / len(inputs)

    grads = torch.func.vmap(torch.func.grad(share), in_dims=(None, 0, 0))(params, inputs, targets)
    if "bias" not in grads:
        return grads["weight"]
    return torch.cat((grads["weight"], grads["bias"].unsqueeze(2)), 2)


def captured_head(head: nn.Linear, inputs: Tensor, targets: Tensor, loss: Loss) -> MatrixFree:
    """What a hook on the head's output sees, gain 1: one backward pass of the batch's mean loss."""
    outputs = head(inputs)
    total = torch.stack([loss(*pair) for pair in zip(outputs, targets, strict=True)]).mean()
    (output_gradients,) = torch.autograd.grad(total, outputs)
    features = inputs if head.bias is None else nn.functional.pad(inputs, (0, 1), value=1.0)
    return MatrixFree(features, output_gradients, 1.0)


def gradients_of(head: MatrixFree) -> Tensor:
    """G from the captured factors: an outer product, summed over positions. -> [B, d_out, d]."""
    x, g = head.features.double(), head.output_gradients.double()
    if x.dim() == 2:
        x, g = x.unsqueeze(1), g.unsqueeze(1)
    return torch.einsum("bto,btd->bod", g, x)


def ask(recipe: Recipe, gram: Gram, update: Update, drift: Tensor) -> Solution:
    """A recipe's answer, given the update itself."""
    return recipe(StepProblem(gram, drift, update.norm(recipe.metric), update.lr))


def gram_of(gradients: Tensor, gain: Tensor | float) -> Tensor:
    """`G diag(gain) G^T`. [B, d_out, d] -> [B, B]."""
    gradients = gradients.double()
    return (gradients * gain).flatten(1) @ gradients.flatten(1).t()


@dataclass(frozen=True)
class Literal:
    """The problem of `problem.py` as its text has it. gram [B, B], drift [B]."""

    gram: Tensor
    drift: Tensor
    reach: float
    most: float = 2.0

    @classmethod
    def of(
        cls, head: MatrixFree, drift: Tensor, reach: Tensor | float, most: float = 2.0
    ) -> Literal:
        gain = head.gain.double() if isinstance(head.gain, Tensor) else head.gain
        return cls(gram_of(gradients_of(head), gain), drift.double(), float(reach), most)

    @property
    def harm(self) -> float:
        return float(self.drift.clamp_min(0).sum())

    def after(self, weights: Tensor) -> Tensor:
        return self.drift - self.gram @ weights.double()

    def length(self, vector: Tensor) -> float:
        """`sqrt(v' gram v)`."""
        return float((vector.double() @ self.gram @ vector.double()).clamp_min(0).sqrt())

    def objective(self, weights: Tensor) -> float:
        harm = float(self.after(weights).clamp_min(0).sum())
        return harm + self.length(weights) ** 2 / (2 * self.most)

    def dual(self, gamma: Tensor) -> float:
        """No feasible point has a smaller objective, for any gamma in the unit cube."""
        n = self.length(gamma)
        if self.most * n <= self.reach:
            phi = self.most * n**2 / 2
        else:
            phi = self.reach * n - self.reach**2 / (2 * self.most)
        return float(self.drift @ gamma.double()) - phi

    def rounding(self, weights: Tensor, eps: float, terms: int) -> float:
        """How far sums of `terms` rounded terms may be from exact, for the objective at `weights`.

        Entry i of `gram @ w` is a sum in which terms as large as `|G_i| |G_j| w_j` may cancel, and
        so is the length of the displacement.
        """
        norms = self.gram.diagonal().sqrt()
        longest = norms @ weights.double()
        largest = self.drift.abs().sum() + norms.sum() * longest + longest**2 / (2 * self.most)
        return float(eps * terms * largest)


@dataclass(frozen=True)
class Optimum:
    """Two points of an interior-point solver, made feasible, so that the optimum lies between."""

    weights: Tensor
    upper: float
    lower: float


def clarabel(problem: Literal) -> Optimum:
    """The primal problem, by Clarabel, in units in which its data are of order one.

    With `gram = R R'`, the displacement `R' w / reach` is a variable of its own; the multiplier of
    the harm gives the lower bound. Raises `cvxpy.SolverError` where Clarabel gives up.
    """
    import cvxpy as cp  # seconds to import, and few tests need it

    size, harm, reach = len(problem.drift), problem.harm, problem.reach
    nothing = torch.zeros(size, dtype=torch.float64)
    if harm == 0 or reach == 0:
        return Optimum(nothing, harm, harm)
    # Gradients are scaled to length 1 (or 0): the smallest keep their digits beside the largest.
    norms = problem.gram.diagonal().sqrt().numpy()
    live = norms > 0
    norms = np.where(live, norms, 1.0)
    values, vectors = np.linalg.eigh(problem.gram.numpy() / norms / norms[:, None])
    keep = values > 1e-15 * values[-1]
    rows = vectors[:, keep] * np.sqrt(values[keep]) * live[:, None]

    scaled = cp.Variable(size, nonneg=True)  # w * norms / reach
    moved = cp.Variable(rows.shape[1])
    left = cp.Variable(size, nonneg=True)
    # Row i in units of its own drift, if that may be the larger one, else of the batch's harm.
    unit = np.maximum(harm, reach * norms)
    change = reach * norms[:, None] * rows
    harmed = cp.multiply(harm / unit, left) >= (problem.drift.numpy() - change @ moved) / unit
    goal = cp.sum(left) + cp.sum_squares(moved) * (reach**2 / (2 * problem.most * harm))
    task = cp.Problem(cp.Minimize(goal), [moved == rows.T @ scaled, cp.norm(moved) <= 1, harmed])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "may be inaccurate": the bounds tell
        tight = {"tol_gap_abs": 1e-10, "tol_gap_rel": 1e-10, "tol_feas": 1e-10}
        task.solve(solver=cp.CLARABEL, **tight)
    weights = torch.tensor(np.maximum(scaled.value, 0) * reach / norms)
    length = problem.length(weights)
    weights = weights * min(1.0, reach / length if length > 0 else 1.0)
    gamma = torch.tensor(harmed.dual_value * harm / unit).clamp(0, 1)
    lower = max(problem.dual(gamma), problem.dual(nothing))
    upper = min(problem.objective(weights), problem.objective(nothing))
    return Optimum(weights, upper, lower)
