"""Settings: defaults, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from primum.experiments.images import DataSettings
from primum.experiments.inspection import InspectError, InspectSettings


def test_learning_rates_grow_with_the_root_of_the_batch() -> None:
    assert InspectSettings(batch_size=128).rate == pytest.approx(0.1)
    assert InspectSettings(batch_size=512, optimizer="adamw").rate == pytest.approx(2e-3)
    assert InspectSettings(batch_size=512, lr=0.3).rate == 0.3
    assert InspectSettings(optimizer="adamw").decay == 5e-5
    assert InspectSettings(weight_decay=0.0).decay == 0.0


def test_optimizers() -> None:
    model = nn.Linear(2, 2)
    sgd = InspectSettings(lr=0.2).make_optimizer(model)
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["lr"], sgd.defaults["momentum"]) == (0.2, 0.9)
    assert isinstance(InspectSettings(optimizer="adamw").make_optimizer(model), torch.optim.AdamW)


def test_schedules() -> None:
    settings = InspectSettings(lr=1.0, train_steps=10, schedule="cosine")
    rates = {}
    for name in ("constant", "cosine"):
        chosen = replace(settings, schedule=name)  # type: ignore[arg-type]
        optimizer = chosen.make_optimizer(nn.Linear(2, 2))
        schedule = chosen.make_schedule(optimizer)
        for _ in range(5):
            optimizer.step()
            schedule.step()
        rates[name] = schedule.get_last_lr()[0]
    assert rates == pytest.approx({"constant": 1.0, "cosine": 0.5 + 0.5 * math.cos(math.pi / 2)})


def test_written_down_is_what_arms_and_seeds_share() -> None:
    settings = InspectSettings(data=DataSettings("cifar10", "/secret", "/cache"), seed=3)
    written = settings.as_dict()
    assert "secret" not in str(written)
    assert "cache" not in str(written)
    assert not {"seed", "reduce"} & written.keys()
    assert written["data"]["name"] == "cifar10"
    assert written["lr"] == pytest.approx(0.1)
    assert settings.title == "cnn-small on cifar10, SGD, batches of 128"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "lion"}, "lion"),
        ({"augment": "none?"}, "choose from none"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"every": 0}, "every"),
        ({"batches": 0}, "batches"),
        ({"train_steps": -1}, "train_steps"),
        ({"lr": 0.0}, "lr must be > 0"),
    ],
)
def test_bad_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InspectError, match=message):
        InspectSettings(**given)
