"""Run records: one training run as plain data, in a JSON file or as a line of a `.jsonl.gz` table.

`compare`, `reproduce`, `demo` and `inspect` write them, `report` reads them, and your
own training loop can write them too (docs/runs.md).
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import primum
from lab.errors import UserError, reading
from lab.files import write_bytes, write_text

FORMAT = "primum-run-1"
TABLE = ".jsonl.gz"  # how the name of a table of runs ends
INDEX = "studies.json"  # lists the studies in a folder of tables
PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "matplotlib")


def _value(value: Any) -> bool:
    """A cell. JSON has integers of any length, columns have not."""
    small = isinstance(value, int) and abs(value) < 2**63
    return value is None or small or isinstance(value, float)


def _columns(table: Any) -> bool:
    return isinstance(table, Mapping) and all(
        isinstance(column, list) and all(_value(each) for each in column)
        for column in table.values()
    )


def _texts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for text in value.values())


def _objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


# What the entries of a run file must be; a page is made of them without further checks.
KINDS: dict[str, Callable[[Any], bool]] = {
    "seed": _value,
    "settings": lambda value: isinstance(value, Mapping),
    "arm_settings": lambda value: isinstance(value, Mapping),
    "environment": _texts,
    **dict.fromkeys(("command", "commit", "date"), lambda value: isinstance(value, str)),
    "seconds": _value,
    "complete": lambda value: isinstance(value, bool),
    "curves": _columns,
    "steps": _columns,
    "final": lambda value: isinstance(value, Mapping) and all(map(_value, value.values())),
    "batch": lambda value: value is None or isinstance(value, Mapping),
    "moments": _objects,
    "protected": _objects,
}


@dataclass(frozen=True)
class RunRecord:
    """One run. Only the first three fields are required; a report shows what is available.

    Tables are dicts of columns of equal length. Non-finite values are `None`.

    Attributes:
        name: What is trained and how, in a few words; runs to be compared share it.
        arm: The training method: `base`, `primum`, `permuted`, ...
        seed: Arms with the same seed share initialisation and batches.
        settings: Plain values, the same for all arms and seeds of a comparison.
        arm_settings: Plain values that apply only to this arm or run.
        environment: Versions and hardware.
        command: The command that created the run.
        commit: The commit of the code, as `git describe --always --dirty` prints it.
        date: When the run was finished, in UTC.
        seconds: Training time.
        complete: Whether training reached its last step.
        curves: A table with a column `epoch` and any of `train_loss`, `test_loss` and
            `test_accuracy` (0 to 1).
        steps: `InterferenceMeter.table()`, or some of its columns.
        final: Last metrics by name: `test_accuracy` (0 to 1), `test_loss`, `ms_per_step`.
        batch: One batch: `step`, and the first-order loss changes `before` and `after`.
        moments: Whole-network measurements, as `inspect` writes them.
        protected: The samples with the most extra weight: `id`, `label`, `seen`, `harmed`,
            `extra_weight`, and `png`, the image as a base64 PNG.
    """

    name: str
    arm: str
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    arm_settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    command: str = ""
    commit: str = ""
    date: str = ""
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
                raise UserError(f"columns of {what} must have equal length, got {sorted(lengths)}")
        if self.curves and "epoch" not in self.curves:
            raise UserError("curves need a column 'epoch'")
        if self.steps and "step" not in self.steps:
            raise UserError("steps need a column 'step'")

    def as_dict(self) -> dict[str, Any]:
        """Content of a run file: plain JSON values, `None` for non-finite numbers."""
        content: dict[str, Any] = without_nan({"format": FORMAT, **asdict(self)})
        return content


def write_run(record: RunRecord, path: Path) -> None:
    """Write a run file atomically."""
    write_text(path, json.dumps(record.as_dict(), indent=1, allow_nan=False) + "\n")


def run_from(content: Any) -> RunRecord:
    """A record from the content of a run file.

    Raises:
        UserError: The content is not a run.
    """
    if not isinstance(content, Mapping):
        raise UserError(f"a run must be a JSON object, got {type(content).__name__}")
    if content.get("format") != FORMAT:
        raise UserError(f'not a run: "format" must be {FORMAT!r}, got {content.get("format")!r}')
    kinds: dict[str, type] = {"name": str, "arm": str, "seed": int}
    for key, kind in kinds.items():
        if not isinstance(content.get(key), kind):
            raise UserError(f'"{key}" must be a {kind.__name__}, got {content.get(key)!r}')
    known = {each.name for each in fields(RunRecord)}
    unknown = content.keys() - known - {"format"}
    if unknown:
        raise UserError(f"unknown entries {sorted(unknown)}; known are {sorted(known)}")
    for key, fits in KINDS.items():
        if key in content and not fits(content[key]):
            raise UserError(f'"{key}" has the wrong type or content: {str(content[key])[:60]}')
    return RunRecord(**{key: value for key, value in content.items() if key in known})


def write_table(path: Path, records: Iterable[RunRecord]) -> None:
    """Write runs as one compressed table: gzipped JSON lines, byte for byte reproducible."""
    lines = (json.dumps(record.as_dict(), allow_nan=False) + "\n" for record in records)
    write_bytes(path, gzip.compress("".join(lines).encode(), mtime=0))


def read_table(path: Path) -> list[RunRecord]:
    """All runs of a compressed table."""
    with reading(path):
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        return [run_from(json.loads(line)) for line in lines]


def read_index(path: Path) -> dict[str, dict[str, Any]]:
    """The studies whose tables are in a folder, by name: page, question, command, planned runs."""
    with reading(path):
        studies = json.loads(path.read_text(encoding="utf-8"))["studies"]
        return {study["name"]: study for study in studies}


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """All runs in these files and folders, sorted by file name.

    A file is a run (`.json`), a table (`.jsonl.gz`), or `results.json` of the demo. Other
    JSON files in folders are ignored.

    Raises:
        UserError: A path does not exist, a file is not a run, nothing was found, or a run occurs
            twice.
    """
    found: list[tuple[Path, RunRecord]] = []
    for path in {path.resolve(): path for path in paths}.values():
        if not path.exists():
            raise UserError(f"{path} does not exist; pass a run file or a folder of run files")
        files = [path]
        if path.is_dir():
            files = sorted([*path.rglob("*.json"), *path.rglob(f"*{TABLE}")])
        runs = [(file, run) for file in files for run in _read(file, strict=not path.is_dir())]
        if not runs:
            raise UserError(
                f'no runs in {path}; a run is a JSON file with "format": "{FORMAT}", '
                f"or a line of a {TABLE} table"
            )
        found += [pair for pair in runs if pair not in found]
    seen: dict[str, Path] = {}
    unique = []
    for path, run in found:
        key = json.dumps([run.name, run.settings, run.arm, run.seed], sort_keys=True, default=str)
        if key not in seen:
            seen[key] = path
            unique.append(run)
        elif run not in unique:
            raise UserError(
                f"{path} and {seen[key]} both have {run.name}, arm {run.arm}, seed {run.seed}; "
                "leave one of them out"
            )
    return unique


def _read(path: Path, *, strict: bool) -> Iterator[RunRecord]:
    if path.name.endswith(TABLE):
        yield from read_table(path)
        return
    with reading(path):
        content = json.loads(path.read_text(encoding="utf-8"))
    lines = content.get("runs") if isinstance(content, Mapping) else None
    if not isinstance(lines, list):
        lines = [content]
    for line in lines:
        if strict or (isinstance(line, Mapping) and line.get("format") == FORMAT):
            with reading(path):
                run = run_from(line)
            yield run


def without_nan(value: Any) -> Any:
    """The value with NaN and infinities, which JSON cannot represent, replaced by None."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def environment(workers: int = 1, threads: int = 1) -> dict[str, str]:
    """Versions, hardware and number of parallel runs, for a run record."""
    found = {
        "primum": primum.__version__,
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "processor cores": str(os.cpu_count()),
    }
    if threads == 1:
        return found | {"runs at a time, one thread each": str(workers)}
    return found | {"runs at a time": str(workers), "threads each": str(threads)}


@cache
def commit() -> str:
    """The commit of the code, if it runs from a checkout; otherwise only the version is known."""
    here = Path(primum.__file__).parent
    try:
        inside, found = (
            subprocess.run(
                ["git", "-C", str(here), *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (["rev-parse", "--show-prefix"], ["describe", "--always", "--dirty"])
        )
    except (OSError, subprocess.CalledProcessError):
        return f"unknown ({primum.__version__})"
    return found if inside == "src/primum/" else f"unknown ({primum.__version__})"


def environments(records: Iterable[RunRecord]) -> dict[str, list[str]]:
    """Versions and hardware of several runs: all values of each entry, in order."""
    found: dict[str, dict[str, None]] = {}
    for run in records:
        for key, value in run.environment.items():
            found.setdefault(key, {})[value] = None
    return {key: list(values) for key, values in found.items()}


def processor() -> str:
    """Name of the CPU; "unknown" if the system does not provide it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"
