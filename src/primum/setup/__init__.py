"""What `attach` asks before anything runs, and once in the first pass.

find.py          which layer is the head
validate.py      models, optimizers and layers that no step can be predicted for
bypass.py        losses that use the head's weight and never call the head
output_check.py  in the first training pass: do rows of the output belong to rows of the head's?
"""
