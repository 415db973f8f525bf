"""Which step an optimizer is about to take, and with which gain.

predict.py    the step of a parameter, or of a head's weight and bias side by side
rules.py      the formulas of torch.optim
dry_run.py    any other class, seen on a throw-away copy
"""
