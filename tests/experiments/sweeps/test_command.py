"""Errors a user can mend become a line; others keep their trace."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from primum.experiments.sweeps.command import guarded, place_of
from primum.experiments.sweeps.settings import SettingsError
from primum.experiments.sweeps.store import StoreError


def arguments(**changes: object) -> argparse.Namespace:
    known = {"out": Path("x"), "data_dir": None, "cache_dir": None, "checkpoint_seconds": 1.0}
    return argparse.Namespace(
        **known | {"workers": 1, "threads": 1, "data_workers": 0, "seeds": 3} | changes
    )


def test_what_can_be_mended_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> int:
        raise StoreError("no space left to write x")

    assert guarded("compare", Path("x"), full) == 1
    assert capsys.readouterr().err == "primum compare: no space left to write x\n"


def test_a_package_of_an_extra_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def without() -> int:
        raise ModuleNotFoundError(name="datasets.config")

    assert guarded("compare", Path("x"), without) == 1
    assert capsys.readouterr().err == (
        "primum compare: the package datasets is missing; pip install 'primum[experiments]'\n"
    )


@pytest.mark.parametrize("error", [ZeroDivisionError(), ModuleNotFoundError(name="primum.nothing")])
def test_a_bug_shows_its_trace(error: Exception) -> None:
    def bug() -> int:
        raise error

    with pytest.raises(type(error)):
        guarded("compare", Path("x"), bug)


def test_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    def pressed() -> int:
        raise KeyboardInterrupt

    assert guarded("compare", Path("folder"), pressed) == 130
    assert "Finished runs are in folder" in capsys.readouterr().err


def test_versions_and_hardware_go_into_the_record() -> None:
    place = place_of(arguments(), "primum compare")
    assert place.environment["runs at a time, one thread each"] == "1"
    place = place_of(arguments(threads=4), "primum compare")
    assert place.environment["threads each"] == "4"
    assert place_of(arguments(data_workers=2), "primum compare").data_workers == 2
    with pytest.raises(SettingsError, match="--seeds must be >= 1, got 0"):
        place_of(arguments(seeds=0), "primum compare")
    with pytest.raises(SettingsError, match="--data-workers must be >= 0, got -1"):
        place_of(arguments(data_workers=-1), "primum compare")
