"""A callback for the Hugging Face Trainer (`import transformers`)."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from primum import Reducer, StepReport
from primum.integrations.attachment import Attachment
from primum.integrations.keep_head import way_out, when_fused
from primum.setup.bypass import fusing_package, looked_after

logger = logging.get_logger("transformers.primum")  # follows the Trainer's log_level


PAIRS = ("RewardTrainer", "DPOTrainer", "ORPOTrainer", "CPOTrainer", "KTOTrainer", "BCOTrainer")


class PrimumCallback(TrainerCallback, ExportableState):
    """Reduces per-sample interference while a Trainer trains: `PrimumCallback().add_to(trainer)`.

    Attaches when training begins, with Accelerate's scaler under `fp16=True`, and detaches when it
    ends. Whenever the Trainer logs, the metrics of the last step are logged as
    `primum/harm_before` and so on; `primum/applied` is 0 if the head was not called, for example
    because the loss is fused with it. The state is saved in the Trainer's checkpoints
    (`trainer_state.json`) and restored by `train(resume_from_checkpoint=...)`.

    `Trainer(callbacks=[PrimumCallback()])` works too, but the Trainer then runs its own loggers
    (TensorBoard, W&B) first, so the metrics only reach `log_history`.

    Args:
        settings: Keyword arguments of `primum.attach`, such as `radius`, `head` or `recipe`.
    """

    def __init__(self, **settings: Any) -> None:
        self._attachment = Attachment(settings)
        self._settings = settings
        self._trainer: weakref.ref[Trainer] | None = None
        self.lost: list[str] = []  # set by the Trainer if it restores the callback itself

    @property
    def reducer(self) -> Reducer | None:
        """The `Reducer` during training, otherwise None."""
        return self._attachment.reducer

    @property
    def last(self) -> StepReport | None:
        """Report of the last step; kept after training."""
        return self._attachment.last

    def add_to(self, trainer: Trainer) -> PrimumCallback:
        """Add this as the first callback of a Trainer, so that its loggers get the metrics too."""
        names = [each.__name__ for each in type(trainer).__mro__]
        pairs = next((name for name in PAIRS if name in names), None)
        if pairs is not None:
            raise TypeError(
                f"{pairs} is not supported: its loss compares rows of a batch (a chosen with a "
                "rejected answer), so weights per row are not weights per sample. In a loop of "
                "your own, compute one loss per pair and use loss = reducer(losses)"
            )
        trainer.callback_handler.callbacks.insert(0, self)
        self._trainer = weakref.ref(trainer)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.lost:
            raise ValueError(
                f"the checkpoint cannot store PrimumCallback's settings {self.lost}; resume with "
                "restore_callback_states_from_checkpoint=False (this callback restores its own "
                "state)"
            )
        states: Any = state.stateful_callbacks  # a dict, whatever its annotation says
        saved = states.setdefault(type(self).__name__, self.state())
        if state.global_step > 0 and saved["reducer"]:  # resumed
            self._attachment.load_state_dict(_unpack(saved["reducer"]))
        optimizer = kwargs["optimizer"]
        with looked_after():  # we warn about a bypassed head below, with its cause
            self._attachment.begin(kwargs["model"], optimizer, getattr(optimizer, "scaler", None))
        if state.is_world_process_zero:
            logger.info(self._attachment.headline)
        self._warn_if_fused(kwargs["model"], args)

    def _warn_if_fused(self, model: nn.Module, args: TrainingArguments) -> None:
        """Warn before the first step if the loss does not call the head, and say what to set."""
        package = fusing_package(model)
        trainer = None if self._trainer is None else self._trainer()
        found = way_out(package, args, trainer) if package else ""
        if not found:
            return
        message = (
            "the loss is computed from the head's weight without calling the head (fused or "
            f"chunked), so no sample weights are applied. {found}"
        )
        if trainer is not None or package == "liger_kernel":
            self._say(message)
        else:  # the first forward pass shows whether the Trainer has its own loss
            when_fused(model, lambda: self._say(message))

    def _say(self, message: str) -> None:
        if self.reducer is not None:
            self.reducer.warn_if_bypassed(message)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logs: dict[str, float] = kwargs["logs"]
        if "loss" in logs:  # training logs, not an evaluation or the final summary
            figures = self._attachment.figures()
            state.log_history[-1].update(figures)  # already holds a copy of logs
            logs.update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        summary = self._attachment.end()
        if state.is_world_process_zero:
            logger.info(summary)

    def state(self) -> dict[str, Any]:
        """State that the Trainer writes to `trainer_state.json`.

        `args` and `attributes` are for a Trainer that recreates its callbacks from a checkpoint
        (`restore_callback_states_from_checkpoint=True`).
        """
        kept = {name: value for name, value in self._settings.items() if _fits_json(value)}
        return {
            "args": kept,
            "attributes": {"lost": sorted(self._settings.keys() - kept.keys())},
            "reducer": _pack(self._attachment.state_dict()),
        }


def _fits_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def _pack(value: Any) -> Any:
    """Tensors as JSON values with their dtype, so that they are restored bit for bit."""
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "tensor": value.tolist()}
    if isinstance(value, Mapping):
        return {name: _pack(each) for name, each in value.items()}
    return value


def _unpack(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"dtype", "tensor"}:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    return {name: _unpack(each) for name, each in value.items()}
