"""The measurements of docs/tutorial.md: what steps do to samples, on CIFAR-10.

Trains small networks plainly, watched, and looks at the whole network after each epoch; then trains
with the extra weights of the head's problem and of the whole network's. Half an hour on a core.

    python benchmarks/tutorial.py --data-dir DIR      # DIR/cifar10: Parquet files
    python benchmarks/tutorial.py --smoke             # generated images, seconds

Finished runs are kept: the same command again goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from _common import RESULTS, describe, environment, finish, write_text
from torch import Tensor, nn

import primum
from primum.diagnostics import Probe, measure
from primum.experiments.images import DataSettings, ImageData, load_data
from primum.experiments.inspection import Inspection, InspectSettings
from primum.experiments.inspection.moment import evaluate
from primum.experiments.runs import without_nan

BINS = 50
COLUMNS = (
    "harmed_before",
    "harmed_after",
    "mean_extra_weight",
    "extra_weight_p50",
    "extra_weight_p90",
    "extra_weight_max",
    "gap",
)
FACTORS = (1 / 16, 1 / 4, 1.0, 4.0)
MEASURED = {32: 4, 128: 2, 512: 1}  # batches per look


@dataclass(frozen=True)
class Plan:
    """One run: watched plain training, or training with weights of some kind."""

    arm: str  # watched, base, head, network
    model: str
    optimizer: str
    batch_size: int
    seed: int
    epochs: int

    @property
    def key(self) -> str:
        return f"{self.arm} {self.model} {self.optimizer} {self.batch_size} {self.seed}"


def plans() -> list[Plan]:
    """The most important first."""
    found = []
    for seed in range(3):
        for optimizer in ("sgd", "adamw"):
            for batch in (128, 512, 32):
                if batch == 128 or seed < 2:
                    found.append(Plan("watched", "cnn-small", optimizer, batch, seed, 5))
    found.append(Plan("watched", "vit-micro", "adamw", 128, 0, 5))
    for seed in range(3):
        for optimizer in ("sgd", "adamw"):
            for arm in ("head", "network"):
                found.append(Plan(arm, "cnn-small", optimizer, 128, seed, 5))
    found.append(Plan("watched", "resnet20", "sgd", 128, 0, 2))
    return found


def settings_of(plan: Plan, data: DataSettings, size: int) -> InspectSettings:
    per_epoch = size // plan.batch_size
    return InspectSettings(
        model=plan.model,
        data=data,
        optimizer=plan.optimizer,  # type: ignore[arg-type]
        batch_size=plan.batch_size,
        train_steps=plan.epochs * per_epoch,
        every=per_epoch,
        batches=MEASURED.get(plan.batch_size, 1),
        lr_factors=FACTORS,
        seed=plan.seed,
    )


def watched(settings: InspectSettings, data: ImageData) -> dict[str, Any]:
    """Plain training, measured after each epoch."""
    inspection = Inspection(settings, data)
    for _ in inspection.train():
        pass
    record = inspection.record()
    for number, moment in enumerate(record.moments):
        ends = moment["step"] in (settings.every, settings.train_steps)
        if settings.seed > 0 or not ends or number % settings.batches:
            moment.pop("changes"), moment.pop("real_changes")
    found: dict[str, Any] = {"moments": record.moments, "steps": binned(record.steps)}
    if (settings.model, settings.batch_size, settings.seed) == ("cnn-small", 128, 0):
        found["protected"] = record.protected
    return found | {"curves": record.curves}


def weighted(arm: str, settings: InspectSettings, data: ImageData) -> dict[str, Any]:
    """Training with the extra weights of the head's problem, or of the whole network's."""
    inspection = Inspection(settings, data)
    model, optimizer, meter = inspection.model, inspection.optimizer, inspection.meter
    give = of_network(settings.radius) if arm == "network" else None
    start = primum.attach if arm == "head" else primum.observe
    curves: dict[str, list[float]] = {"epoch": [], "test_loss": [], "test_accuracy": []}
    given: list[Tensor] = []
    with start(model, optimizer, radius=settings.radius) as reducer:
        for epoch in range(settings.train_steps // settings.every):
            for batch in inspection.batches.epoch(epoch):
                model.train()
                weights = torch.zeros(len(batch.ids))
                if give is not None:
                    weights = give(model, optimizer, batch.images, batch.targets)
                optimizer.zero_grad()
                losses = F.cross_entropy(model(batch.images), batch.targets, reduction="none")
                ((1 + weights) * losses).mean().backward()
                optimizer.step()
                assert reducer.last is not None
                meter.update(reducer.last)
                given.append(reducer.last.extra_weights.mean() if give is None else weights.mean())
            loss, accuracy = evaluate(model, inspection._test(500))
            for name, value in zip(curves, (epoch + 1, loss, accuracy), strict=True):
                curves[name].append(value)
    table = meter.table() | {"given_weight": torch.stack(given).tolist()}
    if arm == "network":  # the head's figures are of the weighted step there
        table = {key: table[key] for key in ("step", "given_weight")}
    return {"curves": curves, "steps": binned(table)}


def of_network(radius: float) -> Callable[..., Tensor]:
    """Extra weights of the whole network's problem. [B]."""

    def give(model: nn.Module, optimizer: Any, images: Tensor, targets: Tensor) -> Tensor:
        probe = Probe(model, optimizer, nn.CrossEntropyLoss(), images, targets, chunk_size=32)
        problem = measure(probe).problem(radius=radius)
        return primum.solve(problem, 50).extra_weights.to(torch.float32)

    return give


