"""Every setting has an option, and options give back the settings."""

from __future__ import annotations

import argparse

import pytest

from lab import options
from lab.arms import Arm, arm_settings
from lab.settings import RunSettings, run_options
from laboratory.conftest import TINY, TINY_WORDS


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_arms(parser)
    options.add_place(parser, "out")
    options.add_settings(parser)
    return parser.parse_args(words)


def test_defaults_are_those_of_the_settings() -> None:
    assert options.points(parse()) == [RunSettings()]
    assert options.arms(parse()) == [Arm("base"), Arm("primum")]


def test_the_command_line_says_what_the_settings_say() -> None:
    assert options.points(parse(*TINY_WORDS)) == [TINY]


def test_every_setting_has_an_option_with_help() -> None:
    parser = argparse.ArgumentParser()
    options.add_arms(parser)
    options.add_settings(parser)
    helped = {action.dest for action in parser._actions if action.help}
    wanted = {each.name for each in (*run_options(), *arm_settings())}
    assert wanted <= helped
    assert {"arm", "seed", "look", "order"}.isdisjoint(wanted)


def test_several_values_make_a_grid() -> None:
    found = options.points(parse("--lr-scale", "0.5", "1", "2", "--label-noise", "0", "0.4"))
    assert [(p.lr_scale, p.label_noise) for p in found] == [
        (scale, noise) for noise in (0.0, 0.4) for scale in (0.5, 1.0, 2.0)
    ]


def test_flags() -> None:
    (point,) = options.points(parse("--nesterov", "--no-decay-norms"))
    assert point.nesterov
    assert not point.decay_norms


def test_arms_with_settings_of_their_own_and_in_common() -> None:
    found = options.arms(parse("--arms", "primum", "primum@radius=0.4", "focal", "--radius", "0.1"))
    assert found == [Arm("primum", radius=0.1), Arm("primum", radius=0.4), Arm("focal")]


@pytest.mark.parametrize(
    "words", [("--optimizer", "adam"), ("--epochs", "many"), ("--radius-schedule", "up")]
)
def test_values_that_do_not_exist(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(*words)
    assert stopped.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_folders_of_this_machine_are_left_out() -> None:
    words = ["compare", "--data-dir", "/secret/data", "--cache-dir=/secret/cache", "--out", "/s/x"]
    command = options.typed_command(words)
    assert command == "python -m lab compare --data-dir DIR --cache-dir=DIR --out x"
