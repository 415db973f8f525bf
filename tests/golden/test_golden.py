"""Extra weights, drift and gradients are those in `golden.json`; see `make.py`, which writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from make import GOLDEN, Case, cases, run, started

CASES = cases()
RECORDED: dict[str, Any] = json.loads(GOLDEN.read_text())

Results = Callable[[], dict[str, Any]]


@pytest.fixture(scope="module")
def over_ranks() -> Iterator[Results]:
    """The runs over several ranks, which go on beside those of this process until asked for."""
    with started() as results:
        done: dict[str, Any] = {}

        def once() -> dict[str, Any]:
            if not done:
                done.update(results())
            return done

        yield once


def assert_near(
    found: Sequence[float], expected: Sequence[float], tolerance: float, what: str
) -> None:
    assert len(found) == len(expected), what
    worst = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    assert worst <= tolerance, f"{what}: {worst:.3g} apart, {tolerance:.3g} allowed"


def compare(found: list[Any], expected: list[Any], case: Case) -> None:
    """Every step is as recorded: drift and gradients closely, weights as the case allows."""
    assert len(found) == len(expected) == case.steps
    for step, (own, other) in enumerate(zip(found, expected, strict=True)):
        for report, kept in zip(own["reports"], other["reports"], strict=True):
            where = f"step {step}"
            assert (report["per"], report["applied"]) == (kept["per"], kept["applied"]), where
            scale, harm = kept["scale"][0], kept["harm"][0]
            count = math.sqrt(len(kept["drift"]))  # projections are sums
            assert_near(report["weights"], kept["weights"], case.weights * count, f"{where}: w")
            close = case.close * scale
            assert_near(report["drift"], kept["drift"], close, f"{where}: drift")
            assert_near(report["after"], kept["after"], close * count, f"{where}: drift after")
            close = case.close * max(harm, 1e-4 * scale)  # harm may be a small difference
            assert_near(report["harm"], kept["harm"], close, f"{where}: harm, bounds")
        for layer, (grad, digest) in enumerate(
            zip(own["gradients"], other["gradients"], strict=True)
        ):
            length = max(digest[-1], 1e-300)
            assert_near(grad, digest, case.close * 10 * length, f"step {step}: gradient {layer}")


def test_every_case_is_recorded() -> None:
    assert set(RECORDED) == set(CASES)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.ranks])
def test_one_process(name: str, over_ranks: Results) -> None:
    compare(run(CASES[name]), RECORDED[name], CASES[name])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ranks])
def test_two_ranks(name: str, over_ranks: Results) -> None:
    compare(over_ranks()[name], RECORDED[name], CASES[name])
