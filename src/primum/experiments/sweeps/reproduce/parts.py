"""Parts of experiments that are no runs of a sweep: kept once finished, taken up if cut.

DIR/parts/<name>-<key>.json      a finished part
DIR/checkpoints/<name>-<key>.pt  one under way; removed when it is finished
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import torch
from tqdm import tqdm

from primum.experiments.images import DataSettings
from primum.experiments.runs import without_nan
from primum.experiments.sweeps.build import own_random_numbers
from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.ranks import current
from primum.experiments.sweeps.settings import SettingsError
from primum.experiments.sweeps.store import StoreError, load_state, save_state, write_safely

FORMAT = "primum-part-1"
VERSION = 1  # raise it when the same settings no longer give the same numbers


class Work(Protocol):
    """What a part is made by, piece by piece; between two of them it can be put aside.

    `done` and `total` count pieces. A state loads with `weights_only=True`. The result is plain
    values for JSON.
    """

    @property
    def done(self) -> int: ...

    @property
    def total(self) -> int: ...

    @property
    def finished(self) -> bool: ...

    def advance(self) -> object: ...

    def result(self) -> dict[str, Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Part:
    """One of the pieces an experiment puts together.

    Attributes:
        name: Of its files.
        label: In words.
        settings: All that its numbers depend on, as plain values: the device, but no folder of
            this machine and no number of threads, as in the keys of runs.
        device: Of its tensors.
    """

    name: str
    label: str
    settings: Mapping[str, Any]
    device: str

    @property
    def key(self) -> str:
        """16 hex digits that no other settings have."""
        content = {"version": VERSION, **self.settings, "name": self.name, "device": self.device}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def path(self, place: Place) -> Path:
        """Where it is, once it is finished."""
        return place.store.folder / "parts" / f"{self.name}-{self.key}.json"

    def checkpoint_path(self, place: Place) -> Path:
        """Where it is before."""
        return place.store.folder / "checkpoints" / f"{self.name}-{self.key}.pt"


def make_part(part: Part, place: Place, start: Callable[[], Work]) -> dict[str, Any]:
    """The result of a part: from its file, or made to the end from where it was left."""
    if current().size > 1:
        raise SettingsError("this one is made by one process; run it without torchrun")
    place.store.prepare("parts")
    found = find_part(part, place)
    if found is None:
        device = torch.device(part.device)
        with own_random_numbers(0, device):
            work = start()
            state = load_state(part.checkpoint_path(place))
            if state is not None and state.get("key") == part.key:
                work.load_state_dict(state["work"])
                _set_random(state["random"], device)
            _finish(work, part, place, device)
            save_part(part, place, work.result())
        found = find_part(part, place)
        assert found is not None
    part.checkpoint_path(place).unlink(missing_ok=True)
    return found


def _finish(work: Work, part: Part, place: Place, device: torch.device) -> None:
    saved = monotonic()
    with tqdm(
        total=work.total,
        initial=work.done,
        desc=part.label,
        unit="step",
        disable=not sys.stderr.isatty(),
    ) as bar:
        while not work.finished:
            work.advance()
            bar.update()
            if monotonic() - saved >= place.checkpoint_seconds:
                random = _random(device)
                state = {"key": part.key, "work": work.state_dict(), "random": random}
                save_state(part.checkpoint_path(place), state)
                saved = monotonic()


def find_part(part: Part, place: Place) -> dict[str, Any] | None:
    """The result of a finished part, if there is one. What JSON has no number for is NaN."""
    path = part.path(place)
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
        found: dict[str, Any] = _with_nan(content["result"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} cannot be read: {error}; remove it, and the part is made again"
        ) from error
    return found


def save_part(part: Part, place: Place, result: Mapping[str, Any]) -> None:
    """Write a finished part."""
    content = {
        "format": FORMAT,
        "name": part.name,
        "settings": {**part.settings, "device": part.device},
        "environment": place.environment,
        "command": place.command,
        "result": dict(result),
    }
    text = json.dumps(without_nan(content), indent=1, allow_nan=False) + "\n"
    write_safely(part.path(place), text.encode())


def plain_data(data: DataSettings) -> dict[str, Any]:
    """What the data are, not where."""
    return {k: v for k, v in asdict(data).items() if v is not None and not k.endswith("_dir")}


def _random(device: torch.device) -> list[torch.Tensor]:
    """States of the generators that dropout and the like draw from."""
    there = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *there]


def _set_random(states: list[torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def _with_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return float("nan") if value is None else value
