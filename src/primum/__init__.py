"""primum: limit how much an optimizer step raises the loss of samples in its own batch.

    import primum
    primum.attach(model, optimizer)      # the one added line

The rooms of the package; `api.py` is the only place that wires parts together:

    kernel/         one step as a convex problem: engine, head, prediction, Gram operator, solver
    hooks/          how gradients get in and out: head hook, compiled graphs, explicit form
    setup/          which layer is the head, what is refused, whether its rows are samples
    tokens/         samples or tokens; many tokens with a large vocabulary
    distributed/    several processes: DistributedDataParallel, fully_shard
    guards/         what watches a run: steps, clipping, discarded gradients, effect, summary
    paper/          the paper's method as written
    diagnostics/    interference in whole networks; whether primum is likely to help
    integrations/   Lightning, Transformers, loggers
"""

from primum.api import attach, detach, diagnose, observe
from primum.kernel.problem import Problem, Solution, StepProblem
from primum.kernel.recipe import Primum, Recipe
from primum.kernel.report import StepReport
from primum.kernel.solver import solve
from primum.reducer import Reducer

__version__ = "0.1.0"
__all__ = [
    "Primum",
    "Problem",
    "Recipe",
    "Reducer",
    "Solution",
    "StepProblem",
    "StepReport",
    "attach",
    "detach",
    "diagnose",
    "observe",
    "solve",
]
