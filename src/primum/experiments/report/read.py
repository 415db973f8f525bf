"""From paths to runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from primum.experiments.runs import FORMAT, RunError, RunRecord, run_from


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """All runs in the files, and in the JSON files of the folders, sorted by name.

    A file holds one run (`primum-run-1`) or those of a demo. In folders, other JSON is passed over.

    Raises:
        RunError: a path does not exist, a file is no run, nothing was found, or a run comes twice.
    """
    found: list[tuple[Path, RunRecord]] = []
    for path in _unique(paths):
        if not path.exists():
            raise RunError(f"{path} does not exist")
        files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        runs = [(f, run) for f in files for run in _read(f, strict=not path.is_dir())]
        if not runs:
            raise RunError(
                f"no runs in {path}; a run is a JSON file with "
                f'"format": "{FORMAT}", or results.json of primum demo'
            )
        found += [pair for pair in runs if pair not in found]
    seen: dict[str, Path] = {}
    for path, run in found:
        key = json.dumps([run.name, run.settings, run.arm, run.seed], sort_keys=True, default=str)
        if key in seen:
            raise RunError(
                f"{path} and {seen[key]} both have {run.name}, arm {run.arm}, seed {run.seed}; "
                "leave one of them out"
            )
        seen[key] = path
    return [run for _, run in found]


def demo_runs(content: Mapping[str, Any]) -> list[RunRecord]:
    """The runs of a demo, from the content of its results.json."""
    times = {
        (each["recipe"], each["arm"], each["seed"]): each["milliseconds"]
        for each in content["step_times"]
    }
    return [_demo_run(run, content, times) for run in content["runs"]]


def _unique(paths: Sequence[Path]) -> list[Path]:
    return list({path.resolve(): path for path in paths}.values())


def _read(path: Path, *, strict: bool) -> list[RunRecord]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read as JSON: {error}") from error
    try:
        if isinstance(content, Mapping) and {"runs", "step_times"} <= content.keys():
            return demo_runs(content)
        if not strict and not (isinstance(content, Mapping) and content.get("format") == FORMAT):
            return []
        return [run_from(content)]
    except RunError as error:
        raise RunError(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is not what primum demo writes: {error!r}") from error


def _demo_run(
    run: Mapping[str, Any],
    content: Mapping[str, Any],
    times: Mapping[tuple[str, str, int], float | None],
) -> RunRecord:
    settings = run["settings"]
    recipe, arm, seed = dict(settings["recipe"]), settings["arm"], settings["seed"]
    count = len(run["harmed_before"])
    steps = {
        "step": list(range(count)),
        "batch_size": [recipe["batch_size"]] * count,
        "applied": [arm in ("primum", "permuted")] * count,
        "harmed_before": list(run["harmed_before"]),
        "mean_extra_weight": list(run["extra_weight"]),
    }
    if arm != "permuted":  # there the prediction is of other weights than those applied
        steps["harmed_after"] = list(run["harmed_after"])
    title, name = recipe.pop("title"), recipe.pop("name")
    curves = {key: list(run[key]) for key in ("train_loss", "test_loss", "test_accuracy")}
    return RunRecord(
        name=title,
        arm=arm,
        seed=seed,
        settings={"data": "noisy handwritten digits", **recipe},
        arm_settings={"lr_factor": settings["lr_factor"]},
        environment=dict(content["environment"]),
        command=content["command"],
        curves={"epoch": list(range(1, len(curves["test_loss"]) + 1)), **curves},
        steps=steps,
        final={
            "test_accuracy": run["test_accuracy"][-1],
            "test_loss": run["test_loss"][-1],
            "ms_per_step": times.get((name, arm, seed)),
        },
        batch={key: list(v) if key != "step" else v for key, v in run["batch"].items()},
    )
