"""The Trainer's callback does what `attach` does in a plain loop, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

import primum
from integrations.plain import (
    BATCH,
    FIGURES,
    OPTIMIZERS,
    STEPS,
    assert_equal,
    dataset,
    differs,
    network,
    trained,
)
from primum.integrations.transformers import PrimumCallback
from primum.paper import Paper


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def module_of(kind: type) -> Any:
    return sys.modules[kind.__module__]


class StopAt(TrainerCallback):
    """A run that ends early: its last checkpoint is what a killed one leaves."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def trainer(
    folder: Path,
    callbacks: list[TrainerCallback] | None = None,
    kind: str = "SGD",
    **options: Any,
) -> Trainer:
    model = Classifier()
    optimizer = OPTIMIZERS[kind](model.parameters())
    defaults = {
        "num_train_epochs": 1,
        "max_grad_norm": 0,
        "logging_steps": 4,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    }
    rows = [{"inputs": x, "labels": y} for x, y in dataset()]
    return InOrder(
        model,
        TrainingArguments(folder, per_device_train_batch_size=BATCH, **(defaults | options)),
        train_dataset=rows,
        eval_dataset=rows[:BATCH],
        optimizers=(optimizer, ConstantLR(optimizer, factor=1.0)),
        callbacks=callbacks,
    )


def parameters(run: Trainer) -> dict[str, Tensor]:
    return run.model.net.state_dict()


