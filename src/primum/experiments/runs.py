"""Run files: one JSON per training run, the same whoever writes it and whoever reads it.

`primum inspect` writes them, `primum report` reads them, and so may you (docs/runs.md).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

FORMAT = "primum-run-1"


class RunError(ValueError):
    """A file that is no run: which one, and what is wrong with it."""


@dataclass(frozen=True)
class RunRecord:
    """One run. Only the first three are needed; a report shows what is there.

    Tables are columns of equal length, by name. What is not a number is `None`.

    Attributes:
        name: What is trained and how, in a few words; runs to be compared share it.
        arm: The way of taking steps: `base`, `primum`, `permuted`, ...
        seed: Arms with the same seed started alike.
        settings: Plain values, the same for all arms and seeds of a comparison.
        arm_settings: Plain values of this arm or this run alone.
        environment: Versions and hardware.
        command: What to type to get it again.
        seconds: How long it took.
        complete: Whether it reached its end.
        curves: A table with a column `epoch` and any of `train_loss`, `test_loss` and
            `test_accuracy` (0 to 1).
        steps: `InterferenceMeter.table()`, or some of its columns.
        final: Last figures by name: `test_accuracy` (0 to 1), `test_loss`, `ms_per_step`.
        batch: One batch: `step`, and the first-order loss changes `before` and `after`.
        moments: The whole network at several steps, as `primum inspect` writes them.
        protected: The samples with most extra weight: `id`, `label`, `seen`, `harmed`,
            `extra_weight`, and the image as base64 of a PNG under `png`.
    """

    name: str
    arm: str
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    arm_settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    command: str = ""
    seconds: float | None = None
    complete: bool = True
    curves: dict[str, list[Any]] = field(default_factory=dict)
    steps: dict[str, list[Any]] = field(default_factory=dict)
    final: dict[str, float | None] = field(default_factory=dict)
    batch: dict[str, Any] | None = None
    moments: list[dict[str, Any]] = field(default_factory=list)
    protected: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for what in ("curves", "steps"):
            lengths = {len(column) for column in getattr(self, what).values()}
            if len(lengths) > 1:
                raise RunError(f"columns of {what} must be equally long, got {sorted(lengths)}")
        if self.curves and "epoch" not in self.curves:
            raise RunError("curves need a column epoch")
        if self.steps and "step" not in self.steps:
            raise RunError("steps need a column step")


def write_run(record: RunRecord, path: Path) -> None:
    """Write a run file, whole or not at all."""
    content = {"format": FORMAT, **asdict(record)}
    write_whole(path, json.dumps(without_nan(content), indent=1, allow_nan=False) + "\n")


def run_from(content: Any) -> RunRecord:
    """A record from the content of a run file."""
    if not isinstance(content, Mapping):
        raise RunError(f"a run is a JSON object, got {type(content).__name__}")
    if content.get("format") != FORMAT:
        raise RunError(f'no run file: "format" must be {FORMAT!r}, got {content.get("format")!r}')
    kinds: dict[str, type] = {"name": str, "arm": str, "seed": int}
    for key, kind in kinds.items():
        if not isinstance(content.get(key), kind):
            raise RunError(f'"{key}" must be a {kind.__name__}, got {content.get(key)!r}')
    known = {each.name for each in fields(RunRecord)}
    unknown = content.keys() - known - {"format"}
    if unknown:
        raise RunError(f"unknown entries {sorted(unknown)}; known are {sorted(known)}")
    return RunRecord(**{key: value for key, value in content.items() if key in known})


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def without_nan(value: Any) -> Any:
    """The same with None for what is not a finite number, as JSON has none."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value
