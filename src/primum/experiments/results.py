"""Everything one call of the demo measured, and its JSON form."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import primum
from primum.experiments.timing import StepTime
from primum.experiments.train import Run

PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "matplotlib")


@dataclass(frozen=True)
class Results:
    """Runs and step times, with what is needed to get them again."""

    runs: tuple[Run, ...]
    times: tuple[StepTime, ...]
    seconds: float
    command: str
    environment: dict[str, str]

    @property
    def recipes(self) -> list[str]:
        """Names of the recipes, in the order of the runs."""
        return list(dict.fromkeys(run.settings.recipe.name for run in self.runs))

    def arms(self, recipe: str) -> dict[str, list[Run]]:
        """The recipe's runs by arm, each arm's runs in the order of seeds."""
        arms: dict[str, list[Run]] = {}
        for run in sorted(self.runs, key=lambda run: run.settings.seed):
            if run.settings.recipe.name == recipe:
                arms.setdefault(run.settings.arm, []).append(run)
        return arms


def environment(threads: int) -> dict[str, str]:
    """Versions and hardware, for a reader who wants to compare."""
    return {
        "primum": primum.__version__,
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "processor cores": str(os.cpu_count()),
        "runs at a time, one thread each": str(threads),
    }


def write_json(results: Results, summaries: Sequence[object], path: Path) -> None:
    """Raw numbers and summary; what is not a number (an interval from one seed) becomes null."""
    content = {
        "command": results.command,
        "seconds": round(results.seconds, 1),
        "environment": results.environment,
        "summary": summaries,
        "runs": [asdict(run) for run in results.runs],
        "step_times": [asdict(time) for time in results.times],
    }
    path.write_text(json.dumps(_finite(content), indent=1, allow_nan=False), encoding="utf-8")


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:  # NaN and infinities
        return None
    return value


def _processor() -> str:
    """The processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"