class TestTraining:
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_same_parameters_as_a_plain_loop(self, tmp_path: Path, kind: str) -> None:
        callback = PrimumCallback()
        options = {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True}
        run = trainer(tmp_path, [callback], kind, **options)
        run.train()
        assert_equal(parameters(run), trained(kind, {}))
        assert differs(parameters(run), trained(kind, None))
        assert callback.last is not None
        assert callback.last.applied
        assert callback.last.fallbacks == 0
        assert callback.last.mean_extra_weight > 0

    def test_settings_arrive(self, tmp_path: Path) -> None:
        settings = {"recipe": "paper", "radius": 0.4}
        run = trainer(tmp_path, [PrimumCallback(**settings)])
        run.train()
        assert_equal(parameters(run), trained("SGD", settings))

    def test_accumulation_and_clipping(self, tmp_path: Path) -> None:
        options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}
        run = trainer(tmp_path, [PrimumCallback()], **options)
        run.train()
        assert_equal(parameters(run), trained("SGD", {}, accumulate=2, clip=0.1))
        assert differs(parameters(run), trained("SGD", {}, accumulate=2))

    def test_radius_zero_is_the_plain_trainer(self, tmp_path: Path) -> None:
        one, other = trainer(tmp_path, [PrimumCallback(radius=0)]), trainer(tmp_path)
        one.train()
        other.train()
        assert_equal(parameters(one), parameters(other))

    def test_finds_the_scaler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Accelerate has one on a GPU only, and keeps it in its optimizer."""
        seen: list[Any] = []
        attach = primum.attach

        def spy(*args: Any, **settings: Any) -> Any:
            seen.append(settings.pop("scaler", None))
            return attach(*args, **settings)

        callback = PrimumCallback()
        monkeypatch.setattr(primum, "attach", spy)
        run = trainer(tmp_path)
        scaler = torch.amp.GradScaler("cpu")
        run.optimizer = run.accelerator.prepare(run.optimizer)
        for run.optimizer.scaler in (None, scaler):
            callback.on_train_begin(
                run.args, run.state, run.control, model=run.model, optimizer=run.optimizer
            )
        assert seen == [None, scaler]


class TestLogging:
    def test_the_first_line_names_the_layer(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At the verbosity that shows the Trainer's own first lines."""
        lines: list[str] = []
        monkeypatch.setattr(module_of(PrimumCallback).logger, "info", lines.append)
        trainer(tmp_path, [PrimumCallback()]).train()
        first, last = lines
        assert first == "primum: sample weights are applied at the output of net.2"
        assert last.startswith("Reducer(head='net.2'")
        assert "samples harmed by a step" in last
        assert module_of(PrimumCallback).logger.name.startswith("transformers.")

    def test_log_history(self, tmp_path: Path) -> None:
        callback = PrimumCallback()
        run = trainer(tmp_path, [callback], eval_strategy="steps", eval_steps=4)
        run.train()
        training = [entry for entry in run.state.log_history if "loss" in entry]
        assert [entry["step"] for entry in training] == [4, 8]
        assert all(entry.keys() >= FIGURES for entry in training)
        assert all(entry["primum/mean_extra_weight"] > 0 for entry in training)
        assert training[0]["primum/harm_before"] != training[1]["primum/harm_before"]
        others = [entry for entry in run.state.log_history if "loss" not in entry]
        assert len(others) == 4  # three evaluations and the summary
        assert not any(entry.keys() & FIGURES for entry in others)

    def test_tensorboard(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
        run = trainer(tmp_path, report_to="tensorboard")
        callback = PrimumCallback().add_to(run)
        run.train()
        events = EventAccumulator(str(tmp_path / "events"))
        events.Reload()
        for name in FIGURES:
            assert [event.step for event in events.Scalars(f"train/{name}")] == [4, 8]
        assert run.state.log_history[0].keys() >= FIGURES
        assert_equal(parameters(run), trained("SGD", {}))
        assert callback in run.callback_handler.callbacks


class TestLifetime:
    def test_nothing_is_left(self, tmp_path: Path) -> None:
        callback = PrimumCallback()
        run = trainer(tmp_path, [callback])
        run.train()
        assert not any(each._forward_hooks for each in run.model.modules())
        assert not run.optimizer.optimizer._optimizer_step_post_hooks
        assert callback.reducer is None

    def test_a_run_that_failed_does_not_block_the_next(self, tmp_path: Path) -> None:
        class Fail(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                raise ZeroDivisionError

        callback = PrimumCallback()
        run = trainer(tmp_path, [callback, Fail()])
        with pytest.raises(ZeroDivisionError):
            run.train()
        run.remove_callback(Fail)
        run.train()
        assert callback.last is not None
        assert callback.last.applied
        assert not any(each._forward_hooks for each in run.model.modules())

    def test_train_twice_begins_anew(self, tmp_path: Path) -> None:
        callback = PrimumCallback(recipe="paper")
        run = trainer(tmp_path, [callback])
        run.train()
        run.train()
        assert callback.state()["reducer"]["recipe_state"]["calls"] == STEPS

    def test_wrong_settings_fail_at_once(self) -> None:
        with pytest.raises(ValueError, match=r"radius must be >= 0 and finite, got -1"):
            PrimumCallback(radius=-1)


class TestResume:
    def stopped(self, folder: Path, callback: TrainerCallback, **options: Any) -> str:
        """A checkpoint after 6 of 20 steps."""
        saving = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2}
        trainer(folder, [callback, StopAt(6)], **(saving | options)).train()
        return str(folder / "checkpoint-6")

    @pytest.mark.parametrize("kind", OPTIMIZERS)
    @pytest.mark.parametrize("recipe", ["primum", "paper"])
    def test_bit_for_bit(self, tmp_path: Path, recipe: str, kind: str) -> None:
        """In the middle of an epoch, with accumulation and the Trainer's default clipping."""
        options = {"max_grad_norm": 1.0, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
        whole = trainer(tmp_path, [PrimumCallback(recipe=recipe)], kind, **options)
        whole.train()
        path = self.stopped(tmp_path, PrimumCallback(recipe=recipe), kind=kind, **options)
        callback = PrimumCallback(recipe=recipe)
        resumed = trainer(tmp_path, [callback], kind, **options)
        resumed.train(resume_from_checkpoint=path)
        assert_equal(parameters(resumed), parameters(whole))
        calls = callback.state()["reducer"]["recipe_state"].get("calls")
        assert calls == {"primum": None, "paper": 2 * STEPS}[recipe]
        assert callback.last is not None
        assert callback.last.applied

    def test_state_is_json_and_exact(self, tmp_path: Path) -> None:
        callback = PrimumCallback(recipe="paper")
        path = self.stopped(tmp_path, callback)
        state = json.loads((Path(path) / "trainer_state.json").read_text())
        saved = state["stateful_callbacks"]["PrimumCallback"]
        assert saved == callback.state()
        assert saved["reducer"]["recipe_state"]["averages"]["spike"]["dtype"] == "float32"

    def test_from_a_checkpoint_without_primum(self, tmp_path: Path) -> None:
        path = self.stopped(tmp_path, StopAt(6))
        callback = PrimumCallback()
        options = {"save_strategy": "steps", "save_steps": 5, "num_train_epochs": 2}
        trainer(tmp_path, [callback], **options).train(resume_from_checkpoint=path)
        assert callback.last is not None
        assert callback.last.applied
        assert (tmp_path / "checkpoint-20").exists()

    def test_callbacks_made_anew_by_the_trainer(self, tmp_path: Path) -> None:
        """`restore_callback_states_from_checkpoint`: from settings that JSON can hold, or not."""
        options = {"restore_callback_states_from_checkpoint": True, "num_train_epochs": 2}
        given = PrimumCallback(recipe="paper", radius=0.4)
        path = self.stopped(tmp_path, given)
        run = trainer(tmp_path, [PrimumCallback()], **options)
        run.train(resume_from_checkpoint=path)
        assert_equal(parameters(run), trained("SGD", {"recipe": "paper", "radius": 0.4}, epochs=2))
        path = self.stopped(tmp_path, PrimumCallback(recipe=Paper()))
        run = trainer(tmp_path, [PrimumCallback()], **options)
        with pytest.raises(ValueError, match=r"cannot store .*\['recipe'\].*=False"):
            run.train(resume_from_checkpoint=path)
