"""Files are whole or not there, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.errors import UserError
from lab.files import write_bytes
from lab.runs import read_runs, write_table
from lab.store import Store
from laboratory.conftest import record, tiny


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "out")
    made.prepare()
    return made


def files(store: Store) -> list[str]:
    return sorted(p.name for p in store.folder.rglob("*") if p.is_file())


def test_a_run_comes_back_and_its_checkpoint_goes(store: Store) -> None:
    run = tiny("primum", seed=2)
    assert store.find(run) is None
    store.save_checkpoint(run, {"step": 3})
    assert store.load_checkpoint(run) == {"step": 3}
    store.save_run(run, record("primum", 2, 0.5))
    assert store.find(run) == record("primum", 2, 0.5)
    assert store.load_checkpoint(run) is None
    assert files(store) == [f"primum-seed2-{run.key}.json"]


def test_report_reads_the_folder(store: Store) -> None:
    for seed in range(2):
        store.save_run(tiny("base", seed), record("base", seed, 0.5))
    assert [run.seed for run in read_runs([store.folder])] == [0, 1]


def test_what_is_not_a_number_is_null(store: Store) -> None:
    run = tiny()
    store.save_run(run, record("base", 0, 0.5, losses=(2.0, float("nan"))))
    found = store.find(run)
    assert found is not None
    assert found.final["test_loss"] is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_what_was_there(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run = tiny()
    store.save_checkpoint(run, {"step": 3})

    def full(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"no space left to write .*finished runs are kept"):
        store.save_checkpoint(run, {"step": 4})
    with pytest.raises(UserError, match="no space left"):
        store.save_run(run, record("base", 0, 0.5))
    assert store.load_checkpoint(run) == {"step": 3}
    assert files(store) == [f"base-seed0-{run.key}.pt"]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("something")
    with pytest.raises(UserError, match="cannot create the folder"):
        Store(tmp_path / "out").prepare()
    with pytest.raises(UserError, match="cannot write"):
        write_bytes(tmp_path / "out" / "runs" / "a.json", b"")


def test_a_damaged_checkpoint_is_named_and_kept(store: Store) -> None:
    run = tiny()
    store.checkpoint_path(run).write_bytes(b"half a fi")
    with pytest.raises(UserError, match=r"base-seed0-.*cannot be read.*delete it"):
        store.load_checkpoint(run)
    assert files(store) == [f"base-seed0-{run.key}.pt"]


def test_a_checkpoint_is_no_program(store: Store) -> None:
    run = tiny()
    torch.save({"step": Path("/")}, store.checkpoint_path(run))
    with pytest.raises(UserError, match="cannot be read"):
        store.load_checkpoint(run)


def test_a_run_that_cannot_be_read_is_named(store: Store) -> None:
    run = tiny()
    store.run_path(run).write_text("{")
    with pytest.raises(UserError, match=r"base-seed0-.*cannot be read.*delete it"):
        store.find(run)


def test_drafts_of_the_dead_are_removed_and_those_of_the_living_are_not(store: Store) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    folder = store.folder / "runs"
    dead, living, other = (
        folder / f".a.json.{who}.part" for who in (child.pid, os.getpid(), "someone")
    )
    for draft in (dead, living, other):
        draft.touch()
    store.prepare()
    assert [draft.exists() for draft in (dead, living, other)] == [False, True, True]


def test_runs_of_compressed_tables_are_found(store: Store) -> None:
    run = tiny("primum", seed=2)
    kept = replace(record("primum", 2, 0.5), arm_settings={"key": run.key})
    write_table(store.folder / "a-study.jsonl.gz", [kept])
    assert store.find(run) == kept
    assert store.find(tiny("primum", seed=3)) is None
