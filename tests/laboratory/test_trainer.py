"""A run can be put aside at any step and taken up again to the same end, bit for bit."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lab.arms import ARMS
from lab.callbacks import Curves, Interference, MiddleBatch
from lab.errors import UserError
from lab.images import Batches, ImageData, load_data
from lab.job import own_random_numbers
from lab.models import build_model
from lab.optimizers import make_optimizer, weight_average
from lab.settings import Matched, RunSettings
from lab.trainer import Trainer
from laboratory.conftest import TINY, tiny

DATA = load_data(TINY.data_settings())


def start(settings: RunSettings, matched: Matched | None = None) -> Trainer:
    return trainer_of(settings, DATA, matched)


def trainer_of(settings: RunSettings, data: ImageData, matched: Matched | None = None) -> Trainer:
    return Trainer(settings, data, [Curves(), Interference(), MiddleBatch()], matched=matched)


def curves(trainer: Trainer) -> dict[str, Any]:
    return trainer.callbacks[0].table  # type: ignore[attr-defined, no-any-return]


def reports(trainer: Trainer) -> dict[str, Any]:
    return trainer.callbacks[1].table  # type: ignore[attr-defined, no-any-return]


def finish(training: Trainer) -> Trainer:
    while not training.finished:
        training.step()
    return training


def through_a_file(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_base_is_the_loop_everybody_writes() -> None:
    settings = tiny("base", seed=1)
    training = finish(start(settings))
    model = build_model("cnn-small", 4, 8, seed=1)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.rate, momentum=0.9, weight_decay=1e-4
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    batches = Batches(DATA.train, DATA, batch_size=8, seed=1)
    for epoch in range(2):
        for batch in batches.epoch(epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(batch.inputs), batch.targets).backward()
            optimizer.step()
            schedule.step()
    for own, plain in zip(training.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-5, atol=1e-7)  # two forms of one cosine
    assert curves(training)["step"] == [4, 8]
    assert curves(training)["epoch"] == [1.0, 2.0]


def test_last_figures_are_those_of_the_last_model() -> None:
    training = finish(start(tiny("primum")))
    test = next(Batches(DATA.test, DATA, batch_size=12, shuffle=False).epoch(0))
    training.model.eval()
    with torch.no_grad():
        logits = training.model(test.inputs)
    loss = float(F.cross_entropy(logits, test.targets))
    right = float((logits.argmax(1) == test.targets).float().mean())
    assert curves(training)["test_loss"][-1] == pytest.approx(loss, rel=1e-6)
    assert curves(training)["test_accuracy"][-1] == pytest.approx(right)
    assert reports(training)["harmed_after"][-1] <= reports(training)["harmed_before"][-1]
    assert reports(training)["fallbacks"] == [0.0, 0.0]


@pytest.mark.filterwarnings("ignore:primum:RuntimeWarning")
def test_a_model_that_diverged_has_no_accuracy() -> None:
    training = start(tiny("base", ema=0.5))
    with torch.no_grad():
        next(training.model.parameters()).fill_(torch.nan)
    finish(training)
    for name in ("test_loss", "test_accuracy", "ema_test_loss", "ema_test_accuracy"):
        assert all(map(math.isnan, curves(training)[name])), name


def test_fewer_evaluations_change_nothing_else() -> None:
    every = finish(start(tiny("primum", epochs=5)))
    some = finish(start(tiny("primum", epochs=5, evaluate_every=2)))
    same_end_of_models(some, every)
    assert repr(reports(some)) == repr(reports(every))  # of each epoch, as before
    assert curves(some)["epoch"] == [2.0, 4.0, 5.0]
    for name in ("test_loss", "test_accuracy", "lr"):
        kept = [curves(every)[name][place] for place in (1, 3, 4)]
        assert curves(some)[name] == kept, name
    losses = curves(every)["train_loss"]  # means of as many steps each
    means = [sum(losses[:2]) / 2, sum(losses[2:4]) / 2, losses[4]]
    assert curves(some)["train_loss"] == pytest.approx(means)


@pytest.mark.parametrize(
    "arm", [name for name in ARMS if name not in ("focal", "lr-matched", "explicit")]
)
def test_taken_up_in_the_middle_of_an_epoch(arm: str) -> None:
    whole, cut = start(tiny(arm)), start(tiny(arm))
    finish(whole)
    for _ in range(3):
        cut.step()
    taken = start(tiny(arm))
    taken.load_state_dict(through_a_file(cut.state_dict()))
    same_end(finish(taken), whole)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "vit-micro", "optimizer": "adamw", "image_size": None},
        {"ema": 0.8, "clip": 0.5, "warmup": 0.5, "label_smoothing": 0.1},
        {"precision": "bf16"},
        {"precision": "fp16", "clip": 1.0},
        {"augment": "convnext", "steps": 7},
        {"epochs": 3, "evaluate_every": 2},
        {
            "model": "cnn-whitened",
            "image_size": 16,
            "augment": "translate-alternate",
            "bias_lr": 64.0,
            "nesterov": True,
            "schedule": "linear",
            "warmup": 0.5,
        },
    ],
    ids=lambda change: "-".join(change),
)
def test_taken_up_with_every_option(change: dict[str, Any]) -> None:
    settings = replace(tiny("primum"), **{"image_size": 8} | change)
    data = load_data(settings.data_settings())
    with own_random_numbers(0, torch.device("cpu")):
        whole = finish(trainer_of(settings, data))
    with own_random_numbers(0, torch.device("cpu")):
        cut = trainer_of(settings, data)
        for _ in range(3):
            cut.step()
        state = through_a_file(cut.state_dict())
    with own_random_numbers(5, torch.device("cpu")):
        taken = trainer_of(settings, data)
        taken.load_state_dict(state)
        same_end(finish(taken), whole)


def same_end_of_models(first: Trainer, second: Trainer) -> None:
    own, other = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(own[name], other[name]) for name in own)


def same_end(first: Trainer, second: Trainer) -> None:
    same_end_of_models(first, second)
    for table in (curves, reports):
        for name, column in table(second).items():
            if name != "seconds":
                assert repr(table(first)[name]) == repr(column), name
    assert first.callbacks[2].state_dict() == second.callbacks[2].state_dict()


def test_a_state_of_another_run_is_refused() -> None:
    state = start(tiny("primum")).state_dict()
    with pytest.raises(ValueError, match="another run"):
        start(tiny("primum", seed=1)).load_state_dict(state)
    assert not start(tiny("primum"), Matched((1.2,))).continues(state)


def test_lr_factors_of_a_matched_run() -> None:
    training = start(tiny("lr-matched"), Matched(lr_factors=(2.0, 3.0)))
    plain = start(tiny("base"))
    used: list[float] = []  # by steps of the matched run
    for step in range(8):
        factor = 2.0 if step < 4 else 3.0
        own, other = (t.optimizer.param_groups[0]["lr"] for t in (training, plain))
        assert own == pytest.approx(factor * other), step
        used.append(own)
        training.step()
        plain.step()
    assert curves(training)["lr"] == [used[3], used[7]]


def test_a_matched_run_with_more_steps_stretches_its_schedule() -> None:
    training = finish(start(tiny("time-matched"), Matched(steps_factor=1.25)))
    assert training.step_count == 10
    assert curves(training)["epoch"] == [1.0, 2.0, 2.5]
    shares = [0.5 + 0.5 * math.cos(math.pi * step / 10) for step in (3, 7, 9)]  # last of epochs
    rate = training.settings.rate
    assert curves(training)["lr"] == pytest.approx([rate * share for share in shares])


def test_a_warm_up_as_long_as_the_run() -> None:
    with pytest.raises(UserError, match="warmup takes 8 steps, but the run has 8"):
        start(tiny("base", warmup=2.0))


def test_optimizers_have_their_settings() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    sgd = make_optimizer(tiny(lr=0.3, momentum=0.5, nesterov=True), model).param_groups[0]
    assert (sgd["lr"], sgd["momentum"], sgd["nesterov"]) == (0.3, 0.5, True)
    own = tiny(optimizer="adamw", beta2=0.95, eps=1e-6, weight_decay=0.1, decay_norms=False)
    groups = make_optimizer(own, model).param_groups
    assert (groups[0]["betas"], groups[0]["eps"]) == ((0.9, 0.95), 1e-6)
    assert [[p.dim() for p in group["params"]] for group in groups] == [[2], [1, 1, 1]]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_biases_have_a_learning_rate_of_their_own_and_the_same_decay_per_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    own = tiny(lr=0.3, weight_decay=0.1, bias_lr=64.0)
    matrices, vectors = make_optimizer(own, model).param_groups
    assert [[p.dim() for p in group["params"]] for group in (matrices, vectors)] == [[2], [1, 1, 1]]
    assert vectors["lr"] == pytest.approx(64 * matrices["lr"])
    assert vectors["lr"] * vectors["weight_decay"] == pytest.approx(0.3 * 0.1)
    assert len(make_optimizer(tiny(), model).param_groups) == 1


def test_averaged_weights_by_their_formula() -> None:
    model = nn.BatchNorm1d(2)
    average = weight_average(model, decay=0.75)
    weight = torch.empty(0)
    for step in range(1, 5):
        with torch.no_grad():
            model.weight.fill_(float(step))
        average.update_parameters(model)
        own = model.weight.detach().clone()
        weight = own if step == 1 else 0.75 * weight + 0.25 * own
    torch.testing.assert_close(average.module.weight, weight)
    assert model.weight[0] == 4.0  # the model itself is not changed


def test_the_batch_in_the_middle() -> None:
    trainer = finish(start(tiny("primum")))
    batch = trainer.callbacks[2].batch  # type: ignore[attr-defined]
    assert batch["step"] == 5
    assert len(batch["before"]) == len(batch["after"]) == 8
    harm = [sum(max(0.0, change) for change in batch[name]) for name in ("before", "after")]
    assert harm[1] < harm[0]


def test_a_batch_larger_than_the_data() -> None:
    with pytest.raises(UserError, match="batch_size is 64, but there are 32 samples"):
        start(tiny("base", batch_size=64))
