"""What watches a run: measurements for the kernel, and what a user is warned about once.

steps.py            steps of optimizers: counted, and compared with the passes through the head
gradient_scale.py   what the loop does to gradients before the step: loss scaling, clipping
watchers.py         values that are not finite, discarded gradients, several calls, time
effect.py           whether the weights have any effect in the first hundred steps
summary.py          a few lines on all of that
"""
