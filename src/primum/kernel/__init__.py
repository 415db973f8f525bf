"""One optimizer step as a convex problem: readable alone, and imports nothing else of primum.

engine.py      one backward pass, the only control flow, and the seams that features plug into
batch.py       what a pass delivers at the head, by samples or tokens
head.py        the layer and the optimizers that step it
optimizers/    which step an optimizer is about to take: formulas, or a dry run of a copy
builder.py     from a batch to the problem of its step
gram.py        the Gram operator of the samples' gradients, and its cost
problem.py     the convex problem, its solution and certificate
solver.py      the solver
recipe.py      from the problem of a step to extra weights: `Primum`, and what any recipe offers
report.py      what one step did
scalars.py     numbers that the host may have, or the device alone
"""
