"""Detect trainers whose loss is fused with the head, and advise which setting to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from primum.setup.bypass import fusing_package, package_of


def way_out(package: str, args: Any, trainer: Any = None) -> str:
    """Advice for a warning: what to set so that weights are applied; "" if the head is called.

    Args:
        package: The result of `fusing_package`.
        args: The Trainer's `TrainingArguments`, of TRL or Transformers.
        trainer: The Trainer, if known.
    """
    if package == "liger_kernel":
        return (
            "The cause is use_liger_kernel=True. To make the loss call the head, set "
            'liger_kernel_config={"fused_linear_cross_entropy": False}'
        )
    own_loss = trainer is not None and (
        getattr(trainer, "compute_loss_func", None) is not None
        or package_of(type(trainer).compute_loss) != "trl"
    )
    if own_loss or getattr(args, "label_smoothing_factor", 0) > 0:
        return ""
    if getattr(args, "loss_type", None) == "chunked_nll":
        return (
            'The cause is loss_type="chunked_nll". To make the loss call the head, set '
            'loss_type="nll"'
        )
    if type(args).__name__ == "SFTConfig":
        return (
            "SFTTrainer always does this. To make the loss call the head, override compute_loss "
            "with that of transformers.Trainer or pass compute_loss_func="
        )
    return "This trainer has no setting that makes it call the head"


def when_fused(model: nn.Module, then: Callable[[], None]) -> None:
    """Call `then` if TRL's forward bypasses the head in the first training pass.

    For an unknown Trainer: the arguments it passes to the model show whether its loss is fused.
    """
    for module in model.modules():
        if hasattr(module, "get_output_embeddings") and fusing_package(module) == "trl":
            _Once(module, then)
            return


class _Once:
    """A hook on a module that removes itself in the first training pass."""

    def __init__(self, module: nn.Module, then: Callable[[], None]) -> None:
        self._then = then
        self._handle = module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training:
            self._handle.remove()
            if kwargs.get("fused_lm_head"):
                self._then()
