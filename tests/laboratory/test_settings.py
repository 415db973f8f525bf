"""Keys: the same for the same run, different for any other."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.arms import Arm
from lab.errors import UserError
from lab.images import DataError
from lab.settings import LookSettings, Matched, RunSettings
from laboratory.conftest import TEXT, TINY, tiny

OTHERS: dict[str, Any] = {
    "model": "vit-micro",
    "norm": "batch",
    "data": "digits",
    "label_column": "label",
    "optimizer": "adamw",
    "lr": 0.3,
    "lr_scale": 2.0,
    "weight_decay": 0.01,
    "steps": 3,
    "train_size": 31,
    "test_size": 11,
    "image_size": 9,
    "classes": 5,
    "ema": 0.9,
    "clip": 1.0,
    "augment": "crop-flip",
    "schedule": "step",
    "precision": "bf16",
    "device": "cuda",
    "arm": Arm("primum"),
    "eps": 1e-6,
    "order": "stream",
    "look": LookSettings(),
    "views": 6,
    "tokens": "word",
    "evaluate_steps": 2,
    "warmup_steps": 2,
    "shift_every": 2,
}


def another(name: str, value: Any) -> Any:
    if name in OTHERS:
        return OTHERS[name]
    return not value if isinstance(value, bool) else value + (1 if isinstance(value, int) else 0.05)


@pytest.mark.parametrize("name", [each.name for each in fields(RunSettings) if each.name != "task"])
def test_every_setting_is_in_the_key(name: str) -> None:
    point = TEXT if name in ("tokens", "vocabulary", "length") else TINY
    if name == "data":
        point = replace(TINY, image_size=None, classes=None)
    value = another(name, getattr(point, name))
    if name in ("beta1", "momentum", "beta2"):
        value = 0.5
    assert replace(point, **{name: value}).key != point.key


def test_the_key_does_not_change_from_one_day_to_the_next() -> None:
    """Runs of last month are found again: raise VERSION when the same settings change meaning."""
    assert RunSettings().key == "3c23658fb31098ae"
    assert len(RunSettings().key) == 16


def test_keys_of_text_depend_on_its_content_and_not_on_its_place() -> None:
    kjv = replace(TEXT, data="kjv")
    assert kjv.key != TEXT.key
    assert kjv.shared()["text"] == "cd45f0c9ceda"
    assert replace(TEXT, data="a.txt:0123").key != replace(TEXT, data="a.txt:4567").key
    assert TEXT.shared()["task"] == "language"
    assert {"augment", "norm", "label_noise", "views", "bias_lr"}.isdisjoint(TEXT.shared())
    assert {"task", "tokens", "length", "vocabulary"}.isdisjoint(TINY.shared())


def test_defaults_of_language() -> None:
    assert replace(TEXT, batch_size=128).rate == pytest.approx(
        2 * replace(TEXT, batch_size=32).rate
    )
    assert replace(TEXT, optimizer="sgd").decay == 0.0
    assert TEXT.arm == Arm("base", task="language")
    assert TEXT.title == "gpt-nano on chars of python-docs, AdamW, batches of 4 x 8"


def test_values_that_are_given_and_those_that_follow_are_the_same_run() -> None:
    point = RunSettings(batch_size=512)
    assert point.rate == pytest.approx(0.2)
    told = replace(point, lr=point.rate, weight_decay=1e-4, norm="group")
    assert told.key == point.key
    assert replace(point, lr=0.1, lr_scale=2.0).key == replace(point, lr=0.2).key
    assert RunSettings(optimizer="adamw").rate == pytest.approx(1e-3)


def test_a_setting_that_an_arm_does_not_accept_changes_nothing() -> None:
    assert tiny("base").key == replace(TINY, arm=Arm.parse("base", {"radius": 0.4})).key
    assert tiny("primum").key != tiny("primum@radius=0.3").key


def test_settings_of_all_arms_and_seeds_are_shared_and_plain() -> None:
    assert tiny("primum", seed=3).shared() == tiny("base").shared()
    assert json.loads(json.dumps(TINY.shared())) == TINY.shared()
    assert "data_dir" not in TINY.shared()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"epochs": 0}, "epochs must be >= 1"),
        ({"steps": 0}, "steps must be >= 1"),
        ({"seed": -1}, "seed must be >= 0"),
        ({"lr": 0.0}, "lr must be > 0 and finite"),
        ({"lr": float("nan")}, "lr must be > 0 and finite"),
        ({"clip": -1.0}, "clip must be > 0"),
        ({"ema": 1.0}, "ema must be >= 0 and below 1, got 1.0"),
        ({"beta1": 1.0, "optimizer": "adamw"}, "beta1 must be >= 0 and below 1"),
        ({"beta2": -0.1}, "beta2 must be >= 0 and below 1"),
        ({"momentum": 1.5}, "momentum must be between 0 and 1, got 1.5"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs momentum > 0"),
        ({"warmup": -1.0}, "warmup must be >= 0"),
        ({"optimizer": "adam"}, "optimizer must be one of sgd, adamw, got 'adam'"),
        ({"augment": "paint"}, "augment must be one of none, crop-flip"),
        ({"views": 3}, "views must be one of 1, 2, 6, got 3"),
        ({"bias_lr": 0.0}, "bias_lr must be > 0 and finite"),
        ({"precision": "int8"}, "precision must be one of fp32, bf16, fp16"),
        ({"length": 8}, "length is for language; leave it out for images"),
        ({"tokens": "word"}, "tokens is for language"),
        ({"evaluate_steps": 0}, "evaluate_steps must be >= 1"),
        ({"warmup_steps": -1}, "warmup_steps must be >= 0"),
        ({"arm": Arm("primum", task="language")}, "arm primum is for language"),
    ],
)
def test_errors_name_the_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(TINY, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label_noise": 0.1}, "label_noise is for images; leave it out for language"),
        ({"augment": "none"}, "augment is for images"),
        ({"views": 2}, "views is for images"),
        ({"data": "cifar10"}, "unknown text 'cifar10'; choose from python-docs, kjv, or pass a"),
        ({"vocabulary": 1}, "vocabulary must be >= 2, got 1"),
        ({"length": 0}, "length must be >= 1, got 0"),
        ({"arm": Arm("primum")}, "arm primum is for images"),
        ({"look": LookSettings()}, "are only for images"),
    ],
)
def test_errors_of_language(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(TEXT, **change)


def test_what_is_wrong_with_the_data_is_said_at_once() -> None:
    with pytest.raises(DataError, match="label_noise must be between 0 and 1"):
        replace(TINY, label_noise=2.0)


@pytest.mark.parametrize("change", [{"every": 0}, {"batches": 0}, {"radius": -1.0}])
def test_when_to_measure(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(change))):
        LookSettings(**change)


def test_factors_of_later_epochs() -> None:
    assert [Matched((2.0, 3.0)).lr_factor(epoch) for epoch in (0, 1, 5)] == [2.0, 3.0, 3.0]


def test_a_module_name_stands_for_one_thing_in_the_laboratory() -> None:
    names = [path.stem for path in Path(lab.__file__).parent.rglob("[a-z]*.py")]
    assert len(names) == len(set(names))
