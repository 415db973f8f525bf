"""Metrics of the steps in TensorBoard, W&B, MLflow (the real packages, offline) and `log(dict)`."""

from __future__ import annotations

import csv
import gc
import json
import struct
import subprocess
import sys
import weakref
from pathlib import Path

import mlflow
import pytest
import torch
import wandb
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.optim import SGD
from torch.utils.tensorboard import SummaryWriter
from wandb.proto.wandb_internal_pb2 import Record

import primum
from integrations.plain import FIGURES, STEPS, network, train
from primum import Reducer, StepReport
from primum.integrations import log_to


def attached() -> tuple[nn.Sequential, SGD, Reducer]:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, primum.attach(model, optimizer)


def test_any_callable_that_takes_a_dict() -> None:
    model, optimizer, reducer = attached()
    entries: list[dict[str, float]] = []
    log_to(reducer, entries.append, every=5)
    train(model, optimizer)
    assert [entry["primum/step"] for entry in entries] == [5, 10]
    assert all(entry.keys() == FIGURES | {"primum/step"} for entry in entries)
    assert reducer.last is not None
    last = {f"primum/{name}": value for name, value in reducer.last.as_dict().items()}
    assert entries[-1] == last | {"primum/step": 10}


def test_tensorboard(tmp_path: Path) -> None:
    model, optimizer, reducer = attached()
    with SummaryWriter(tmp_path) as writer:
        log_to(reducer, writer, every=4, first_step=100)
        train(model, optimizer)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == FIGURES
    for name in FIGURES:
        assert [event.step for event in events.Scalars(name)] == [104, 108]
    assert all(event.value > 0 for event in events.Scalars("primum/mean_extra_weight"))


def written(folder: Path) -> list[Record]:
    """Records of the only run that W&B wrote: a file header, then a header of 7 bytes for each."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data = path.read_bytes()
    assert len(data) < 32768  # one block of the file format, so every record is in one piece
    records, at = [], 7
    while at < len(data):
        size, kind = struct.unpack_from("<HB", data, at + 4)
        assert kind == 1
        records.append(Record.FromString(data[at + 7 : at + 7 + size]))
        at += 7 + size
    return records


@pytest.mark.parametrize("whole_module", [False, True], ids=["run", "module"])
def test_weights_and_biases(whole_module: bool, tmp_path: Path) -> None:
    """Every entry has its step, and the plots use it whatever else the loop logs."""
    model, optimizer, reducer = attached()
    settings = wandb.Settings(silent=True, disable_git=True, x_disable_stats=True)
    run = wandb.init(mode="offline", dir=tmp_path, project="tests", settings=settings)
    try:
        log_to(reducer, wandb if whole_module else run, every=5)
        run.log({"loss": 1.0})
        train(model, optimizer)
    finally:
        run.finish()
        wandb.teardown()  # waits for its process, which writes the file
    records = written(tmp_path)
    rows = [
        {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    ours = [row for row in rows if "primum/step" in row]
    assert [row["primum/step"] for row in ours] == [5, 10]
    assert all(row.keys() >= FIGURES for row in ours)
    assert reducer.last is not None
    for name, value in reducer.last.as_dict().items():
        assert ours[-1][f"primum/{name}"] == pytest.approx(value)
    axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["primum/*"] == "primum/step"


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # others need a database or a server
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    try:
        model, optimizer, reducer = attached()
        with mlflow.start_run() as run:
            log_to(reducer, mlflow, every=5, first_step=100)
            train(model, optimizer)
        client = mlflow.MlflowClient()
        assert set(client.get_run(run.info.run_id).data.metrics) == FIGURES
        assert reducer.last is not None
        for name, value in reducer.last.as_dict().items():
            history = client.get_metric_history(run.info.run_id, f"primum/{name}")
            assert [metric.step for metric in history] == [105, 110]
            assert history[-1].value == pytest.approx(value)
    finally:
        mlflow.set_tracking_uri(before)


def test_a_logger_of_lightning(tmp_path: Path) -> None:
    model, optimizer, reducer = attached()
    logger = CSVLogger(tmp_path, name="", version="")
    log_to(reducer, logger, every=5)
    train(model, optimizer)
    logger.save()
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [5, 10]
    assert all(row.keys() == FIGURES | {"step"} for row in rows)


def test_importing_it_imports_none_of_the_packages() -> None:
    script = "import sys, primum.integrations; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    tops = {name.split(".")[0] for name in done.stdout.split()}
    assert "primum" in tops
    assert not tops & {"wandb", "mlflow", "tensorboard", "lightning", "transformers"}


def test_only_logged_steps_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`as_dict` waits for the device."""
    read: list[StepReport] = []

    def as_dict(report: StepReport) -> dict[str, float]:
        read.append(report)
        return {}

    monkeypatch.setattr(StepReport, "as_dict", as_dict)
    model, optimizer, reducer = attached()
    log_to(reducer, lambda _: None, every=3)
    train(model, optimizer)
    assert len(read) == STEPS // 3


def test_steps_count_and_not_micro_batches() -> None:
    model, optimizer, reducer = attached()
    entries: list[dict[str, float]] = []
    log_to(reducer, entries.append, every=1)
    train(model, optimizer, accumulate=2)
    assert [entry["primum/step"] for entry in entries] == [1, 2, 3, 4, 5]


def test_a_pause_is_not_logged() -> None:
    """The last report is still there, but it is of an earlier step."""
    model, optimizer, reducer = attached()
    entries: list[dict[str, float]] = []
    log_to(reducer, entries.append, every=4)
    train(model, optimizer)
    reducer.enabled = False
    train(model, optimizer)
    reducer.enabled = True
    train(model, optimizer)
    assert [entry["primum/step"] for entry in entries] == [4, 8, 24, 28]


def test_removed() -> None:
    model, optimizer, reducer = attached()
    hooks = len(optimizer._optimizer_step_post_hooks)
    entries: list[dict[str, float]] = []
    handle = log_to(reducer, entries.append, every=1)
    handle.remove()
    assert len(optimizer._optimizer_step_post_hooks) == hooks
    log_to(reducer, entries.append, every=1)
    reducer.remove()
    train(model, optimizer)
    assert not entries


def test_everything_dies_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        model, optimizer, reducer = attached()
        log_to(reducer, print, every=STEPS + 1)
        train(model, optimizer)
        refs = [weakref.ref(each) for each in (model, optimizer, reducer)]
        del model, optimizer, reducer
        assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()


def test_training_is_the_same() -> None:
    logged, optimizer, reducer = attached()
    log_to(reducer, lambda _: None, every=1)
    train(logged, optimizer)
    plain, optimizer, _ = attached()
    train(plain, optimizer)
    assert all(map(torch.equal, logged.parameters(), plain.parameters()))


def test_wrong_arguments() -> None:
    _, _, reducer = attached()
    with pytest.raises(ValueError, match="every must be >= 1, got 0"):
        log_to(reducer, print, every=0)
    with pytest.raises(TypeError, match="a callable that takes a dict; got str"):
        log_to(reducer, "runs")  # type: ignore[arg-type]
