"""Arms by name, and the settings they accept."""

from __future__ import annotations

import pytest

from lab.arms import ARMS, Arm
from lab.errors import UserError


def test_every_arm_is_described_and_can_be_made() -> None:
    assert all(info.about for info in ARMS.values())
    for name in ARMS:
        assert Arm(name).label == name
        assert Arm.parse(name) == Arm(name)


def test_settings_are_read_and_shown() -> None:
    arm = Arm.parse("primum@radius=0.3,max-iters=50")
    assert arm == Arm("primum", radius=0.3, max_iters=50)
    assert arm.label == "primum@radius=0.3,max_iters=50"
    assert Arm.parse(arm.label) == arm


def test_common_settings_reach_only_arms_that_accept_them() -> None:
    given = {"radius": 0.4, "focal_gamma": 1.0}
    assert Arm.parse("base", given) == Arm("base")
    assert Arm.parse("focal", given) == Arm("focal", focal_gamma=1.0)
    assert Arm.parse("permuted@radius=0.1", given) == Arm("permuted", radius=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", r"unknown arm 'nothing'; choose from base, paper, primum"),
        ("primum@radius", r"cannot read 'radius'"),
        ("primum@colour=3", r"cannot read 'colour=3'"),
        ("primum@radius=big", r"radius in 'primum@radius=big'"),
        ("primum@radius=-1", r"radius must be >= 0 and finite, got -1.0"),
        ("primum@radius=inf", r"radius must be >= 0 and finite"),
        ("primum@max_extra_weight=0", r"max_extra_weight must be > 0"),
        ("primum@max_iters=0", r"max_iters must be >= 1 and finite, got 0"),
        ("lr-matched@lr_match=step", r"lr_match must be one of overall, epoch, got 'step'"),
        ("focal@focal_gamma=-1", r"focal_gamma must be >= 0 and finite"),
        ("time-matched@time_factor=0.5", r"time_factor must be between 1 and 100"),
        ("base@radius=0.3", r"arm base does not accept radius; it has no settings"),
        ("paper@max_iters=5", r"arm paper does not accept max_iters"),
    ],
)
def test_errors_name_the_value(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Arm.parse(text)


def test_matched_arms_wait_for_primum_with_the_same_settings() -> None:
    matched = Arm.parse("lr-matched@radius=0.4,lr_match=epoch")
    assert matched.needs == (Arm("primum", radius=0.4),)
    assert Arm("time-matched").needs == (Arm("base"), Arm("primum"))
    assert Arm("time-matched", time_factor=1.5).needs == ()
    assert Arm("permuted").needs == ()


def test_the_task_decides_defaults_and_labels() -> None:
    arm = Arm.parse("primum", task="language")
    assert (arm.radius, arm.per, arm.label) == (0.1, "token", "primum")
    assert Arm.parse("primum@radius=0.1").label == "primum@radius=0.1"
    matched = Arm.parse("time-matched@per=sample", task="language")
    assert matched.needs == (
        Arm("base", task="language"),
        Arm("primum", per="sample", task="language"),
    )
    assert set(arm.settings()) == {
        *("radius", "max_extra_weight", "max_iters", "radius_schedule", "per")
    }
