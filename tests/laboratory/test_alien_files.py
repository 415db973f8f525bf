"""Files that nobody here wrote and values that fit nowhere: one line, exit code 2, nothing lost."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import cli
from lab.models import build_model
from lab.runs import RunRecord, write_run, write_table
from lab.store import Store
from laboratory.conftest import TINY_WORDS, record, tiny
from primum import cli as demo

Says = Callable[..., str]
LOOK_WORDS = ["--data", "digits", "--train-size", "40", "--batch-size", "32", "--augment", "none"]
COMPARE = ["compare", "--arms", "base", "--seeds", "1", *TINY_WORDS]
HUGE = ("9" * 25, "1" + "0" * 5000, str(2**63), str(2**31))


@pytest.fixture
def says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Says:
    """The message of a refused command, after checking that no file has changed."""

    def run(*words: str, main: Callable[[list[str]], int] = cli.main) -> str:
        before = contents(tmp_path)
        try:
            code = main(list(words))
        except SystemExit as stopped:  # by argparse, which prints the usage as well
            code = int(stopped.code or 0)
            said = capsys.readouterr().err.splitlines()[-1] + "\n"
        else:
            said = capsys.readouterr().err
            said = re.sub(r"^1 run\(s\) to do.*\n", "", said)  # how far it got
        assert code == 2, said
        assert said.count("\n") == 1, said
        assert "Traceback" not in said
        after = contents(tmp_path)
        assert {path: after.get(path) for path in before} == before
        return said

    return run


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


ALIEN: list[Any] = [
    *(None, 3, -1, 2**70, 1e308, float("nan"), True, "x", "", [], {}, [[]], [{}], {"a": None}),
    *([1, "x"], {"epoch": 3}, {"step": [1, [2]]}, {"test_accuracy": "high"}, {"x": [2**80]}),
    *([{"step": 1}], [{"label": 1, "table": []}], {"step": 0, "before": [], "after": "x"}),
]


def spoilt(run: RunRecord, chance: random.Random) -> Any:
    """The content of a run's file with a few values replaced, anywhere in it."""
    content = json.loads(json.dumps(run.as_dict()))
    for _ in range(chance.randint(1, 3)):
        where: Any = content
        while True:
            places = list(where) if isinstance(where, dict) else list(range(len(where)))
            place = chance.choice([each for each in places if each != "format"])
            if isinstance(where[place], dict | list) and where[place] and chance.random() < 0.6:
                where = where[place]
                continue
            if chance.random() < 0.2:
                del where[place]
            else:
                where[place] = chance.choice(ALIEN)
            break
        if not content:
            break
    return content


@pytest.mark.parametrize("seed", range(2))
def test_reports_of_spoilt_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], full: RunRecord, seed: int
) -> None:
    """A page, or one line that names the file."""
    chance, file, page = random.Random(seed), tmp_path / "run.json", tmp_path / "page.html"
    refused = 0
    for _ in range(12):
        file.write_text(json.dumps(spoilt(full, chance)))
        before = file.read_bytes()
        code = cli.main(["report", str(file), "-o", str(page)])
        said = capsys.readouterr().err
        assert code in (0, 2)
        if code == 2:
            refused += 1
            assert said.count("\n") == 1, said
            assert str(file) in said
        assert file.read_bytes() == before
    assert refused > 3


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"format": ' + b"9" * 5000 + b"}", b"\x00"],
    ids=["empty", "open", "binary", "deep", "digits", "nul"],
)
def test_json_in_a_folder_of_runs(tmp_path: Path, says: Says, content: bytes) -> None:
    write_run(record("base", 0, 0.5), tmp_path / "a.json")
    (tmp_path / "b.json").write_bytes(content)
    assert f"{tmp_path / 'b.json'} cannot be read" in says("report", str(tmp_path))


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bits_of_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    file, chance = tmp_path / "runs.jsonl.gz", random.Random(seed)
    write_table(file, [record("base", number, 0.5) for number in range(3)])
    whole = file.read_bytes()
    for _ in range(20):
        content = bytearray(whole)
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(content[: chance.choice([None, None, -5])])
        code = cli.main(["report", str(file), "-o", str(tmp_path / "page.html")])
        said = capsys.readouterr().err
        assert code in (0, 2)  # a flipped bit of the header may mean nothing
        assert code == 0 or (str(file) in said and said.count("\n") == 1), said


