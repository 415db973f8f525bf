"""The Lightning callback does what `attach` does in a plain loop, and nothing else."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader

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
from primum import StepReport
from primum.integrations.lightning import PrimumCallback

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers",  # a few hundred rows in memory
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated",  # Lightning on a newer torch
)

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "val_check_interval": 4,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 4,
}


class Training:
    """What makes a LightningModule ours, whichever package it comes from."""

    def __init__(self, kind: str = "SGD", *, manual: bool = False, fail_at: int = -1) -> None:
        super().__init__()
        self.net, self.kind, self.fail_at = network(), kind, fail_at
        self.automatic_optimization = not manual

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        if number == self.fail_at:
            raise ZeroDivisionError
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.kind](self.parameters())


class Module(Training, pl.LightningModule):
    pass


class OlderModule(Training, pytorch_lightning.LightningModule):
    pass


def loader(rows: int = BATCH * STEPS) -> DataLoader[Any]:
    return DataLoader(dataset(rows), batch_size=BATCH)


def fit(
    module: Module, *callbacks: pl.Callback, ckpt_path: Path | None = None, **options: Any
) -> pl.Trainer:
    """Train, with validation before (the sanity check), in between and after."""
    trainer = pl.Trainer(callbacks=list(callbacks), **(QUIET | options))
    trainer.fit(module, loader(), loader(BATCH), ckpt_path=ckpt_path)
    return trainer


def hooks(module: nn.Module) -> list[Any]:
    return [hook for each in module.modules() for hook in each._forward_hooks.values()]


class TestTraining:
    @pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_same_parameters_as_a_plain_loop(self, kind: str, manual: bool) -> None:
        module, callback = Module(kind, manual=manual), PrimumCallback()
        fit(module, callback)
        assert_equal(module.net.state_dict(), trained(kind, {}))
        assert differs(module.net.state_dict(), trained(kind, None))
        assert callback.last is not None
        assert callback.last.applied
        assert callback.last.fallbacks == 0
        assert callback.last.mean_extra_weight > 0

    def test_settings_arrive(self) -> None:
        settings = {"recipe": "paper", "radius": 0.4}
        module = Module("AdamW")
        fit(module, PrimumCallback(**settings))
        assert_equal(module.net.state_dict(), trained("AdamW", settings))
        assert differs(module.net.state_dict(), trained("AdamW", {}))

    def test_accumulation_and_clipping(self) -> None:
        module = Module()
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
        fit(module, PrimumCallback(), **options)
        assert_equal(module.net.state_dict(), trained("SGD", {}, accumulate=2, clip=0.1))
        assert differs(module.net.state_dict(), trained("SGD", {}, accumulate=2))

    def test_radius_zero_is_plain_lightning(self) -> None:
        one, other = Module(), Module()
        fit(one, PrimumCallback(radius=0))
        fit(other)
        assert_equal(one.state_dict(), other.state_dict())

    def test_finds_the_scaler(self) -> None:
        """Weights come from unscaled gradients: they are those of training without a scaler."""
        module, callback = Module(), PrimumCallback()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        plugin.autocast_context_manager = lambda: torch.autocast("cpu", enabled=False)  # float32
        fit(module, callback, plugins=plugin)
        for name, value in trained("SGD", {}).items():
            torch.testing.assert_close(module.net.state_dict()[name], value)
        assert callback.last is not None
        assert callback.last.mean_extra_weight > 0


class Adversaries(pl.LightningModule):
    """Two optimizers, toggled in turn; with a learning rate of 0, the critic stays the same."""

    def __init__(self, *, toggle: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle, self.gradients = toggle, []
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.1),
            torch.optim.SGD(self.critic.parameters(), lr=0.0, momentum=0.9),
        ]

    def training_step(self, batch: list[Tensor], _: int) -> None:
        for optimizer, loss in zip(self.optimizers(), (self.fool, self.judge), strict=True):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss(*batch))
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)
            self.gradients += [p.grad.clone() for p in self.generator.parameters()]

    def fool(self, real: Tensor, labels: Tensor) -> Tensor:
        """As the critic scores each class differently, samples disagree on how to move it."""
        return F.mse_loss(self.critic(self.generator(real)).squeeze(1), labels.float() - 1)

    def judge(self, real: Tensor, _: Tensor) -> Tensor:
        fake = self.generator(real).detach()
        scores = self.critic(torch.cat([real, fake]))  # two calls would not be weighted together
        return (F.softplus(-scores[: len(real)]) + F.softplus(scores[len(real) :])).mean()


class TestTwoOptimizers:
    def gradients(self, *callbacks: pl.Callback, toggle: bool = True) -> list[Tensor]:
        module = Adversaries(toggle=toggle)
        pl.Trainer(callbacks=list(callbacks), **QUIET).fit(module, loader())
        return module.gradients

    def test_passes_for_the_other_optimizer_stay_plain(self) -> None:
        """No warning, and not counted: toggling says that the critic is not to be trained."""
        callback = PrimumCallback(head="critic.2")
        found, plain = self.gradients(callback), self.gradients()
        assert len(found) == len(plain) == 2 * 4 * STEPS
        assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))
        assert callback.last is not None
        assert callback.last.applied
        assert callback.last.fallbacks == 0
        assert callback.last.mean_extra_weight > 0

    @pytest.mark.filterwarnings("ignore:primum")
    def test_without_toggling_they_are_weighed(self) -> None:
        """What the test above would see if toggling were ignored."""
        found = self.gradients(PrimumCallback(head="critic.2"), toggle=False)
        plain = self.gradients(toggle=False)
        assert not all(torch.equal(*pair) for pair in zip(found, plain, strict=True))


def test_a_trainer_of_pytorch_lightning(tmp_path: Path) -> None:
    """The same code under its older name, with classes of its own."""
    module, callback = OlderModule(), PrimumCallback()
    trainer = pytorch_lightning.Trainer(callbacks=[callback], **QUIET)
    trainer.fit(module, loader(), loader(BATCH))
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert_equal(module.net.state_dict(), trained("SGD", {}))
    assert trainer.callback_metrics.keys() >= FIGURES
    assert "PrimumCallback" in torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"]


class TestLogging:
    def test_the_first_line_names_the_layer(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO"):
            fit(Module(), PrimumCallback())
        lines = [each.message for each in caplog.records if each.message.startswith("primum")]
        assert len(lines) == 2
        assert "with head 'net.2' (16 -> 3), SGD" in lines[0]
        assert lines[1] == "primum: sample weights are applied at the output of net.2"

    def test_csv_logger(self, tmp_path: Path) -> None:
        logger = CSVLogger(tmp_path)
        callback = PrimumCallback()
        run = fit(Module(), callback, logger=logger, max_epochs=2)
        with open(Path(logger.log_dir) / "metrics.csv") as file:
            rows = [row for row in csv.DictReader(file) if row["loss"]]  # others: validation
        assert rows[0].keys() >= FIGURES
        assert [int(row["step"]) for row in rows] == [3, 7, 11, 15, 19]  # counted from 0
        assert all(float(row["primum/mean_extra_weight"]) > 0 for row in rows)
        assert len({row["primum/harm_before"] for row in rows}) == 5
        assert callback.last is not None
        last = float(rows[-1]["primum/harm_before"])
        assert last == pytest.approx(float(callback.last.harm_before))
        assert run.callback_metrics.keys() >= FIGURES

    @pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
    def test_tensorboard(self, tmp_path: Path, manual: bool) -> None:
        logger = TensorBoardLogger(tmp_path)
        fit(Module(manual=manual), PrimumCallback(), logger=logger)
        events = EventAccumulator(logger.log_dir)
        events.Reload()
        assert set(events.Tags()["scalars"]) >= FIGURES
        for name in ("loss", "primum/harm_after"):
            assert [event.step for event in events.Scalars(name)] == [3, 7]

    def test_steps_between_are_not_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`as_dict` waits for the device."""
        calls = []

        def as_dict(report: StepReport) -> dict[str, float]:
            calls.append(report)
            return {}

        monkeypatch.setattr(StepReport, "as_dict", as_dict)
        fit(Module(), PrimumCallback(), accumulate_grad_batches=2, log_every_n_steps=2)
        assert len(calls) == 2  # of 10 batches, 5 steps


