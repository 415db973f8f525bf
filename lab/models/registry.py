"""Models by name, and a user's own by import path."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn

from lab.errors import UserError
from lab.models.convnext import ConvNeXt
from lab.models.digits import GroupNormCNN, PatchTransformer
from lab.models.norms import Norm
from lab.models.resnet import CifarResNet, ResNet50
from lab.models.small import SmallCNN
from lab.models.vit import ViT
from lab.models.whitened import SMALLEST, WhitenedCNN


class ModelError(UserError):
    """A model that cannot be built. The message has a way to fix it."""


class Model(NamedTuple):
    """How to build a model from classes, image side and norm; its norms, the default first."""

    build: Callable[[int, int, Norm], nn.Module]
    norms: tuple[Norm, ...] = ()


def _cifar_resnet(blocks: int) -> Callable[[int, int, Norm], nn.Module]:
    def build(classes: int, image_size: int, norm: Norm) -> nn.Module:
        return CifarResNet(classes, blocks=blocks, norm=norm)

    return build


def _resnet50(classes: int, image_size: int, norm: Norm) -> nn.Module:
    # Tiny-ImageNet's 64 pixels keep the ImageNet stem: the paper trains it "using the same recipe".
    return ResNet50(classes, norm=norm, stem="imagenet" if image_size >= 64 else "small")


def _convnext(classes: int, image_size: int, norm: Norm) -> nn.Module:
    if image_size < 32:  # its strides would leave no pixel
        raise ValueError(f"image_size must be >= 32, got {image_size}")
    return ConvNeXt(classes)


def _whitened(classes: int, image_size: int, norm: Norm) -> nn.Module:
    if image_size < SMALLEST:
        raise ValueError(f"image_size must be >= {SMALLEST}, got {image_size}")
    return WhitenedCNN(classes)


def _digits(build: Callable[[], nn.Module]) -> Callable[[int, int, Norm], nn.Module]:
    def checked(classes: int, image_size: int, norm: Norm) -> nn.Module:
        if (classes, image_size) != (10, 8):
            raise ValueError(f"needs 10 classes and 8 pixels, got {classes} and {image_size}")
        return build()

    return checked


MODELS: dict[str, Model] = {
    # 3 convolutions, 64-wide head: CIFAR studies on a CPU.
    "cnn-small": Model(lambda classes, _, norm: SmallCNN(classes, norm=norm), ("group", "batch")),
    # Frozen whitening layer, 6 convolutions, batch norm, 64-wide head: CIFAR speedruns.
    "cnn-whitened": Model(_whitened),
    # Transformer of 4 layers, 4 heads, width 96, 16 patches: CIFAR studies on a CPU.
    "vit-micro": Model(
        lambda classes, size, _: ViT(
            classes, image_size=size, width=96, depth=4, heads=4, patches=4
        )
    ),
    # The paper's ResNet-20 for CIFAR, group norm with 8 groups.
    "resnet20": Model(_cifar_resnet(3), ("group", "batch")),
    # The paper's ResNet-44 for CIFAR, group norm with 8 groups.
    "resnet44": Model(_cifar_resnet(7), ("group", "batch")),
    # The paper's ResNet-50 for Tiny-ImageNet, batch norm or group norm.
    "resnet50": Model(_resnet50, ("batch", "group")),
    # The paper's ViT for CIFAR: 7 layers, 12 heads, width 384; ViT-small has width 192.
    "vit": Model(lambda classes, size, _: ViT(classes, image_size=size)),
    "vit-small": Model(lambda classes, size, _: ViT(classes, image_size=size, width=192)),
    # The paper's ConvNeXt-T for Tiny-ImageNet and ImageNet-100, stochastic depth 0.1.
    "convnext-t": Model(_convnext),
    # The demo's group-norm CNN and transformer for digits.
    "digits-cnn": Model(_digits(GroupNormCNN)),
    "digits-transformer": Model(_digits(PatchTransformer)),
}


def build_model(
    name: str,
    classes: int,
    image_size: int,
    *,
    norm: Norm | None = None,
    seed: int = 0,
) -> nn.Module:
    """A model by name, or `package.module:factory`, called as `factory(classes=, image_size=)`.

    Args:
        name: a key of `MODELS`, or an import path, also of modules in the working directory.
        classes: number of logits.
        image_size: side of the images.
        norm: `"group"` or `"batch"`, for models that have both; None is the model's default.
        seed: seed of the initialisation.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return find_model(name, norm)(classes, image_size)


def find_model(name: str, norm: Norm | None = None) -> Callable[[int, int], nn.Module]:
    """A function from classes and image size to a model; raises for an unknown model or norm."""
    if ":" not in name:
        return _by_name(name, norm)
    if norm is not None:
        raise ModelError(f"norm={norm!r} only works with built-in models; leave it out for {name}")
    factory = find_factory(name)
    return lambda classes, image_size: call_factory(
        factory, name, {"classes": classes, "image_size": image_size}
    )


def _by_name(name: str, norm: Norm | None) -> Callable[[int, int], nn.Module]:
    if name not in MODELS:
        raise ModelError(
            f"unknown model {name!r}; choose from {', '.join(MODELS)}, "
            "or pass your own as package.module:factory"
        )
    model = MODELS[name]
    if norm is not None and norm not in model.norms:
        have = " or ".join(model.norms) or "it without --norm"
        raise ModelError(f"{name} has no {norm!r} norm; use {have}")
    chosen = norm or (model.norms[0] if model.norms else "group")

    def build(classes: int, image_size: int) -> nn.Module:
        try:
            return model.build(classes, image_size, chosen)
        except ValueError as error:
            raise ModelError(f"{name}: {error}") from error

    return build


def call_factory(factory: Callable[..., object], path: str, sizes: Mapping[str, int]) -> nn.Module:
    """Call a user's factory with the sizes as keyword arguments; returns the model."""
    try:
        inspect.signature(factory).bind(**sizes)
    except TypeError as error:
        names = " and ".join(sizes)
        raise ModelError(f"{path} must accept the keywords {names}: {error}") from error
    try:
        model = factory(**sizes)
    except Exception as error:  # of any kind: it is the user's code
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ModelError(f"{path} failed with {given}: {_in_one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{path} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def find_factory(path: str) -> Callable[..., object]:
    """The function or class behind `package.module:factory`."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ModelError(f"an import path has the form package.module:factory, got {path!r}")
    here = str(Path.cwd())
    sys.path.insert(0, here)  # not on the path of an installed command
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ModelError(f"cannot import {module_name!r} for {path!r}: {error}") from error
    except Exception as error:  # of any kind: it is the user's code
        raise ModelError(
            f"cannot import {module_name!r} for {path!r}: {_in_one_line(error)}"
        ) from error
    finally:
        sys.path.remove(here)
    factory = getattr(module, attribute, None)
    if factory is None:
        public = ", ".join(n for n, value in vars(module).items() if callable(value))
        raise ModelError(f"{module_name} has no {attribute!r}; it has: {public or 'nothing'}")
    if not callable(factory):
        raise ModelError(f"{path} is a {type(factory).__name__}, not a function or class")
    return cast("Callable[..., object]", factory)


def _in_one_line(error: Exception) -> str:
    """Type, message and location of an error; the location is the deepest one in user code."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    if isinstance(error, SyntaxError):
        return said  # which contains the location
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if "site-packages" not in each.filename] or frames
    return f"{said} ({Path(own[-1].filename).name}, line {own[-1].lineno})"
