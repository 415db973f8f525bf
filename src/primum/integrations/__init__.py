"""Thin, optional integrations with training frameworks, never imported by the core.

    attachment.py    a Reducer that is created when training starts, with its state
    lightning.py     a Callback for PyTorch Lightning
    transformers.py  a TrainerCallback for the Hugging Face Trainer
    keep_head.py     detects trainer losses that bypass the head; advice on settings
    logging.py       log metrics to TensorBoard, W&B, MLflow or any `log(dict)`

Each file only needs its own framework. Accelerate and Fabric need none of them: `primum.attach`
unwraps their models and optimizers.
"""

from primum.integrations.logging import log_to

__all__ = ["log_to"]
