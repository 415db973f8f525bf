"""`primum inspect`: the diagnostics on the experiment models and data, from the command line.

settings.py     what to train and when to look
checkpoint.py   models from files
moment.py       one look at a model about to take a step
protected.py    the samples with most extra weight
watched.py      training, step by step
session.py      train and look
command.py      from arguments to files
"""

from primum.experiments.inspection.moment import Moment
from primum.experiments.inspection.session import Inspection
from primum.experiments.inspection.settings import InspectError, InspectSettings

__all__ = ["InspectError", "InspectSettings", "Inspection", "Moment"]
