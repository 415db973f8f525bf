"""What `attach` is given, and what no step could be predicted for: refused in words, by name.

Classes of other packages are known by their names: importing them to compare would take long, and
they may not be installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.hooks.private import fsdp_modules, is_sharded
from primum.kernel.optimizers.predict import check_supported, predict
from primum.setup.find import is_affine, kind_of

INSTEAD = "use fully_shard (FSDP2), or DistributedDataParallel with a plain optimizer"
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
ZERO = "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer"
DEEPSPEED = (
    "DeepSpeed's ZeRO and 16-bit optimizers are not supported: they update flattened copies of the "
    f"parameters; {INSTEAD}. ZeRO stage 0 in float32 works, attached after deepspeed.initialize: "
    'attach(engine, optimizer, scope="global")'
)
PRIVACY = (
    "differential privacy (Opacus) is not supported: a sample's weight depends on the other "
    "samples, so its clipped gradient would, too, and the promised privacy would not hold"
)
# Whose optimizers hold a torch optimizer and add nothing to its step.
UNWRAPPED = ("accelerate.", "lightning.", "pytorch_lightning.", "lightning_fabric.")


def check_model(model: nn.Module) -> None:
    """Refuse wrappers that split the head, and models whose gradients must stay independent."""
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise ValueError(
            f"nn.DataParallel trains copies of the head, one on each of {model.device_ids}, which "
            "primum does not support; use DistributedDataParallel"
        )
    for module in model.modules():
        if _is_of(module, FSDP1):
            raise ValueError(
                "FullyShardedDataParallel (FSDP1) is not supported: it trains flattened pieces of "
                f"parameters, not the head's weight; {INSTEAD}"
            )
        asked = ("zero_optimization_stage", "bfloat16_enabled", "fp16_enabled")
        if _is_of(module, "deepspeed.runtime.") and any(getattr(module, each)() for each in asked):
            raise ValueError(DEEPSPEED)
        if _is_of(module, "opacus.") or any(map(is_private, module.parameters(recurse=False))):
            raise ValueError(PRIVACY)


def is_private(param: object) -> bool:
    """Whether Opacus takes the gradients of single samples of a parameter."""
    return hasattr(param, "grad_sample")


def check_head(layer: nn.Linear, name: str, *, split: bool = False) -> None:
    """Raise, in words a user can act on, where the layer cannot serve as head.

    `split`: the head is one that `fully_shard` has split, and that is supported.
    """
    weight: Any = layer.weight
    flattened = hasattr(weight, "__tensor_flatten__") and not split
    if hasattr(weight, "ds_id"):
        why = f"partitioned by DeepSpeed's ZeRO stage 3 (deepspeed.zero.Init). {DEEPSPEED}"
    elif not isinstance(weight, nn.Parameter):
        why = (
            "computed from other parameters (weight norm, a parametrization), so no optimizer "
            "holds it, and its step cannot be predicted; use a plain nn.Linear"
        )
    elif isinstance(weight, nn.parameter.UninitializedParameter) or weight.is_meta:
        why = "not initialized yet (a lazy layer, the meta device); attach after initializing it"
    elif (
        flattened or weight.dim() != 2 or len(weight) != getattr(layer, "out_features", len(weight))
    ):
        why = (
            f"a {type(weight).__name__} of shape {list(weight.shape)}, not a plain matrix: it was "
            "flattened by sharding, or quantized. primum needs the whole weight, or whole rows of "
            f"it, on every rank; {INSTEAD}"
        )
    elif not split and is_affine(layer) is False:
        why = (
            f"of a {kind_of(layer)} whose output is not weight @ input + bias (a normalised, "
            "scaled or reshaped head), so its gradients are not those of a linear layer; use a "
            "plain nn.Linear"
        )
    elif not weight.requires_grad:
        why = (
            "frozen (requires_grad=False), so no step changes it; unfreeze it (with PEFT: list the "
            "head in modules_to_save) or pass head= a layer that is trained"
        )
    else:
        return
    raise ValueError(f"{name}.weight is {why}")


def optimizers_in(given: Any) -> Iterator[Optimizer]:
    """All torch optimizers in what the user passed; of a wrapper, the one inside."""
    inner: Any = getattr(given, "optimizer", None)
    if _is_of(given, "fastai."):
        inner = getattr(given, "opt", None)
        inner = inner if isinstance(inner, Optimizer) else None
    if _is_of(given, "opacus."):
        raise TypeError(f"{kind_of(given)}: {PRIVACY}")
    if _is_of(given, "deepspeed.runtime.") and not isinstance(given, nn.Module):
        raise TypeError(f"{kind_of(given)}: {DEEPSPEED}")
    adds = isinstance(given, Optimizer) and not any(_is_of(given, each) for each in UNWRAPPED)
    if adds or (isinstance(given, Optimizer) and inner is None):
        held = [each for each in vars(given).values() if isinstance(each, Optimizer)]
        if held and not _is_of(given, ZERO):
            raise TypeError(
                f"{kind_of(given)} wraps another optimizer, and what it adds to a step of that one "
                "cannot be predicted; train with an optimizer of torch.optim itself"
            )
        yield given
    elif inner is not None:
        yield from optimizers_in(inner)
    elif isinstance(given, Iterable) and not isinstance(given, str | Tensor | nn.Module):
        for each in given.values() if isinstance(given, Mapping) else given:
            yield from optimizers_in(each)
    else:
        fastai = "; with fastai: opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)"
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer, an iterable of them, or a wrapper with an "
            f".optimizer attribute; got {kind_of(given)}. Train with an optimizer of torch.optim"
            f"{fastai * _is_of(given, 'fastai.')}"
        )


def optimizers_of(optimizers: list[Optimizer], layer: nn.Linear, name: str) -> dict[str, Optimizer]:
    """The optimizers of the layer's "weight" and, if one holds it, "bias"; refuses unfit ones."""
    found: dict[str, Optimizer] = {}
    for part in ("weight", "bias"):
        param: Tensor | None = getattr(layer, part, None)
        for each in optimizers if param is not None and param.requires_grad else ():
            if any(held is param for group in each.param_groups for held in group["params"]):
                found.setdefault(part, each)  # a bias that none holds is a constant
    if "weight" not in found:
        late = "; create it after fully_shard" * is_sharded(layer.weight)
        raise ValueError(
            f"the optimizer does not hold {name}.weight; pass the optimizer that trains it{late}"
            + f". {DEEPSPEED}" * ("deepspeed" in sys.modules)
        )
    for part, each in found.items():
        if _is_of(each, ZERO):
            raise TypeError(
                f"ZeroRedundancyOptimizer is not supported for {name}: only one rank holds its "
                f"state and can predict its step; {INSTEAD}, or give the head a plain optimizer of "
                "its own and pass that to attach"
            )
        check_supported(each, getattr(layer, part), f"{name}.{part}")
        check_order(each, getattr(layer, part))
    return found


