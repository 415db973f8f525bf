"""Runs, arms and sweeps: `primum compare` and `primum reproduce`.

settings.py    everything a run depends on, and its key
arms.py        ways of taking steps, by name
weightings.py  the recipes of the controls
method.py      from an arm to loss, reducer and radius
build.py       optimizer, schedule, precision
stopwatch.py   time of the steps alone
training.py    one run, step by step, to be put aside and taken up
ranks.py       one run over several processes
store.py       runs and checkpoints on disk, whole or not at all
job.py         one run from start, or checkpoint, to its file
plan.py        which runs, in which order, and what matched ones take over
check.py       what some run would end on, said before the first
sweep.py       all of them, several at a time (progress.py: what is told meanwhile)
summary.py     last epochs and tests against base (table.py: as text)
options.py     settings on the command line
compare.py     `primum compare` (command.py: what it shares with reproduce)
"""
