"""A run can be put aside at any step and taken up again to the same end, bit for bit."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from experiments.sweeps.conftest import TINY, tiny
from primum.experiments.images import Batches, load_data
from primum.experiments.models import build_model
from primum.experiments.sweeps.arms import ABOUT
from primum.experiments.sweeps.build import own_random_numbers
from primum.experiments.sweeps.settings import RunSettings, SettingsError
from primum.experiments.sweeps.training import Matched, Training

DATA = load_data(TINY.data_settings())


def start(settings: RunSettings, matched: Matched | None = None) -> Training:
    return Training(settings, DATA, matched)


def finish(training: Training) -> Training:
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
            F.cross_entropy(model(batch.images), batch.targets).backward()
            optimizer.step()
            schedule.step()
    for own, plain in zip(training.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-5, atol=1e-7)  # two forms of one cosine
    assert training.curves["step"] == [4, 8]
    assert training.curves["epoch"] == [1.0, 2.0]


def test_last_figures_are_those_of_the_last_model() -> None:
    training = finish(start(tiny("primum")))
    test = next(Batches(DATA.test, DATA, batch_size=12, shuffle=False).epoch(0))
    training.model.eval()
    with torch.no_grad():
        logits = training.model(test.images)
    loss = float(F.cross_entropy(logits, test.targets))
    right = float((logits.argmax(1) == test.targets).float().mean())
    assert training.curves["test_loss"][-1] == pytest.approx(loss, rel=1e-6)
    assert training.curves["test_accuracy"][-1] == pytest.approx(right)
    assert training.reports["harmed_after"][-1] <= training.reports["harmed_before"][-1]
    assert training.reports["fallbacks"] == [0.0, 0.0]


@pytest.mark.filterwarnings("ignore:primum:RuntimeWarning")
def test_a_model_that_diverged_has_no_accuracy() -> None:
    training = start(tiny("base", ema=0.5))
    with torch.no_grad():
        next(training.model.parameters()).fill_(torch.nan)
    finish(training)
    for name in ("test_loss", "test_accuracy", "ema_test_loss", "ema_test_accuracy"):
        assert all(map(math.isnan, training.curves[name])), name


def test_fewer_evaluations_change_nothing_else() -> None:
    every = finish(start(tiny("primum", epochs=5)))
    some = finish(start(tiny("primum", epochs=5, evaluate_every=2)))
    same_end_of_models(some, every)
    assert repr(some.reports) == repr(every.reports)  # of each epoch, as before
    assert some.curves["epoch"] == [2.0, 4.0, 5.0]
    for name in ("test_loss", "test_accuracy", "lr"):
        kept = [every.curves[name][place] for place in (1, 3, 4)]
        assert some.curves[name] == kept, name
    losses = every.curves["train_loss"]  # means of as many steps each
    means = [sum(losses[:2]) / 2, sum(losses[2:4]) / 2, losses[4]]
    assert some.curves["train_loss"] == pytest.approx(means)


@pytest.mark.parametrize("arm", [name for name in ABOUT if name not in ("focal", "lr-matched")])
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
    ],
    ids=lambda change: "-".join(change),
)
def test_taken_up_with_every_option(change: dict[str, Any]) -> None:
    settings = replace(tiny("primum"), **{"image_size": 8} | change)
    data = load_data(settings.data_settings())
    with own_random_numbers(0, torch.device("cpu")):
        whole = finish(Training(settings, data))
    with own_random_numbers(0, torch.device("cpu")):
        cut = Training(settings, data)
        for _ in range(3):
            cut.step()
        state = through_a_file(cut.state_dict())
    with own_random_numbers(5, torch.device("cpu")):
        taken = Training(settings, data)
        taken.load_state_dict(state)
        same_end(finish(taken), whole)


def same_end_of_models(first: Training, second: Training) -> None:
    own, other = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(own[name], other[name]) for name in own)


def same_end(first: Training, second: Training) -> None:
    same_end_of_models(first, second)
    for table in ("curves", "reports"):
        for name, column in getattr(second, table).items():
            if name != "seconds":
                assert repr(getattr(first, table)[name]) == repr(column), name


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
    assert training.curves["lr"] == [used[3], used[7]]


def test_a_matched_run_with_more_steps_stretches_its_schedule() -> None:
    training = finish(start(tiny("time-matched"), Matched(steps_factor=1.25)))
    assert training.step_count == 10
    assert training.curves["epoch"] == [1.0, 2.0, 2.5]
    shares = [0.5 + 0.5 * math.cos(math.pi * step / 10) for step in (3, 7, 9)]  # last of epochs
    rate = training.settings.rate
    assert training.curves["lr"] == pytest.approx([rate * share for share in shares])


def test_a_batch_larger_than_the_data() -> None:
    with pytest.raises(SettingsError, match="batch_size is 64, but there are 32 samples"):
        start(tiny("base", batch_size=64))
