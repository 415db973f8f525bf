"""A head split by `fully_shard` gives what one process gives on the joined batch; no rank hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rank_child import train
from test_distributed import assert_same

CHILD = Path(__file__).parent / "shard_child.py"
WIDE = {"dtype": "float64"}  # Twenty steps of training multiply rounding.
COUNTS = {2: [12, 7], 3: [8, 5, 9], 4: [6, 4, 5, 7]}
WAYS: dict[str, dict[str, Any]] = {
    "rows": {"way": "rows", "dense": True},
    "free": {"way": "rows", "dense": False},
    "sum": {"way": "sum"},
}
OPTIMIZERS = ("SGD", "AdamW")
# Of five outputs three ranks hold 2, 2 and 1; four hold 2, 2, 1 and none.
LAYOUTS: dict[str, dict[str, Any]] = {
    "2": {},
    "2-head": {"head": True},
    "2-kept": {"head": True, "reshard": False},
    "3": {"short": 3},
    "4": {},
    "4-hsdp": {"replicas": 2},
}
LOOPS: dict[str, dict[str, Any]] = {
    "synced": {"micro_batches": 3},
    "unsynced": {"micro_batches": 3, "sync": False},
    "unsynced-head": {"micro_batches": 2, "sync": False, "head": True, "optimizer": "AdamW"},
    "clipped": {"micro_batches": 2, "clip": 0.05, "optimizer": "AdamW"},
    "clipped-no-bias": {"bias": False, "clip": 0.05, "sync": False, "micro_batches": 2},
    "sequences": {"tokens": 4},
    "explicit": {"explicit": True, "head": True},
    "blocks-compiled": {"compiled": "blocks"},
    "compiled": {"compiled": "model"},
    "compiled-head": {"compiled": "model", "head": True},
}


def all_runs() -> dict[str, dict[str, Any]]:
    """Settings by name; `counts` says over how many ranks."""
    runs: dict[str, dict[str, Any]] = {}
    for layout, settings in LAYOUTS.items():
        base = WIDE | {"counts": COUNTS[int(layout[0])]} | settings
        for optimizer in OPTIMIZERS:
            for way, by in WAYS.items():
                if way == "rows" or layout in ("2", "4-hsdp"):
                    runs[f"steps-{layout}-{optimizer}-{way}"] = base | by | {"optimizer": optimizer}
    two = WIDE | {"counts": COUNTS[2], "steps": 8}
    for loop, settings in LOOPS.items():
        runs[f"{loop}-rows"] = two | settings | WAYS["rows"]
    for loop in ("unsynced", "clipped", "sequences"):
        runs[f"{loop}-sum"] = two | LOOPS[loop] | WAYS["sum"]
    runs["hsdp-unsynced"] = (
        WIDE | {"counts": COUNTS[4], "replicas": 2, "steps": 6, "clip": 0.05} | LOOPS["unsynced"]
    )
    runs["replicas-wait"] = WIDE | {
        "counts": COUNTS[4],
        "replicas": 2,
        "steps": 2,
        "micro_batches": 2,
        "all_reduce": False,
    }
    runs["paper"] = two | {"recipe": "paper", "optimizer": "AdamW"}
    for way, by in WAYS.items():
        runs[f"bytes-{way}"] = {"counts": COUNTS[3], "steps": 3} | by
    runs["bytes-local"] = {"counts": COUNTS[3], "steps": 3, "way": "local"}
    for kind in ("nan", "eval", "recipe"):
        runs[kind] = {"counts": [12, 12], "trouble": kind, "steps": 8} | WAYS["rows"]
    runs["auto"] = two
    runs["local"] = two | {"scope": "local"}
    runs["local-one"] = WIDE | {"counts": [12, 1], "steps": 3, "scope": "local"}
    runs["observe"] = two | {"observe": True}
    runs["bf16"] = {"counts": [12, 12], "bf16": True, "steps": 1}
    runs["divide"] = two | {"divide": 1.0, "micro_batches": 2}
    runs["late"] = {"counts": [12, 12], "steps": 4, "late": True}
    runs["late-head"] = {"counts": [12, 12], "steps": 4, "late": True, "head": True}
    runs["resume"] = two | {"kind": "resume", "optimizer": "AdamW", "head": True}
    return runs


Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of every run, the ranks' results. One group of processes for each number of ranks."""
    found: Results = {}
    for ranks in COUNTS:
        runs = {name: own for name, own in all_runs().items() if len(own["counts"]) == ranks}
        folder = tmp_path_factory.mktemp(f"shards-{ranks}")
        (folder / "runs.json").write_text(json.dumps(runs))
        children = [
            subprocess.Popen(
                [sys.executable, str(CHILD), str(folder), str(rank), str(ranks)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        errors = [child.communicate(timeout=300)[1] for child in children]
        assert [child.returncode for child in children] == [0] * ranks, "\n".join(errors)
        files = [folder / f"results-{rank}.json" for rank in range(ranks)]
        parts = [json.loads(each.read_text()) for each in files]
        found |= {name: [part[name] for part in parts] for name in runs}
    return found


def alone(name: str, **changes: Any) -> dict[str, Any]:
    """One process on the joined batch, by the same settings."""
    return train(all_runs()[name] | {"explicit": False} | changes)


class TestOneProcess:
    @pytest.mark.parametrize(
        "name", [name for name in all_runs() if name.startswith("steps-")], ids=lambda n: n[6:]
    )
    def test_twenty_steps(self, results: Results, name: str) -> None:
        """Rows uneven or none, batches uneven, head in the root's group or its own: to 1e-9."""
        expected, own = alone(name), all_runs()[name]
        assert max(max(report["weights"]) for report in expected["reports"]) > 0.1
        for rank, found in enumerate(results[name]):
            assert_same(found, expected, 1e-9)
            assert found["warnings"] == []
            for number, (one, other) in enumerate(
                zip(found["reports"], expected["reports"], strict=True)
            ):
                for figure in ("harm_before", "harm_after", "harmed_before", "mean_extra_weight"):
                    assert one[figure] == pytest.approx(other[figure], rel=1e-6, abs=1e-9)
                assert one["gap"] == pytest.approx(other["gap"], abs=1e-7)
                assert one["weights"] == pytest.approx(other["weights"], abs=1e-6)
                assert one["drift"] == pytest.approx(other["drift"], rel=1e-6, abs=1e-9)
                assert (one["applied"], one["fallbacks"], one["discarded"]) == (1.0, 0, 0)
                counts = list(own["counts"])
                counts[-1] -= own.get("short", 0) if number % 3 == 2 else 0
                first = sum(counts[:rank])
                assert one["own"] == [first, first + counts[rank]]

    def test_rows_are_those_of_fully_shard(self, results: Results) -> None:
        """Of five outputs; the last of four ranks has none, and with HSDP two have the same."""
        for layout, rows in {
            "3": [[0, 2], [2, 4], [4, 5]],
            "4": [[0, 2], [2, 4], [4, 5], [5, 5]],
            "4-hsdp": [[0, 3], [3, 5], [0, 3], [3, 5]],
        }.items():
            assert [found["rows"] for found in results[f"steps-{layout}-SGD-rows"]] == rows

    @pytest.mark.parametrize(
        "name",
        [f"{loop}-rows" for loop in LOOPS]
        + ["unsynced-sum", "clipped-sum", "sequences-sum", "hsdp-unsynced", "paper", "auto"],
    )
    def test_loops(self, results: Results, name: str) -> None:
        expected = alone(name)
        assert max(expected["reports"][-1]["weights"]) > 0
        for found in results[name]:
            assert [report["fallbacks"] for report in found["reports"]] == [0] * len(
                found["reports"]
            )
            # Older torch clips float64 shards by a factor with float32 precision.
            assert_same(found, expected, 1e-7)
            assert found["warnings"] == []

    def test_checkpoints(self, results: Results) -> None:
        """Saved by torch.distributed.checkpoint, loaded after attaching: the run goes on."""
        expected = alone("resume")
        for found in results["resume"]:
            assert_same(found, expected, 1e-8)
            assert not [key for key in found["keys"] if "primum" in key]
            for one, other in zip(found["reports"], expected["reports"][4:], strict=True):
                assert one["weights"] == pytest.approx(other["weights"], abs=1e-6)

    def test_a_divisor_of_ones_own(self, results: Results) -> None:
        """Gradients are summed and not averaged: each drift is four times as large.

        But for the part of weight decay, which does not grow with the gradients.
        """
        expected = alone("divide", micro_batches=1, steps=0)
        one, two = results["divide"]
        assert one["params"] == two["params"] != expected["params"]
        first = one["reports"][0]
        assert first["drift"] == pytest.approx(
            [4 * each for each in alone("divide")["reports"][0]["drift"]], rel=0.01, abs=1e-5
        )

    def test_observing_leaves_the_gradients_alone(self, results: Results) -> None:
        plain = train(all_runs()["observe"] | {"recipe": "primum", "radius": 0.0})
        for found in results["observe"]:
            assert_same(found, plain, 1e-9)
            assert found["reports"][0]["drift"] == pytest.approx(
                plain["reports"][0]["drift"], rel=1e-6, abs=1e-9
            )


class TestPrecision:
    def test_policy_of_bfloat16(self, results: Results) -> None:
        """Parameters and activations in bfloat16: the weights have its two or three digits."""
        expected = alone("bf16", dtype="bfloat16")["reports"][0]["weights"]
        assert max(expected) > 0.1
        for found in results["bf16"]:
            assert found["reports"][0]["weights"] == pytest.approx(expected, abs=0.03)
            assert found["reports"][0]["applied"] == 1.0


class TestLocal:
    def test_each_rank_has_its_own_samples_and_the_drift_of_the_global_step(
        self, results: Results
    ) -> None:
        """Sample gradients as on one rank alone, so the drift is that many times the global one."""
        expected = alone("local")["reports"][0]["drift"]
        one, two = (found["reports"][0] for found in results["local"])
        assert (len(one["drift"]), len(two["drift"])) == (12, 7)
        both = [*one["drift"], *two["drift"]]
        assert both == pytest.approx([2 * each for each in expected], rel=1e-6, abs=1e-9)
        assert one["own"] == two["own"] == [None, None]
        for found in results["local"]:
            assert max(max(report["weights"]) for report in found["reports"]) > 0
            assert found["warnings"] == []
            assert all(r["harm_after"] <= r["harm_before"] for r in found["reports"])

    def test_a_rank_with_one_sample_keeps_up(self, results: Results) -> None:
        for found in results["local-one"]:
            assert [report["applied"] for report in found["reports"]] == [1.0] * 3


class TestTrouble:
    @pytest.mark.parametrize("kind", ["nan", "eval"])
    def test_all_ranks_fall_back_together(self, results: Results, kind: str) -> None:
        both = results[kind]
        for found in both:
            counts = [report["fallbacks"] for report in found["reports"]]
            # After the NaN nothing is finite any more, as without us.
            assert counts == [0] * 5 + ([1, 2, 3] if kind == "nan" else [1, 1, 1])
            assert all(weight == 0 for weight in found["reports"][5]["weights"])
            assert len(found["warnings"]) == 1
        if kind == "eval":
            reasons = [found["reports"][5]["reason"] for found in both]
            assert reasons[0] == "another rank could not compute its weights"
            assert reasons[1].startswith("the head ran in eval mode")

    def test_a_rank_that_fails_by_itself_leaves_the_others_alone(self, results: Results) -> None:
        first, second = results["recipe"]
        assert [report["fallbacks"] for report in first["reports"]] == [0] * 8
        assert [report["fallbacks"] for report in second["reports"]] == [0] * 5 + [1] * 3
        assert second["reports"][5]["reason"] == "MemoryError: no room for the matrix"
        assert second["reports"][6]["applied"] == 1.0
        assert first["params"] == second["params"]

    def test_gradients_that_wait_for_replicas_are_said(self, results: Results) -> None:
        for found in results["replicas-wait"]:
            assert found["reports"][-1]["reason"].startswith("gradients of earlier micro-batches")
            assert len(found["warnings"]) == 1

    @pytest.mark.parametrize("name", ["late", "late-head"])
    def test_fully_shard_after_attach_is_said(self, results: Results, name: str) -> None:
        for found in results[name]:
            assert [report["applied"] for report in found["reports"]] == [0.0] * 4
            assert any(
                "fully_shard was called after attach; attach after fully_shard" in warning
                for warning in found["warnings"]
            ), found["warnings"]


class TestBytes:
    """What a step sends, exactly: a change that sends more fails here."""

    @pytest.mark.parametrize("way", [*WAYS, "local"])
    def test_payload(self, results: Results, way: str) -> None:
        inputs, outputs, counts, steps = 8, 5, COUNTS[3], 3
        most, batch, rows, ranks = max(counts), sum(counts), 2, 3
        met, probe, factor = 5 * 8, outputs * 4, 3 * 4  # the last: whether gradients were clipped
        size, padded = (inputs + 1) * outputs * 4, (inputs + 1) * rows * 4
        each = met + probe + factor
        if way in ("rows", "free"):
            numbers = batch + 1 + (batch * batch if way == "rows" else batch + 21 * batch)
            each += most * (inputs + outputs) * 4 + numbers * 4
        else:
            each += ranks * padded + padded + 4  # reduced gradient, gathered step (SGD), its size
        if way == "sum":
            iterations, points = 20, 22
            certificate = 2 * points * 4 + 4 + 2 * points * 4
            scalars = 2 * 4 + iterations * 3 * 4 + certificate
            each += (iterations + 1) * size + scalars + most * 3 * 4
        assert [found["bytes"] for found in results[f"bytes-{way}"]] == [steps * each] * 3
