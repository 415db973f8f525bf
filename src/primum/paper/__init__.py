"""The paper's method as written, one small file per algorithm.

    literal.py         the whole recipe with its settings: Eq. 10 and Eq. 14
    guards.py          Alg. 2 (spikes) and Alg. 4 (conditioning)
    spectrum.py        Alg. 3 (Lanczos)
    projection.py      Alg. 5
    chambolle_pock.py  Alg. 6 (warm start) and Alg. 7
    low_rank.py        App. B: Gram matrices, rank-r gain
    multilayer.py      App. H: several last blocks, Alg. 8
    exact.py           exact solutions of Eq. 3 and Eq. 5, for small models (needs cvxpy)

`docs/paper.md` maps every equation to its function and its test, and lists the errata.
"""

from primum.paper.literal import Paper, PaperSettings

__all__ = ["Paper", "PaperSettings"]
