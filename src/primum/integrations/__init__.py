"""primum inside training frameworks: thin, optional, never imported by the core.

    attachment.py    a Reducer that is made late, and whose state may come before it
    lightning.py     a Callback for PyTorch Lightning
    transformers.py  a TrainerCallback for the Hugging Face Trainer
    logging.py       metrics of the steps to TensorBoard, W&B, MLflow or any `log(dict)`

Each needs its framework alone. Accelerate needs nothing of this: `primum.attach` looks through its
wrappers.
"""

from primum.integrations.logging import log_to

__all__ = ["log_to"]
