"""Tests of `primum.integrations`. What every framework must reproduce is in `plain.py`."""

import os

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when mlflow is imported
os.environ["WANDB_ERROR_REPORTING"] = "false"
