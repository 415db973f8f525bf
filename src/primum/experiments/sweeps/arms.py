"""The arms of a comparison by name: ways of taking steps, each with the settings it listens to.

Controls ask whether a gain could have come from something else than who gets the weight; `ABOUT`
says what each of them does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

RadiusSchedule = Literal["constant", "grow-linear", "grow-cosine", "fade-linear", "fade-cosine"]

ABOUT: dict[str, str] = {
    "base": "plain training, watched now and then",
    "paper": "the paper's own recipe",
    "primum": "primum.attach",
    "permuted": "control: primum's weights, shuffled over the batch",
    "normalised": "control: primum's weights, scaled to mean 1",
    "lr-matched": "control: base with lr raised by primum's mean weight, seed by seed",
    "time-matched": "control: base given primum's extra time as extra steps",
    "focal": "control: focal loss, unweighted otherwise",
    "loss-weighted": "control: primum's weights of the step, the largest to the largest loss",
    "upgrad": "TorchJD's UPGrad weights on the same Gram matrix",
}

_SOLVED = ("radius", "max_extra_weight", "max_iters", "radius_schedule")
LISTENS: dict[str, tuple[str, ...]] = {
    "base": (),
    "paper": ("radius", "max_extra_weight", "radius_schedule"),
    "primum": _SOLVED,
    "permuted": _SOLVED,
    "normalised": _SOLVED,
    "lr-matched": (*_SOLVED, "lr_match"),
    "time-matched": (*_SOLVED, "time_factor"),
    "focal": ("focal_gamma",),
    "loss-weighted": _SOLVED,
    "upgrad": ("upgrad_scale",),
}


class ArmError(ValueError):
    """An arm that does not exist or cannot be had, with what to do about it."""


@dataclass(frozen=True)
class Arm:
    """An arm and its settings; those it does not listen to keep their defaults.

    Args:
        name: a key of `ABOUT`.
        radius: of the trust region, at its largest.
        max_extra_weight: bound on any extra weight.
        max_iters: solver iterations per step.
        radius_schedule: how the radius goes over training: all the time the same, from 0 up to
            `radius`, or from `radius` down to 0.
        lr_match: one factor for the whole run, or one for each epoch.
        time_factor: steps of time-matched, as a multiple of base's; None measures it.
        focal_gamma: exponent of the focal loss.
        upgrad_scale: weights as published, whose mean is at least 1, or divided by their mean.
    """

    name: str = "primum"
    radius: float = 0.2
    max_extra_weight: float = 2.0
    max_iters: int = 20
    radius_schedule: RadiusSchedule = "constant"
    lr_match: Literal["overall", "epoch"] = "overall"
    time_factor: float | None = None
    focal_gamma: float = 2.0
    upgrad_scale: Literal["published", "mean-1"] = "published"

    def __post_init__(self) -> None:
        if self.name not in ABOUT:
            raise ArmError(f"unknown arm {self.name!r}; choose from {', '.join(ABOUT)}")
        heard = LISTENS[self.name]
        deaf = [f.name for f in fields(self) if f.name not in ("name", *heard) and self._own(f)]
        if deaf:
            has = ", ".join(heard) or "no settings"
            raise ArmError(f"{self.name} does not listen to {', '.join(deaf)}; it has {has}")
        if not 0 <= self.radius < float("inf"):
            raise ArmError(f"radius must be >= 0 and finite, got {self.radius}")
        if not 0 < self.max_extra_weight < float("inf"):
            raise ArmError(f"max_extra_weight must be > 0 and finite, got {self.max_extra_weight}")
        if self.max_iters < 1:
            raise ArmError(f"max_iters must be >= 1, got {self.max_iters}")
        if self.focal_gamma < 0:
            raise ArmError(f"focal_gamma must be >= 0, got {self.focal_gamma}")
        if self.time_factor is not None and not 1 <= self.time_factor <= 100:
            raise ArmError(f"time_factor must be between 1 and 100, got {self.time_factor}")
        for what, choices in CHOICES.items():
            if getattr(self, what) not in choices:
                raise ArmError(
                    f"{what} must be one of {', '.join(choices)}, got {getattr(self, what)!r}"
                )

    def _own(self, field: Any) -> bool:
        return bool(getattr(self, field.name) != field.default)

    @classmethod
    def parse(cls, text: str, defaults: Mapping[str, Any] | None = None) -> Arm:
        """`primum`, or `primum@radius=0.4,max_iters=50`; `defaults` go to those who listen.

        Examples:
            >>> Arm.parse("primum@radius=0.4").radius
            0.4
        """
        name, _, rest = text.partition("@")
        if name not in ABOUT:
            raise ArmError(f"unknown arm {name!r}; choose from {', '.join(ABOUT)}")
        given = {k: v for k, v in (defaults or {}).items() if k in LISTENS[name]}
        for part in filter(None, rest.split(",")):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            key = key.replace("-", "_")
            if not equals or key not in READ:
                raise ArmError(
                    f"cannot read {part!r} in {text!r}; arms are written name or "
                    f"name@setting=value,... with {', '.join(LISTENS[name]) or 'no settings here'}"
                )
            try:
                given[key] = READ[key](value)
            except ValueError as error:
                raise ArmError(f"{key} in {text!r}: {error}") from error
        return cls(name, **given)

    @property
    def label(self) -> str:
        """Name and whatever is not at its default; no two arms share it."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if self._own(f)}
        own.pop("name", None)
        settings = ",".join(f"{key}={value}" for key, value in own.items())
        return f"{self.name}@{settings}" if settings else self.name

    def settings(self) -> dict[str, Any]:
        """What it listens to, by name."""
        return {name: getattr(self, name) for name in LISTENS[self.name]}

    @property
    def reference(self) -> Arm:
        """The arm of primum whose runs this one is matched to."""
        return Arm("primum", **{name: getattr(self, name) for name in _SOLVED})

    @property
    def needs(self) -> tuple[Arm, ...]:
        """Arms whose run of the same seed has to be finished before."""
        if self.name == "lr-matched":
            return (self.reference,)
        if self.name == "time-matched" and self.time_factor is None:
            return (Arm("base"), self.reference)
        return ()


READ: dict[str, Any] = {
    "radius": float,
    "max_extra_weight": float,
    "max_iters": int,
    "radius_schedule": str,
    "lr_match": str,
    "time_factor": float,
    "focal_gamma": float,
    "upgrad_scale": str,
}
CHOICES: dict[str, tuple[str, ...]] = {
    "radius_schedule": get_args(RadiusSchedule),
    "lr_match": ("overall", "epoch"),
    "upgrad_scale": ("published", "mean-1"),
}
