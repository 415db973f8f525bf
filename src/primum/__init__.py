"""primum: every training sample counts.

    import primum
    primum.attach(model, optimizer)      # the one added line

The map of the package; data flows down the numbers, imports never point up:

    attach.py       the one line: make a Reducer
    find.py         which layer is the head (widths.py: what modules take and give)
    reducer.py      what a user holds: hooks, the explicit form
    weigher.py      one backward pass: gradients in, weighted gradients out
    watch.py        notices training that goes past us
    trouble.py      steps that stayed plain (mailbox.py: device numbers, read without waiting)
    capture.py   1  the head's input and the gradient at its output
    rescale.py   2  what the loop does to gradients before the step: loss scaling, clipping
    update.py       the step the optimizer is about to take, and its gain
                    (rules.py: the formulas; dryrun.py: for optimizers without one)
    gram.py      3  the Gram operator of the samples' gradients
    problem.py   4  the convex problem and its certificate
    solve.py     5  the solver
    recipe.py       3 to 5 in one call; `primum.paper` is another recipe
    weigh.py        2 to 5 in one call; large heads in parts
    distributed.py  the same over several ranks (ranks.py: the process group)
    report.py    6  what one step did
"""

from primum.attach import attach, observe
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
    "observe",
    "solve",
]
