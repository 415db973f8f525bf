"""`primum reproduce`: the paper's tables and figures, its values beside ours.

findings.py     one claim of the paper, what was found here, and whether they agree
accuracy.py     Tables 1, 2 and 5 as data: settings and the paper's values
scales.py       the same settings, smaller: an hour or two on two cores, or a minute
training.py     runs of those, and what they say
layers.py       Figure 1: how well the last layer stands for the network
blocks.py       Figure 11: explicit gradients of more and more blocks
scripts.py      Figure 2, Tables 3 and 4, by the scripts in `benchmarks`
experiments.py  all of them by name
cli.py          the command
"""
