"""docs/compatibility.md is complete, names tests that exist, and quotes what they match."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
RESULTS = (ROOT / "lab" / "bench" / "results" / "loops.md").read_text()
HEADER = "| what | verdict | test |"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")

# What a reader must find, as words of the first column: the loops that plug-ins fail in.
REQUIRED = """
autocast, bfloat16; autocast, float16; GradScaler, `attach; skipped steps; fused; not passed;
models in bfloat16; compiled model, attached before or after; compiled loss; compiled whole step;
fullgraph; after the compiled model has run; k micro-batches; clipping by norm; clipping by value;
several optimizers; several parameter groups; bias in different groups; bias in different
optimizers; schedulers; add_param_group; rebuilt; load_state_dict; Muon for hidden layers;
BatchNorm; dropout; tied head; logit scale or soft-capping; several heads, not named; several
heads, each; used twice; frozen backbone; frozen head (LoRA; activation checkpointing; weight
norm, spectral norm; nn.MultiheadAttention; EMA; deepcopy; pickle, `torch.save; DataParallel over;
[B, T, d]; [B, H, W, d]; ignore_index; per="token"; 32,000 words; mixup; CutMix; label smoothing;
soft targets; BCE; focal; MSE; ranking within a sample; couple samples; SIGKILL; 1,000
attach/remove; Lightning; Hugging Face; Accelerate; timm-style; TensorBoard; GANs, actor-critic;
autograd.grad(loss, parameters); weights_only=True; weights_only=False; torch.jit.script; ONNX;
dynamic quantization; head replaced; never called; attaching again; primum.detach; two heads;
CLIP; output of a convolution; BertForMaskedLM; reducer.head; repr(reducer); SFTTrainer; PEFT,
trained copy; Fabric; Lookahead; NativeScaler; second-order; one-dimensional; warnings; the overhead
"""


def rows() -> list[list[str]]:
    """Cells of every row of the tables that have a verdict."""
    found: list[list[str]] = []
    inside = False
    for line in PAGE.splitlines():
        inside = line == HEADER or (inside and line.startswith("|"))
        if inside and line != HEADER and not set(line) <= set("|-"):
            found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


ROWS = rows()


@cache
def named_tests(path: str) -> dict[str, list[ast.FunctionDef]]:
    """The tests of a file by name, in classes or not."""
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found.setdefault(node.name, []).append(node)
    return found


@cache
def patterns_of(path: str) -> list[str]:
    """What tests of a file may expect errors and warnings to say: its texts of some length."""
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [text for text in texts if len(text) > 15 and "\n" not in text]


def test_there_are_rows() -> None:
    assert len(ROWS) > 80
    assert all(len(row) == 3 for row in ROWS), [row for row in ROWS if len(row) != 3]
    names = [row[0] for row in ROWS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("words", [each.strip() for each in REQUIRED.split(";")])
def test_required(words: str) -> None:
    assert [row for row in ROWS if " ".join(words.split()) in row[0]], f"no row about {words}"


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_row_has_a_verdict_and_tests_that_exist(row: list[str]) -> None:
    assert re.match(r"works(;|,|$)|approximate: |refused: `", row[1]), row[1]
    named = NAMED.findall(row[2])
    assert named
    assert ", ".join(f"`{path}::{name}`" for path, name in named) == row[2]
    for path, name in named:
        assert name in named_tests(path), f"{path} has no {name}"


REFUSED = [row for row in ROWS if row[1].startswith("refused")]


@pytest.mark.parametrize("row", REFUSED, ids=[row[0] for row in REFUSED])
def test_refusals_are_quoted_as_their_tests_match_them(row: list[str]) -> None:
    (quoted,) = re.findall(r"`([^`]+)`", row[1])
    patterns = [each for path, _ in NAMED.findall(row[2]) for each in patterns_of(path)]
    assert patterns
    assert any(each in quoted or _matches(each, quoted) for each in patterns), patterns


def _matches(pattern: str, text: str) -> bool:
    try:
        return re.search(pattern, text) is not None
    except re.error:  # a text of the file that is no pattern
        return False


def test_measured_tables_are_those_of_the_benchmark() -> None:
    tables = [line for line in RESULTS.splitlines() if line.startswith("|")]
    assert len(tables) > 20
    missing = [line for line in tables if line not in PAGE.splitlines()]
    assert not missing, missing
