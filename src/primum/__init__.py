"""primum: limit how much an optimizer step raises the loss of samples in its own batch.

    import primum
    primum.attach(model, optimizer)      # the one added line

The map of the package; data flows down the numbers, imports never point up:

    attach.py       the one line: make a Reducer (checks.py, refused.py: what it refuses)
    bypass.py       losses that use the head's weight and never call the head
    find.py         which layer is the head (widths.py: what modules take and give)
    output_check.py whether the head's output reaches the model's
    reducer.py      what `attach` returns; the explicit form (explicit.py: the losses it takes)
    weighing.py     one backward pass: gradients in, weighted gradients out; all state
                    (fallback.py: plain gradients after an error)
    positions.py    what is reweighted, samples or tokens: `per="auto"`
    monitor.py      notices training that bypasses the hook, discarded gradients, time spent
                    (steps.py: one hook on the steps of all optimizers;
                    effect.py: weights that have no effect)
    capture.py   1  the head's input and the gradient at its output: the hook
                    (hook.py: a hook that is not saved with the model)
    rescale.py   2  what the loop does to gradients before the step: loss scaling, clipping
    update.py       the step the optimizer is about to take, and its gain: the prediction
                    (rules.py: the formulas; dryrun.py: for optimizers without one)
    gram.py      3  the Gram operator of the samples' gradients, and its cost
                    (sketch.py: an approximate one for many tokens and large vocabularies)
    problem.py   4  the convex problem and its certificate
    solve.py     5  the solver
    recipe.py       4 and 5 in one call; `primum.paper` is another recipe
    pipeline.py     2 to 5 in pure functions: from what was captured to extra weights
    distributed.py  the same over several ranks (ranks.py: the process group; rows.py: some outputs
                    of the head on each; shards.py: a sharded head; ways.py: which way is cheaper)
    report.py    6  what one step did (summary.py: what the last steps did)
    compat.py       every private name of torch that is used, with its fallback
    warn.py         warnings that point at the user's line
"""

from primum.attach import attach, detach, observe
from primum.problem import Problem, Solution
from primum.reducer import Reducer
from primum.report import StepReport
from primum.solve import solve

__version__ = "0.1.0"
__all__ = [
    "Problem",
    "Reducer",
    "Solution",
    "StepReport",
    "attach",
    "detach",
    "observe",
    "solve",
]
