"""The options of the timm-style example: each way of training is weighed, and can be resumed."""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from integrations.plain import assert_equal, differs

EXAMPLE = Path(__file__).parents[2] / "examples" / "timm_style.py"


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], nn.Module]:
    """Ends with assertions of its own: applied, no fallbacks, extra weights above 0."""
    return runpy.run_path(str(EXAMPLE), run_name="timm_style")["main"]


@pytest.mark.parametrize(
    "options",
    [
        ["--amp", "float16", "--grad-accum-steps", "2"],
        ["--amp", "bfloat16", "--opt", "sgd", "--lr", "0.1", "--channels-last", "--model-ema"],
    ],
    ids=" ".join,
)
def test_options(main: Any, options: list[str]) -> None:
    short = [*options, "--epochs", "2"]
    assert differs(main(short).state_dict(), main([*short, "--no-primum"]).state_dict())


def test_radius_zero_is_the_script_without_primum(main: Any) -> None:
    short = ["--epochs", "2", "--grad-accum-steps", "3"]
    one, other = main([*short, "--radius", "0"]), main([*short, "--no-primum"])
    assert_equal(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("options", [["--opt", "sgd"], ["--model-ema", "--amp", "float16"]])
def test_resumed_after_a_kill_while_saving(
    main: Any, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def replace(part: Path, path: Path) -> None:
        if path.exists():  # the second checkpoint
            raise Killed
        move(part, path)

    move = os.replace
    short = ["--epochs", "3", *options]
    whole = main(short)
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(Killed):
        main([*short, "--checkpoint", str(tmp_path / "last.pt")])
    monkeypatch.setattr(os, "replace", move)
    resumed = main([*short, "--checkpoint", str(tmp_path / "last.pt"), "--resume"])
    assert_equal(resumed.state_dict(), whole.state_dict())