class TestLifetime:
    def test_nothing_is_left(self) -> None:
        module, callback = Module(), PrimumCallback()
        run = fit(module, callback)
        assert not hooks(module)
        assert not run.optimizers[0]._optimizer_step_post_hooks
        assert callback.reducer is None

    def test_nothing_is_left_after_an_error(self) -> None:
        module, callback = Module(fail_at=3), PrimumCallback()
        with pytest.raises(ZeroDivisionError):
            fit(module, callback)
        assert not hooks(module)
        assert callback.reducer is None

    def test_fit_twice(self) -> None:
        module, callback = Module(), PrimumCallback(recipe="paper")
        fit(module, callback)
        first = callback.state_dict()
        module.net.load_state_dict(network().state_dict())
        fit(module, callback)
        assert callback.state_dict()["recipe_state"] == first["recipe_state"]  # began anew
        assert_equal(module.net.state_dict(), trained("SGD", {"recipe": "paper"}))

    def test_wrong_settings_fail_at_once(self) -> None:
        with pytest.raises(ValueError, match=r"radius must be >= 0 and finite, got -1"):
            PrimumCallback(radius=-1)
        with pytest.raises(TypeError, match="raduis"):
            PrimumCallback(raduis=0.1)

    def test_making_one_draws_no_random_numbers(self) -> None:
        before = torch.get_rng_state()
        PrimumCallback()
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("recipe", ["primum", "paper"])
class TestResume:
    def test_bit_for_bit(self, tmp_path: Path, recipe: str, kind: str) -> None:
        """From a checkpoint after two epochs of three, with clipping."""
        options = {"max_epochs": 3, "gradient_clip_val": 0.5, "enable_checkpointing": True}
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=10, save_top_k=-1)
        whole, resumed = Module(kind), Module(kind)
        fit(whole, PrimumCallback(recipe=recipe), saving, **options)
        path, callback = tmp_path / "step=20.ckpt", PrimumCallback(recipe=recipe)
        state = torch.load(path, weights_only=True)["callbacks"]["PrimumCallback"]
        assert state["recipe"] == recipe
        fit(resumed, callback, saving, ckpt_path=path, **options)
        assert_equal(resumed.state_dict(), whole.state_dict())
        assert callback.last is not None
        assert callback.last.applied


class TestState:
    def test_saved_after_fit(self, tmp_path: Path) -> None:
        run = fit(Module(), PrimumCallback(recipe="paper"))
        run.save_checkpoint(tmp_path / "end.ckpt")
        state = torch.load(tmp_path / "end.ckpt", weights_only=True)
        assert state["callbacks"]["PrimumCallback"]["recipe_state"]["calls"] == STEPS

    def test_validating_a_checkpoint_does_not_begin_the_next_fit(self, tmp_path: Path) -> None:
        module, callback = Module(), PrimumCallback(recipe="paper")
        run = fit(module, callback)
        run.save_checkpoint(tmp_path / "end.ckpt")
        run.validate(module, loader(BATCH), ckpt_path=tmp_path / "end.ckpt", verbose=False)
        fit(module, callback)
        assert callback.state_dict()["recipe_state"]["calls"] == STEPS

    def test_loaded_by_hand_before_fit(self) -> None:
        callback = PrimumCallback(recipe="paper")
        fit(Module(), callback)
        other = PrimumCallback(recipe="paper")
        other.load_state_dict(callback.state_dict())
        fit(Module(), other)
        assert other.state_dict()["recipe_state"]["calls"] == 2 * STEPS
