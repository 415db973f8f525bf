"""What cannot work is refused before the first run, and nothing else is."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.sweeps.conftest import TINY, tiny
from primum.experiments.models import ModelError
from primum.experiments.sweeps import check
from primum.experiments.sweeps.arms import ABOUT, ArmError
from primum.experiments.sweeps.check import check_runs
from primum.experiments.sweeps.ranks import Ranks
from primum.experiments.sweeps.settings import RunSettings, SettingsError

USERS = """
from torch import nn

def convolution(classes, image_size):
    return nn.Sequential(nn.Conv2d(3, classes, image_size), nn.Flatten())

def two(classes, image_size):
    heads = {name: nn.Linear(3 * image_size ** 2, classes) for name in ("one", "other")}
    return nn.Sequential(nn.Flatten(), nn.ModuleDict(heads))
"""


def test_what_works_is_let_through_and_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    check_runs([])
    check_runs([tiny(arm) for arm in ABOUT])
    check_runs([RunSettings(data="owner/unknown"), RunSettings(model="convnext-t")])
    assert torch.equal(torch.get_rng_state(), before)


def test_devices_and_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="device 'nonsense'"):
        check_runs([TINY, tiny(device="nonsense")])
    monkeypatch.setattr(check, "current", lambda: Ranks(0, 2))
    with pytest.raises(ArmError, match="loss-weighted"):
        check_runs([TINY, tiny("loss-weighted")])
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torchjd.aggregation", None)
    with pytest.raises(ArmError, match="torchjd"):
        check_runs([TINY, tiny("upgrad")])


def test_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("headless_models.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    for model, message in (
        ("convnext-t", "convnext-t: image_size must be >= 32, got 8"),
        ("headless_models:convolution", "headless_models:convolution: .* has no nn.Linear"),
        ("headless_models:two", "pass head= one of: 1.one .* by a method get_classifier"),
    ):
        with pytest.raises(ModelError, match=message):
            check_runs([TINY, replace(TINY, model=model)])
    elsewhere = RunSettings(data="cifar10")  # not loaded for this
    with pytest.raises(ModelError, match="cannot import 'no_such_module'"):
        check_runs([elsewhere, replace(elsewhere, model="no_such_module:f")])
