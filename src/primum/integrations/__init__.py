"""primum inside training frameworks: thin, optional, never imported by the core.

    attachment.py    a Reducer that is made late, and whose state may come before it
    lightning.py     a Callback for PyTorch Lightning
    transformers.py  a TrainerCallback for the Hugging Face Trainer
    fused_loss.py    the loss of a causal language model without all logits, in a Trainer
    keep_head.py     which trainers' losses bypass the head, and what to set
    logging.py       metrics of the steps to TensorBoard, W&B, MLflow or any `log(dict)`

Each needs its framework alone. Accelerate and Fabric need nothing of this: `primum.attach` looks
through their wrappers.
"""

from primum.integrations.logging import log_to

__all__ = ["log_to"]
