"""Arms: the training methods that are compared, by name, with the settings that each accepts.

Controls test whether a gain has other causes than the choice of the samples that get the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

from lab.errors import UserError
from primum.kernel.recipe import RADIUS
from primum.paper import PaperSettings

Task = Literal["images", "language"]
Per = Literal["sample", "token"]
_RADIUS = ("radius", "max_extra_weight", "per")
_SOLVED = (*_RADIUS, "max_iters")
PER: dict[str, Per] = {"images": "sample", "language": "token"}  # the default of a task


class ArmInfo(NamedTuple):
    """Help text of an arm, the settings it accepts, and a phrase for verdicts about it."""

    about: str
    accepts: tuple[str, ...] = ()
    phrase: str = ""


ARMS: dict[str, ArmInfo] = {
    "base": ArmInfo("plain training, observed in every tenth step"),
    "paper": ArmInfo(
        "the paper's own recipe",
        _RADIUS,
        "the paper's recipe",
    ),
    "primum": ArmInfo("primum.attach", _SOLVED),
    "permuted": ArmInfo(
        "control: primum's weights, shuffled over the batch",
        _SOLVED,
        "the same weights given to random samples",
    ),
    "normalised": ArmInfo(
        "control: primum's weights, scaled to mean 1",
        _SOLVED,
        "the same weights, divided by their mean",
    ),
    "lr-matched": ArmInfo(
        "control: base with lr raised by primum's mean weight, seed by seed",
        (*_SOLVED, "lr_match"),
        "a learning rate raised by the same mean factor",
    ),
    "time-matched": ArmInfo(
        "control: base with extra steps that take as long as primum's extra time",
        (*_SOLVED, "time_factor"),
        "plain training for as long as primum takes",
    ),
    "focal": ArmInfo("control: focal loss, no other weights", ("focal_gamma",), "the focal loss"),
    "loss-weighted": ArmInfo(
        "control: primum's weights, the largest to the sample with the largest loss",
        _SOLVED,
        "the same weights, given by the size of the loss",
    ),
    "damped": ArmInfo(
        "control: base with a share of the mean gradient at the head's output removed",
        ("damping",),
        "a damped common shift of the logits",
    ),
    "upgrad": ArmInfo(
        "TorchJD's UPGrad weights on the same Gram matrix", ("upgrad_scale",), "UPGrad"
    ),
}
# They need one loss per sample, or were written for one.
IMAGES_ONLY = ("damped", "upgrad")
CONTROLS = ("permuted", "normalised", "loss-weighted", "focal", "lr-matched", "time-matched")


def _setting(default: Any, kind: type, about: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"kind": kind, "help": about, "choices": choices})


@dataclass(frozen=True)
class Arm:
    """An arm with its settings; those it does not accept stay at their defaults.

    `time_factor`: number of steps
    as a multiple of base's; None measures it. `task` sets the default of `per`, which sets the
    default of `radius`: the library's, or the paper's for its recipe.
    """

    name: str = "primum"
    radius: float = _setting(
        None,
        float,
        f"radius of the trust region ({RADIUS['sample']}; language: {RADIUS['token']}; paper: "
        f"{PaperSettings().radius})",
    )
    max_extra_weight: float = _setting(2.0, float, "bound on any extra weight (2)")
    max_iters: int = _setting(20, int, "solver iterations per step (20)")
    lr_match: Literal["overall", "epoch"] = _setting(
        "overall",
        str,
        "lr-matched: one factor per run or per epoch (overall)",
        ("overall", "epoch"),
    )
    time_factor: float | None = _setting(
        None, float, "time-matched: steps as a multiple of base's (measured)"
    )
    focal_gamma: float = _setting(2.0, float, "focal: exponent (2)")
    upgrad_scale: Literal["published", "mean-1"] = _setting(
        "published",
        str,
        "upgrad: weights as published or divided by their mean (published)",
        ("published", "mean-1"),
    )
    damping: float = _setting(0.75, float, "damped: share of the mean gradient removed (0.75)")
    per: Per = _setting(  # noqa: RUF009
        None, str, "language: reweight tokens, or whole sequences (token)", get_args(Per)
    )
    task: Task = "images"

    def __post_init__(self) -> None:
        if self.name not in ARMS:
            raise UserError(f"unknown arm {self.name!r}; choose from {', '.join(ARMS)}")
        if self.task != "images" and self.name in IMAGES_ONLY:
            raise UserError(f"arm {self.name} is for images; leave it out for {self.task}")
        for key, value in self._usual().items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        if self.task == "images" and self.per != "sample":
            raise UserError(f"per={self.per} is for language; images have one row per sample")
        accepted = ARMS[self.name].accepts
        extra = [key for key in self._changed() if key not in accepted]
        if extra:
            has = ", ".join(accepted) or "no settings"
            raise UserError(f"arm {self.name} does not accept {', '.join(extra)}; it has {has}")
        bounds = {"radius": 0, "max_iters": 1, "focal_gamma": 0}
        for what, least in bounds.items():
            value = getattr(self, what)
            if not least <= value < float("inf"):
                raise UserError(f"{what} must be >= {least} and finite, got {value}")
        if not 0 < self.max_extra_weight < float("inf"):
            raise UserError(f"max_extra_weight must be > 0 and finite, got {self.max_extra_weight}")
        if not 0 < self.damping <= 1:
            raise UserError(f"damping must be > 0 and at most 1, got {self.damping}")
        if self.time_factor is not None and not 1 <= self.time_factor <= 100:
            raise UserError(f"time_factor must be between 1 and 100, got {self.time_factor}")
        for each in fields(self):
            choices = each.metadata.get("choices")
            value = getattr(self, each.name)
            if choices and value not in choices:
                raise UserError(f"{each.name} must be one of {', '.join(choices)}, got {value!r}")

    def _usual(self) -> dict[str, Any]:
        """The defaults of all settings."""
        per = PER[self.task]
        radius = PaperSettings().radius if self.name == "paper" else RADIUS[per]
        return {each.name: each.default for each in arm_settings()} | {"radius": radius, "per": per}

    def _changed(self) -> dict[str, Any]:
        """Settings that are not at their default."""
        usual = self._usual()
        return {name: getattr(self, name) for name in usual if getattr(self, name) != usual[name]}

    @classmethod
    def parse(
        cls, text: str, defaults: Mapping[str, Any] | None = None, task: Task = "images"
    ) -> Arm:
        """An arm from `primum` or `primum@radius=0.4,max_iters=50`.

        Args:
            text: Name, and settings after an `@`.
            defaults: Settings for all arms; each arm takes those it accepts.
            task: Of the runs.

        Examples:
            >>> Arm.parse("primum@radius=0.4").radius
            0.4
        """
        name, _, rest = text.partition("@")
        if name not in ARMS:
            raise UserError(f"unknown arm {name!r}; choose from {', '.join(ARMS)}")
        accepted = ARMS[name].accepts
        given = {key: value for key, value in (defaults or {}).items() if key in accepted}
        kinds = {each.name: each.metadata["kind"] for each in arm_settings()}
        for part in filter(None, rest.split(",")):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            key = key.replace("-", "_")
            if not equals or key not in kinds:
                raise UserError(
                    f"cannot read {part!r} in {text!r}; write an arm as name or "
                    f"name@setting=value,... with {', '.join(accepted) or 'no settings here'}"
                )
            try:
                given[key] = kinds[key](value)
            except ValueError as error:
                raise UserError(f"{key} in {text!r}: {error}") from error
        return cls(name, task=task, **given)

    @property
    def label(self) -> str:
        """Name and non-default settings; unique for each arm."""
        return self._labelled(self._changed())

    def label_at(self, radius: float) -> str:
        """The label, if this radius were the default."""
        changed = {name: value for name, value in self._changed().items() if name != "radius"}
        differs = self.radius != radius and "radius" in ARMS[self.name].accepts
        return self._labelled({"radius": self.radius, **changed} if differs else changed)

    def _labelled(self, changed: Mapping[str, Any]) -> str:
        settings = ",".join(f"{key}={value}" for key, value in changed.items())
        return f"{self.name}@{settings}" if settings else self.name

    def settings(self) -> dict[str, Any]:
        """The settings that the arm accepts, by name; `per` only if there is a choice.

        The radius could once change during training; stored runs are found with that setting.
        """
        names = [each for each in ARMS[self.name].accepts if self.task != "images" or each != "per"]
        found = {name: getattr(self, name) for name in names}
        return found | ({"radius_schedule": "constant"} if "radius" in found else {})

    @property
    def reference(self) -> Arm:
        """The arm of primum that a matched control is matched to."""
        return Arm("primum", task=self.task, **{name: getattr(self, name) for name in _SOLVED})

    @property
    def needs(self) -> tuple[Arm, ...]:
        """Arms whose run with the same seed must be finished first."""
        if self.name == "lr-matched":
            return (self.reference,)
        if self.name == "time-matched" and self.time_factor is None:
            return (Arm("base", task=self.task), self.reference)
        return ()


def arm_settings() -> list[Any]:
    """The dataclass fields that are settings, with type, help and choices in their metadata."""
    return [each for each in fields(Arm) if each.metadata]
