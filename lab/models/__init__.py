"""Models that end in one linear layer, the head: image classifiers and language models.

digits.py     the demo's two models, for one-channel images of 8 x 8 pixels
small.py      a group-norm CNN for studies on a CPU
whitened.py   a compact CNN for speedruns on CIFAR-10
resnet.py     ResNet-20 and ResNet-44 for CIFAR, ResNet-50
vit.py        vision transformers for small images
convnext.py   ConvNeXt-T
registry.py   image classifiers by name, or a user's own by import path
gpt.py        a small GPT
language.py   language models by name, or a user's own by import path
"""

from lab.models.digits import GroupNormCNN, PatchTransformer
from lab.models.gpt import GPT
from lab.models.language import LANGUAGE_MODELS, build_language_model
from lab.models.registry import MODELS, ModelError, build_model, find_model

__all__ = [
    "GPT",
    "LANGUAGE_MODELS",
    "MODELS",
    "GroupNormCNN",
    "ModelError",
    "PatchTransformer",
    "build_language_model",
    "build_model",
    "find_model",
]
