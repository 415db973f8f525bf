"""A callback for the Hugging Face Trainer (`import transformers`)."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from primum import Reducer, StepReport
from primum.integrations.attachment import Attachment
from primum.integrations.fused import fusing_package, way_out
from primum.warn import warn

logger = logging.get_logger("transformers.primum")  # a child: follows the Trainer's `log_level`


class PrimumCallback(TrainerCallback, ExportableState):
    """Reduces per-sample interference while a Trainer trains: `PrimumCallback().add_to(trainer)`.

    Attaches when training begins, with Accelerate's scaler under `fp16=True`, and is gone when it
    ends. Whenever the Trainer logs, the figures of the last step come along as
    `primum/harm_before` and so on; if the head was not called, as by a loss that is fused with it,
    `primum/applied` is 0. The state is part of the Trainer's checkpoints (`trainer_state.json`)
    and is found there by `train(resume_from_checkpoint=...)`.

    `Trainer(callbacks=[PrimumCallback()])` does the same, but for one thing: the Trainer puts its
    reporters (TensorBoard, W&B) first, so the figures reach `log_history` and not them.

    Args:
        settings: Keyword arguments of `primum.attach`, such as `radius`, `head` or `recipe`.
    """

    def __init__(self, **settings: Any) -> None:
        self._attachment = Attachment(settings)
        self._settings = settings
        self._trainer: weakref.ref[Trainer] | None = None
        self._way_out = ""  # of a loss that may not call the head; known after the first step
        self.lost: list[str] = []  # set by the Trainer, on what it made from a checkpoint

    @property
    def reducer(self) -> Reducer | None:
        """While training, the `Reducer`."""
        return self._attachment.reducer

    @property
    def last(self) -> StepReport | None:
        """Report of the last step, also after training."""
        return self._attachment.last

    def add_to(self, trainer: Trainer) -> PrimumCallback:
        """Become the Trainer's first callback, so that its reporters get the figures as well."""
        trainer.callback_handler.callbacks.insert(0, self)
        self._trainer = weakref.ref(trainer)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.lost:
            raise ValueError(
                f"the checkpoint could not keep {self.lost} of PrimumCallback; resume with "
                "restore_callback_states_from_checkpoint=False, which this callback does not need"
            )
        states: Any = state.stateful_callbacks  # a dict, whatever its annotation says
        saved = states.setdefault(type(self).__name__, self.state())
        if state.global_step > 0 and saved["reducer"]:  # resumed
            self._attachment.load_state_dict(_unpack(saved["reducer"]))
        optimizer = kwargs["optimizer"]
        self._attachment.begin(kwargs["model"], optimizer, getattr(optimizer, "scaler", None))
        if state.is_world_process_zero:
            logger.info(self._attachment.headline)
        trainer = None if self._trainer is None else self._trainer()
        package = fusing_package(kwargs["model"])
        self._way_out = way_out(package, args, trainer) if package else ""
        if trainer is not None or package == "liger_kernel":
            self._warn_if_fused()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._way_out and self.last is None:  # the Trainer is unknown, but not what it did
            self._warn_if_fused()
        self._way_out = ""

    def _warn_if_fused(self) -> None:
        if self._way_out:
            warn(
                "the loss is computed from the head's weight without calling the head (fused, in "
                f"chunks), so no sample weights are applied. {self._way_out}"
            )
        self._way_out = ""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logs: dict[str, float] = kwargs["logs"]
        if "loss" in logs:  # of training; not of an evaluation, nor the summary at the end
            figures = self._attachment.figures()
            state.log_history[-1].update(figures)  # a copy of logs, made before
            logs.update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        summary = self._attachment.end()
        if state.is_world_process_zero:
            logger.info(summary)

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into `trainer_state.json`.

        `args` and `attributes` are for a Trainer that makes its callbacks again from a checkpoint
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
    """Tensors as what JSON can hold, with their dtype: their values come back bit for bit."""
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
