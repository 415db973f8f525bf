"""How gradients get in and out: everything that calls the engine.

head_hook.py    the hook on the head: one call of it, and the gradient that arrives there
compiled.py     the same in graphs made by torch.compile: an operation that compilers keep
explicit.py     `loss = reducer(losses)`
unsaved.py      a forward hook that copies, pickles and scripts of a module do not have
private.py      every private name of torch that is used, with its fallback
"""
