"""primum inside training frameworks: thin, optional, never imported by the core.

    attachment.py    a Reducer that is made late, and whose state may come before it
    lightning.py     a Callback for PyTorch Lightning
    transformers.py  a TrainerCallback for the Hugging Face Trainer
    logging.py       figures of the steps into TensorBoard or any `log(dict)`

Each needs its framework alone. Accelerate needs nothing of this: `primum.attach` looks through its
wrappers.
"""