def test_lines_of_a_table_that_are_no_runs(tmp_path: Path, says: Says) -> None:
    file = tmp_path / "runs.jsonl.gz"
    for line in ("[]", "3", '{"format": "primum-run-1"}', "[" * 100_000):
        file.write_bytes(gzip.compress(line.encode()))
        assert str(file) in says("report", str(tmp_path))
        assert str(file) in says(*COMPARE, "--out", str(tmp_path))


@pytest.mark.parametrize("content", [b"[1, 2]", b"[" * 100_000, b'{"format": "primum-run-1"}'])
def test_a_finished_run_that_is_none(tmp_path: Path, says: Says, content: bytes) -> None:
    file = Store(tmp_path).run_path(tiny())
    file.parent.mkdir()
    file.write_bytes(content)
    said = says(*COMPARE, "--out", str(tmp_path))
    assert str(file) in said
    assert "delete it to repeat the run" in said


OBJECTS = {
    "list": [1, 2],
    "text": "x",
    "none": None,
    "number": 3,
    "tensor": torch.zeros(2),
    "key": {3: torch.zeros(2)},
    "model": {"model": [1]},
    "nothing": {"model": None},
    "step": {"step": 2**70},
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_checkpoints_to_inspect(tmp_path: Path, says: Says, kind: str) -> None:
    file = tmp_path / "a.pt"
    torch.save(OBJECTS[kind], file)
    words = ["inspect", *LOOK_WORDS, "-o", str(tmp_path / "out"), "--checkpoint", str(file)]
    assert f"checkpoint {file}" in says(*words)


@pytest.mark.parametrize("more", [{"step": "x"}, {"step": 2**70}, {"optimizer": [1]}])
def test_whose_model_fits(tmp_path: Path, says: Says, more: dict[str, Any]) -> None:
    file = tmp_path / "a.pt"
    torch.save({"model": build_model("cnn-small", 10, 8, seed=1).state_dict(), **more}, file)
    words = ["inspect", *LOOK_WORDS, "-o", str(tmp_path / "out"), "--checkpoint", str(file)]
    assert f"checkpoint {file}: {next(iter(more))}" in says(*words)


@pytest.mark.parametrize("kind", OBJECTS)
def test_checkpoints_of_unfinished_runs(tmp_path: Path, says: Says, kind: str) -> None:
    """Another run's state is started again; what is no state at all is kept and named."""
    settings = tiny()
    file = Store(tmp_path).checkpoint_path(settings)
    file.parent.mkdir()
    state = OBJECTS[kind]
    if isinstance(state, dict):
        state |= {"format": 2, "key": settings.key, "matched": [[1.0], 1.0]}
    torch.save(state, file)
    said = says(*COMPARE, "--out", str(tmp_path))
    assert str(file) in said
    assert "delete it to start this run from step 0" in said


@pytest.mark.parametrize("value", HUGE)
def test_integers_that_fit_nowhere(tmp_path: Path, says: Says, value: str) -> None:
    out = ["--out", str(tmp_path / "out")]
    commands = {
        "compare": (
            *("--seeds", "--first-seed", "--epochs", "--batch-size", "--steps", "--noise-seed"),
            *("--train-size", "--image-size", "--classes", "--workers", "--threads", "--views"),
        ),
        "inspect": ("--seed", "--every", "--batches", "--train-steps", "--batch-size"),
        "reproduce": ("--seeds", "--workers", "--threads"),
        "demo": ("--seeds", "--epochs", "--threads", "--ranks"),
    }
    for command, options in commands.items():
        for option in options:
            said = says(command, *(["table1"] * (command == "reproduce")), option, value, *out)
            assert f"argument {option}" in said
            assert len(said) < 200
    for option in ("--seeds", "--epochs"):
        assert option in says("demo", option, value, main=demo.main)


def test_words_that_no_file_can_be_named_by(tmp_path: Path, says: Says) -> None:
    for word in ("a\0b", "a\udcffb"):
        for command, option in (
            *(("compare", "--out"), ("compare", "--data-dir"), ("compare", "--text")),
            *(("inspect", "--checkpoint"), ("inspect", "--out"), ("reproduce", "--out")),
            *(("demo", "--out"), ("report", "-o"), ("report", "--title")),
        ):
            assert f"error: {option}: must be text" in says(command, option, word)
        assert "must be text" in says("report", word)
