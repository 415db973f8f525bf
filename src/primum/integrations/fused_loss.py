"""Compute a Trainer's causal language model loss with `reducer.linear_cross_entropy`."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from primum import Reducer


class FusedLoss:
    """Replaces a Trainer's `compute_loss` during training.

    Runs the model without labels and with `logits_to_keep=1`, takes the hidden states from its
    backbone, and computes the next-token loss from them and the head's weight, in blocks.
    Evaluation, and calls that also request outputs, use the Trainer's own method.

    Args:
        trainer: A `transformers.Trainer` of a causal language model, or TRL's `SFTTrainer`.
        reducer: Returns the Reducer, or None if none is attached.
    """

    def __init__(self, trainer: Trainer, reducer: Callable[[], Reducer | None]) -> None:
        refused = _refused(trainer)
        if refused:
            raise ValueError(f"fused_loss=True cannot replace {refused}")
        self._trainer = weakref.ref(trainer)
        self._own = type(trainer).compute_loss
        self._reducer = reducer
        self._checked = False
        trainer.compute_loss = self  # type: ignore[method-assign]

    def __call__(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        trainer, reducer = self._trainer(), self._reducer()
        assert trainer is not None
        if reducer is None or return_outputs or "labels" not in inputs or not model.training:
            return self._own(trainer, model, inputs, return_outputs, num_items_in_batch)
        given = {name: value for name, value in inputs.items() if name != "labels"}
        hidden, logits = _hidden_states(model, reducer, given)
        if not self._checked:
            _check_logits(reducer, hidden, logits)
            self._checked = True
        args = trainer.args
        targets = inputs["labels"][:, 1:].to(hidden.device)
        loss = reducer.linear_cross_entropy(
            hidden[:, :-1],
            targets,
            reduction="mean" if num_items_in_batch is None else "sum",
            label_smoothing=args.label_smoothing_factor,
        )
        if num_items_in_batch is not None:
            loss = loss / torch.as_tensor(num_items_in_batch, device=loss.device).clamp(min=1)
            if args.average_tokens_across_devices:  # gradients are averaged over ranks
                loss = loss * trainer.accelerator.num_processes
        return loss


def _refused(trainer: Trainer) -> str:
    """Name of the trainer's loss if it is not the next-token cross entropy, else ""."""
    if trainer.compute_loss_func is not None:
        return "compute_loss_func=; use one or the other"
    if getattr(trainer.args, "loss_type", "nll") == "dft":
        return 'loss_type="dft"'
    model: Any = trainer.model
    config = getattr(model, "config", None)
    if getattr(trainer, "aux_loss_enabled", False) or getattr(
        config, "output_router_logits", False
    ):
        return "a loss that includes the MoE auxiliary loss (output_router_logits=True)"
    names = [type(each).__name__ for each in model.modules()]
    if not any("CausalLM" in name or "LMHead" in name for name in names):
        return f"the loss of {type(model).__name__}, which is not a causal language model"
    return ""


def _hidden_states(
    model: nn.Module, reducer: Reducer, inputs: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """The backbone's last hidden states, and the model's own logits at the last position."""
    owner: Any = None
    for module in model.modules():
        head = getattr(module, "get_output_embeddings", None)
        if head is not None and head() is reducer.head:
            owner = module  # keep the innermost: wrappers forward the method
    if owner is None or "logits_to_keep" not in inspect.signature(type(owner).forward).parameters:
        raise ValueError(
            "fused_loss=True needs a Transformers model whose forward accepts logits_to_keep and "
            f"whose output embedding is {reducer.head_name!r}; use a loss that calls the head "
            "instead"
        )
    seen: list[Tensor] = []
    handle = owner.base_model.register_forward_hook(
        lambda module, args, output: seen.append(output[0])
    )
    try:
        outputs = model(**(dict(inputs) | {"logits_to_keep": 1, "use_cache": False}))
    finally:
        handle.remove()
    return seen[0], outputs["logits"]


@torch.no_grad()
def _check_logits(reducer: Reducer, hidden: Tensor, logits: Tensor) -> None:
    """Raise if the model changes the head's output, as the fused loss would then be wrong."""
    head = reducer.head
    assert head is not None
    expected = type(head).forward(head, hidden[:, -1:]).float()
    # SYNC: only in the first step.
    if not torch.allclose(expected, logits[:, -1:].float(), 0.05, 0.05):
        raise ValueError(
            "fused_loss=True computes the loss from the head's plain output, but this model "
            "changes it (soft-capping, a logit scale); use a loss that calls the head instead"
        )
