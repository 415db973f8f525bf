"""Several processes that train one model: the global batch's problem, or each one's own.

collectives.py   a process group, and what is asked of it
scope.py         which processes solve together in a forward pass: those that DDP averages over
over_ranks.py    the global problem: samples gathered, or sums of head-sized matrices
fsdp2.py         a head that `fully_shard` has split: each process predicts the rows it holds
"""
