"""What `attach` is given: the optimizers in it, and what no step could be predicted for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.refused import check_optimizer, check_weight, is_zero
from primum.update import predict


def is_affine(head: nn.Linear) -> bool:
    """Whether a subclass with a `forward` of its own computes what nn.Linear does."""
    if type(head).forward is nn.Linear.forward:
        return True
    devices = [head.weight.device] if head.weight.is_cuda else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        row = torch.linspace(-1, 1, head.in_features).to(head.weight)
        for rows in (row.unsqueeze(0), torch.stack((row, -row)).unsqueeze(0)):
            try:
                found: Any = type(head).forward(head, rows)
            except Exception:
                continue  # it wants a sequence, or other arguments: then not to be judged here
            expected = nn.functional.linear(rows, head.weight, head.bias)
            if not isinstance(found, Tensor) or found.shape != expected.shape:
                return not isinstance(found, Tensor)
            return torch.allclose(found.to(expected), expected, 0.05, 0.05)  # SYNC: at attach
    return True


def check_head(model: nn.Module, head: nn.Linear, name: str, *, split: bool = False) -> None:
    """Raise, in words a user can act on, where the layer cannot serve as head.

    `split`: the head is one that `fully_shard` has split, and that is supported.
    """
    weight: Tensor = head.weight
    check_weight(weight, name)
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise ValueError(
            f"nn.DataParallel trains copies of {name}, one on each of {model.device_ids}, which "
            "primum does not support; use DistributedDataParallel"
        )
    if not isinstance(weight, nn.Parameter):
        raise ValueError(
            f"{name}.weight is computed from other parameters (weight norm, a parametrization), so "
            "no optimizer holds it and its step cannot be predicted; remove that, or pass head= "
            "the trained nn.Linear that makes the output"
        )
    if isinstance(weight, nn.parameter.UninitializedParameter) or weight.is_meta:
        raise ValueError(
            f"{name}.weight is not initialized yet (a lazy layer, the meta device); attach after "
            "initializing it"
        )
    shape = (head.out_features, head.in_features)
    if (hasattr(weight, "__tensor_flatten__") and not split) or weight.shape != shape:
        raise ValueError(
            f"{name}.weight is a {type(weight).__name__} of shape {list(weight.shape)}, not a "
            f"plain tensor of shape {list(shape)}: it was flattened by sharding, or quantized. "
            "primum needs the whole weight, or whole rows of it, on every rank: use "
            "DistributedDataParallel or fully_shard (FSDP2)"
        )
    if not split and not is_affine(head):
        raise ValueError(
            f"{name} is a {type(head).__name__} whose output is not weight @ input + bias (a "
            "normalised, scaled or reshaped head), so its gradients are not those of a linear "
            "layer; make the output with a plain nn.Linear, or pass that as head="
        )
    if not weight.requires_grad:
        raise ValueError(
            f"{name}.weight is frozen (requires_grad=False), so no step changes it: "
            "unfreeze it, or pass head= the trained nn.Linear that makes the output (with PEFT: "
            "list the head in modules_to_save)"
        )


def optimizers_in(given: Optimizer | Iterable[Optimizer] | Any) -> Iterator[Optimizer]:
    """All torch optimizers in what the user passed; of a wrapper, the one inside."""
    check_optimizer(given)
    inner = getattr(given, "optimizer", None)
    if isinstance(given, Optimizer) and not isinstance(inner, Optimizer):
        held = [k for k, v in vars(given).items() if isinstance(v, Optimizer) and v is not given]
        if held and not is_zero(given):
            # timm's Lookahead, SAM: what they add to a step of the one inside is unknown
            kind = type(given).__name__
            raise TypeError(
                f"{kind} wraps another optimizer; pass the inner one: optimizer.{held[0]}"
            )
        yield given
    elif inner is not None:
        yield from optimizers_in(inner)
    elif isinstance(given, Iterable) and not isinstance(given, str | Tensor | nn.Module):
        for each in given.values() if isinstance(given, Mapping) else given:
            yield from optimizers_in(each)
    else:
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer, an iterable of them, or a wrapper with an "
            f".optimizer attribute; got {type(given).__name__}"
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


def owner_of(optimizers: list[Optimizer], param: Tensor | None) -> Optimizer | None:
    """The optimizer that holds `param`; None if none does."""
    for optimizer in optimizers:
        if any(held is param for group in optimizer.param_groups for held in group["params"]):
            return optimizer
    return None