def check_order(optimizer: Optimizer, param: Tensor) -> None:
    """Refuse an optimizer whose step differentiates the gradient: a predicted one has no graph."""
    second = bool(getattr(optimizer, "is_second_order", False))  # timm's mark
    if not second and not type(optimizer).__module__.startswith("torch.optim"):
        try:
            predict(optimizer, param, torch.ones_like(param, dtype=torch.float32))
        except RuntimeError as error:  # any other may be gone by the first step
            signs = ("create_graph", "grad_fn", "does not require grad")
            second = any(sign in str(error) for sign in signs)
        except Exception:
            return
    if second:
        raise TypeError(
            f"{type(optimizer).__name__} is not supported: its step differentiates the gradient "
            "(backward(create_graph=True)), so it cannot be predicted; use SGD or AdamW"
        )


def grad_scaler(given: Any) -> Any:
    """The scaler, also if the loop's own class holds it, as timm's NativeScaler does.

    None for one that is disabled: it skips no step, so one that is not finite is a fallback.
    """
    if not callable(getattr(given, "scale", None)):
        values = getattr(given, "__dict__", {}).values()
        held = [v for v in values if isinstance(v, torch.amp.GradScaler)]
        given = held[0] if len(held) == 1 else given
    enabled = getattr(given, "is_enabled", None)
    return None if callable(enabled) and not enabled() else given


def why_lost(model: nn.Module | None) -> str:
    """Why an optimizer no longer holds the head's weight, and the way out; ends a message."""
    if model is not None and any(True for _ in fsdp_modules(model)):
        return ": fully_shard was called after attach; attach after fully_shard"
    if "deepspeed" in sys.modules:
        return f": {DEEPSPEED}"
    return "; call .remove() and attach again with the one that trains it"


def _is_of(thing: object, name: str) -> bool:
    """Whether its class or one above has this full name, or one that starts so ("package.")."""
    names = (f"{each.__module__}.{each.__qualname__}" for each in type(thing).__mro__)
    return any(each.startswith(name) if name.endswith(".") else each == name for each in names)