def binned(table: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Means over at most 50 stretches of the run; `step` is the middle of each."""
    steps = torch.tensor(table["step"], dtype=torch.float64)
    parts = torch.tensor_split(torch.arange(len(steps)), min(BINS, len(steps)))
    found: dict[str, list[Any]] = {"step": [float(steps[part].mean()) for part in parts]}
    for name in (*COLUMNS, "given_weight"):
        if name in table:
            column = torch.tensor(table[name], dtype=torch.float64)
            found[name] = [float(f"{column[part].mean():.5g}") for part in parts]
    return found


def rounded(value: Any) -> Any:
    """The same with shorter floats: the file stays small, and no table shows more."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def save(path: Path, about: dict[str, Any], runs: dict[str, Any]) -> None:
    """One line per run, floats with five digits."""
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(rounded(run))}" for key, run in runs.items()
    )
    write_text(path, f'{{"environment": {json.dumps(about)},\n"runs": {{\n{lines}\n}}}}\n')


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="holds cifar10/ with Parquet files")
    parser.add_argument("--train-size", type=int, default=10_000)
    parser.add_argument("--test-size", type=int, default=5_000)
    parser.add_argument("--smoke", action="store_true", help="generated images, few runs, seconds")
    parser.add_argument("--out", type=Path, default=RESULTS / "tutorial.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    about, todo = environment("tutorial.py", argv), plans()
    about["command"] = "python benchmarks/tutorial.py --data-dir DIR"
    if args.smoke:
        about["command"] = "python benchmarks/tutorial.py --smoke"
        data_settings = DataSettings("generated", train_size=64, test_size=32, image_size=8)
        small = [p for p in todo if p.model == "cnn-small" and p.batch_size < 512 and not p.seed]
        todo = [replace(plan, epochs=2, batch_size=plan.batch_size // 4) for plan in small]
    else:
        data_settings = DataSettings(
            "cifar10", args.data_dir, train_size=args.train_size, test_size=args.test_size
        )
    runs: dict[str, Any] = {}
    if args.out.exists():
        before = json.loads(args.out.read_text())
        runs, about = before["runs"], before["environment"]
    data = load_data(data_settings)
    for plan in todo:
        if plan.key in runs:
            continue
        begin = perf_counter()
        settings = settings_of(plan, data_settings, len(data.train))
        if plan.arm == "watched":
            found = watched(settings, data)
        else:
            found = weighted(plan.arm, settings, data)
        seconds = perf_counter() - begin
        about_run = vars(plan) | {"settings": settings.as_dict(), "seconds": round(seconds, 1)}
        runs[plan.key] = without_nan(about_run | found)
        finish(about, sum(run["seconds"] for run in runs.values()))
        save(args.out, about, runs)
        accuracy = found["curves"]["test_accuracy"][-1]
        print(f"{plan.key}: {accuracy:.3f} in {seconds:.0f} s", flush=True)
    print(describe(about))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
