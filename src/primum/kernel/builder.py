"""From what arrived at the head to the problem of the coming step.

inputs, output gradients -> batch gradient -> predicted step -> Gram operator, drift, norm
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from primum.kernel.batch import HeadBatch
from primum.kernel.gram import (
    Dense,
    MatrixFree,
    choose_form,
    operations,
    per_sample,
    sample_blocks,
)
from primum.kernel.head import Head, Plain
from primum.kernel.optimizers.predict import Update
from primum.kernel.problem import Solution, StepProblem
from primum.kernel.recipe import Recipe
from primum.kernel.scalars import Scalar, on_host, read

LARGE = 1 << 22  # Entries of a head's weight above which nothing of its size is made: 16 MiB.


class Builder:
    """Builds the exact problem of one process; others wrap or extend it.

    Attributes:
        broken: Whether an error is the process group's own, and not to be swallowed.
    """

    broken = False

    def begin(self, peers: object) -> None:
        """A pass begins, together with the processes that its source named, if any."""

    def again(self, peers: object) -> object:
        """Of the processes named for a pass, those for a second gradient in it."""
        return None

    def agree(self, head: Head, inputs: Sequence[Tensor], vote: int) -> Sequence[int]:
        """This process's vote on what a row is -> those of all that solve together."""
        return [vote]

    def abort(self) -> None:
        """This process gives up the pass after an error: others must not wait for it."""

    def build(self, head: Head, batch: HeadBatch, recipe: Recipe) -> StepProblem:
        """The problem of the coming step, with the cheaper form of its Gram operator."""
        if len(batch.inputs) < 2:
            few = f"a batch of one {batch.per}" if len(batch.inputs) else "an empty batch"
            why = f"{few} has nothing to trade off and keeps its plain gradient"
            raise Plain(why, counted=False)
        if self._goes_in_blocks(head, batch, recipe):
            return self._in_blocks(head, batch, recipe)
        x, g = batch.features(head.trained), batch.grads()
        g_t = g.flatten(0, -2).t()
        update = head.update(g_t @ x.flatten(0, -2), batch)
        problem = whole_problem(head, batch, recipe, update, x, g, transposed=g_t)
        # Where the host knows that nobody is harmed, nothing is to be solved.
        if recipe.products == 0 or (on_host(problem.drift) and not read(problem.drift.amax()) > 0):
            return problem
        assert isinstance(problem.gram, MatrixFree)
        return replace(problem, gram=choose_form(problem.gram, recipe.products))

    def finish(self, problem: StepProblem, solution: Solution) -> tuple[StepProblem, Solution]:
        """The solution as it is reported and applied."""
        return problem, solution

    def _goes_in_blocks(self, head: Head, batch: HeadBatch, recipe: Recipe) -> bool:
        """Whether to go through a few outputs at a time: for sequences and large heads.

        Not where the matrix of a large batch would cost more than the solver's products without it.
        """
        inputs = batch.inputs.shape[-1] + ("bias" in head.trained)
        outputs, products = batch.output_grads.shape[-1], recipe.products
        if products == 0 or not head.by_rows:
            return False
        if batch.positions == 1 and inputs * outputs <= LARGE:
            return False
        dense, free = operations(
            *(len(batch.inputs), batch.positions, inputs, outputs),
            products=products,
            factorises=False,
        )
        return dense <= free

    def _in_blocks(self, head: Head, batch: HeadBatch, recipe: Recipe) -> StepProblem:
        """The same, summed over blocks of outputs, with a dense matrix. Exact for any gain.

        For each block the samples' gradients are formed; their sum is the batch's gradient, from
        which the update of these outputs is predicted; then they serve for drift and matrix. One
        product of the size of the head's own weight gradient in all, and nothing of the size of
        the head or of its output: a few percent of what training a language model holds then.
        """
        x = batch.features(head.trained)
        gram, drift = x.new_zeros(len(x), len(x)), x.new_zeros(len(x))
        square = x.new_zeros(())
        lr: Scalar = 0.0
        for rows in sample_blocks(x, batch.output_grads):
            each = per_sample(x, batch.grads(rows))
            update = head.update(each.sum(0), batch, rows)
            flat, lr = each.flatten(1), update.lr
            drift += flat @ update.step.flatten()
            square += update.norm(recipe.metric).square_()
            each *= update.gain**0.5
            gram.addmm_(flat, flat.t())
        drift = -drift if head.maximizes else drift
        return StepProblem(Dense(gram), drift, square.sqrt(), lr, per=batch.per)


def whole_problem(
    head: Head,
    batch: HeadBatch,
    recipe: Recipe,
    update: Update,
    x: Tensor,
    g: Tensor,
    *,
    transposed: Tensor | None = None,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    samples: int | None = None,
) -> StepProblem:
    """The problem of a predicted update, with a matrix-free operator.

    Shapes: x [B, d] or [B, T, d] with a column of ones for a bias, g [B, d_out] or [B, T, d_out],
    transposed [d_out, B * T]: that of g, if at hand. For the last two see `Gram`.
    """
    if head.maximizes:
        g, transposed = -g, None if transposed is None else -transposed
    gram = MatrixFree(
        x,
        g,
        update.gain,
        has_bias="bias" in head.trained,
        transposed=transposed,
        all_reduce=all_reduce,
        samples=samples,
    )
    drift, norm = gram.along(update.step), update.norm(recipe.metric)
    return StepProblem(gram, drift, norm, update.lr, per=batch.per)
