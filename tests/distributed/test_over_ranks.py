"""Several processes give what one process gives on the joined batch; nothing hangs.

Under DistributedDataParallel (`ddp-`) and with a head split by `fully_shard` (`shard-`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from primum.distributed.over_ranks import FEW_BYTES, Cost, choose_strategy
from primum.kernel.recipe import Primum, Recipe
from primum.paper import Paper

from .rank_child import train

WIDE = {"dtype": "float64"}  # Twenty steps of training multiply rounding.
WAYS: dict[str, dict[str, Any]] = {"gather": {"way": "gather"}, "sum": {"way": "sum"}}
COUNTS = {2: [12, 7], 4: [6, 4, 5, 7]}
OPTIMIZERS = ("SGD", "AdamW")
# Of five outputs four ranks hold 2, 2, 1 and none.
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp-even": {"counts": [12, 12]},
    "ddp-uneven": {"counts": COUNTS[2]},
    "ddp-four": {"counts": COUNTS[4], "short": 3},
    "shard-2": {"shard": True, "counts": COUNTS[2]},
    "shard-2-head": {"shard": True, "counts": COUNTS[2], "head": True},
    "shard-2-kept": {"shard": True, "counts": COUNTS[2], "head": True, "reshard": False},
    "shard-4": {"shard": True, "counts": COUNTS[4], "short": 3},
    "shard-4-hsdp": {"shard": True, "counts": COUNTS[4], "replicas": 2},
}
LOOPS: dict[str, dict[str, Any]] = {
    "synced": {"micro_batches": 3},
    "unsynced": {"micro_batches": 3, "sync": False, "last": True},
    "clipped": {"micro_batches": 2, "clip": 0.05, "optimizer": "AdamW"},
    "clipped-no-bias": {"micro_batches": 2, "clip": 0.05, "bias": False},
    "sequences": {"tokens": 4, "per": "sample"},
    "tokens": {"tokens": 4},
}
FORMS: dict[str, dict[str, Any]] = {
    "ddp-explicit": {"explicit": True},
    "ddp-compiled": {"compile": "model"},
    "ddp-inner": {"inner": True},
    "ddp-by-hand": {"wrap": False, "scope": "global"},
    "shard-unsynced": {"micro_batches": 3, "sync": False},
    "shard-unsynced-head": {"micro_batches": 2, "sync": False, "head": True, "optimizer": "AdamW"},
    "shard-explicit": {"explicit": True, "head": True},
    "shard-blocks-compiled": {"compile": "blocks"},
    "shard-compiled": {"compile": "model"},
    "shard-compiled-head": {"compile": "model", "head": True},
}


def all_runs() -> dict[str, dict[str, Any]]:
    """Settings by name, of everything that needs several ranks and ends well."""
    runs: dict[str, dict[str, Any]] = {}
    for way, by in WAYS.items():
        for layout, settings in LAYOUTS.items():
            for optimizer in OPTIMIZERS if way == "gather" or "head" not in settings else ():
                own = WIDE | by | settings | {"optimizer": optimizer}
                runs[f"steps-{layout}-{optimizer}-{way}"] = own
        for kind in ("ddp", "shard"):
            base = by | {"shard": kind == "shard", "counts": COUNTS[2]}
            runs[f"{kind}-bytes-{way}"] = base | {"steps": 3}
            for loop, settings in LOOPS.items():
                runs[f"loop-{kind}-{loop}-{way}"] = WIDE | base | {"steps": 8} | settings
        runs[f"ddp-float32-{way}"] = by | {"counts": COUNTS[2], "steps": 3}
    for kind in ("ddp", "shard"):
        base = {"shard": kind == "shard", "counts": COUNTS[2]}
        for optimizer in OPTIMIZERS:
            own = WIDE | base | {"recipe": "paper", "optimizer": optimizer, "steps": 8}
            runs[f"loop-{kind}-paper-{optimizer}"] = own
        runs[f"loop-{kind}-auto"] = WIDE | base | {"steps": 3}
        for trouble in ("nan", "check", "recipe"):
            own = base | WAYS["gather"] | {"trouble": trouble, "steps": 8, "counts": [12, 12]}
            runs[f"{kind}-{trouble}"] = own
    for form, settings in FORMS.items():
        base = {"shard": form.startswith("shard"), "counts": COUNTS[2], "steps": 5}
        runs[f"loop-{form}"] = WIDE | base | settings
    tokens = {"counts": COUNTS[2], "tokens": 4, "steps": 3}
    runs["tokens-compiled"] = tokens | {"compile": "model"}
    runs["tokens-explicit"] = tokens | {"explicit": True}
    runs["tokens-local"] = tokens | {"scope": "local"}
    runs["tokens-on-one-rank"] = tokens | {"picked": True}
    runs["join"] = {"steps": 4, "join": True}
    runs["unseen"] = {"wrap": False, "steps": 2}
    runs["local"] = WIDE | {"steps": 1, "scope": "local"}
    shard = WIDE | {"shard": True, "counts": COUNTS[2], "steps": 8}
    runs["shard-bytes-local"] = {"shard": True, "counts": COUNTS[2], "steps": 3, "way": "local"}
    runs["shard-local"] = shard | {"scope": "local"}
    runs["shard-local-one"] = shard | {"counts": [12, 1], "steps": 3, "scope": "local"}
    runs["shard-observe"] = shard | {"observe": True}
    runs["shard-bf16"] = {"shard": True, "bf16": True, "steps": 1}
    runs["shard-divide"] = shard | {"divide": 1.0, "micro_batches": 2}
    runs["shard-late"] = {"shard": True, "late": True, "steps": 4}
    runs["shard-late-head"] = {"shard": True, "late": True, "steps": 4, "head": True}
    runs["shard-resume"] = shard | {"resume": True, "optimizer": "AdamW", "head": True}
    hsdp = WIDE | {"shard": True, "counts": COUNTS[4], "replicas": 2, "micro_batches": 3}
    runs["loop-hsdp-unsynced"] = hsdp | {"steps": 6, "clip": 0.05, "sync": False}
    runs["hsdp-waits"] = hsdp | {"steps": 2, "all_reduce": False}
    return runs


def launch(folder: Path, ranks: int, runs: dict[str, Any]) -> list[subprocess.Popen[str]]:
    (folder / "runs.json").write_text(json.dumps(runs))
    return [
        subprocess.Popen(
            [sys.executable, "-m", "distributed.rank_child", str(folder), str(rank), str(ranks)],
            cwd=Path(__file__).resolve().parents[1],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of every run, the ranks' results. One group of two processes and one of four make all."""
    found: Results = {}
    for ranks in COUNTS:
        runs = {n: own for n, own in all_runs().items() if len(own.get("counts", "ab")) == ranks}
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
        children = launch(folder, ranks, runs)
        try:
            errors = [child.communicate(timeout=900)[1] for child in children]
        finally:
            for child in children:
                child.kill()
        assert [child.returncode for child in children] == [0] * ranks, "\n".join(errors)
        files = [folder / f"results-{rank}.json" for rank in range(ranks)]
        parts = [json.loads(each.read_text()) for each in files]
        found |= {name: [part[name] for part in parts] for name in runs}
    return found


def alone(name: str, **changes: Any) -> dict[str, Any]:
    """One process on the joined batch, by the same settings."""
    return train(all_runs()[name] | {"explicit": False} | changes)


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Relative to each parameter's size."""
    for name, value in expected["params"].items():
        one, other = (torch.tensor(x, dtype=torch.float64) for x in (found["params"][name], value))
        assert (one - other).norm() <= tolerance * other.norm(), name


def named(start: str) -> list[str]:
    return [name for name in all_runs() if name.startswith(start)]


class TestOneProcess:
    """What one process gives, on the joined batch.

    In float64 parameters agree to 1e-9 after twenty steps; in float32 the weights of the first
    steps agree to 1e-5, before rounding of the parameters themselves adds up.
    """

    @pytest.mark.parametrize("name", named("steps-"))
    def test_twenty_steps(self, results: Results, name: str) -> None:
        """Rows uneven or none, batches uneven, head in the root's group or its own."""
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

    @pytest.mark.parametrize("name", named("loop-"))
    def test_loops(self, results: Results, name: str) -> None:
        expected = alone(name)
        assert max(expected["reports"][-1]["weights"]) > 0
        for found in results[name]:
            assert found["bytes"] > 0
            assert found["warnings"] == []
            assert {report["fallbacks"] for report in found["reports"]} == {0}
            # Older torch clips float64 shards by a factor with float32 precision.
            assert_same(found, expected, 1e-7)

    @pytest.mark.parametrize("way", WAYS)
    def test_weights_in_float32(self, results: Results, way: str) -> None:
        expected = alone(f"ddp-float32-{way}")
        for found in results[f"ddp-float32-{way}"]:
            for one, other in zip(found["reports"], expected["reports"], strict=True):
                assert max(other["weights"]) > 0.01
                assert one["weights"] == pytest.approx(other["weights"], abs=1e-5)

    @pytest.mark.parametrize("name", ["tokens-compiled", "tokens-local", "tokens-on-one-rank"])
    def test_all_ranks_decide_alike(self, results: Results, name: str) -> None:
        """What is weighted, and so what is sent: also if only one of them sees tokens."""
        for rank, found in enumerate(results[name]):
            together = name != "tokens-local"
            count = 12 * 4 + 7 * 5 if together else (12 * 4, 7 * 5)[rank]
            for report in found["reports"]:
                assert (report["per"], report["radius"]) == ("token", 0.1)
                assert len(report["weights"]) == count
                assert report["applied"] == 1
                if together:
                    assert report["own"] == [[0, 48], [48, 83]][rank]
            assert found["warnings"] == []

    def test_losses_of_the_explicit_form_decide(self, results: Results) -> None:
        for found in results["tokens-explicit"]:
            for report in found["reports"]:
                assert (report["per"], report["radius"]) == ("sample", 0.4)
                assert len(report["weights"]) == 12 + 7

    def test_local_is_each_ranks_own(self, results: Results) -> None:
        """No bytes, and at the first step the weights that a process gives its own samples."""
        first = alone("local", counts=[12])
        one, two = results["local"]
        assert one["bytes"] == two["bytes"] == 0
        expected = first["reports"][0]["weights"]
        assert one["reports"][0]["weights"] == pytest.approx(expected, abs=1e-9)
        assert two["reports"][0]["weights"] != pytest.approx(expected, abs=1e-3)


class TestShards:
    def test_rows_are_those_of_fully_shard(self, results: Results) -> None:
        """Of five outputs; the last of four ranks has none, and with HSDP two have the same."""
        for layout, rows in {
            "shard-4": [[0, 2], [2, 4], [4, 5], [5, 5]],
            "shard-4-hsdp": [[0, 3], [3, 5], [0, 3], [3, 5]],
        }.items():
            assert [found["rows"] for found in results[f"steps-{layout}-SGD-sum"]] == rows

    def test_checkpoints(self, results: Results) -> None:
        """Saved by torch.distributed.checkpoint, loaded after attaching: the run goes on."""
        expected = alone("shard-resume")
        for found in results["shard-resume"]:
            assert_same(found, expected, 1e-8)
            assert not [key for key in found["keys"] if "primum" in key]
            for one, other in zip(found["reports"], expected["reports"][4:], strict=True):
                assert one["weights"] == pytest.approx(other["weights"], abs=1e-6)

    def test_a_divisor_of_ones_own(self, results: Results) -> None:
        """Gradients are summed and not averaged: each drift is four times as large.

        But for the part of weight decay, which does not grow with the gradients.
        """
        expected = alone("shard-divide", steps=1)["reports"][0]["drift"]
        one, two = results["shard-divide"]
        assert one["params"] == two["params"]
        assert one["reports"][0]["drift"] == pytest.approx(
            [4 * each for each in expected], rel=0.01, abs=1e-5
        )

    def test_observing_leaves_the_gradients_alone(self, results: Results) -> None:
        plain = alone("shard-observe", observe=False, radius=0.0)
        for found in results["shard-observe"]:
            assert_same(found, plain, 1e-9)
            assert found["reports"][0]["drift"] == pytest.approx(
                plain["reports"][0]["drift"], rel=1e-6, abs=1e-9
            )

    def test_policy_of_bfloat16(self, results: Results) -> None:
        """Parameters and activations in bfloat16: the weights have its two or three digits."""
        expected = alone("shard-bf16", dtype="bfloat16")["reports"][0]["weights"]
        assert max(expected) > 0.1
        for found in results["shard-bf16"]:
            assert found["reports"][0]["weights"] == pytest.approx(expected, abs=0.03)
            assert found["reports"][0]["applied"] == 1.0

    def test_local_has_its_own_samples_and_the_drift_of_the_global_step(
        self, results: Results
    ) -> None:
        """Sample gradients as on one rank alone, so the drift is that many times the global one."""
        expected = alone("shard-local")["reports"][0]["drift"]
        one, two = (found["reports"][0] for found in results["shard-local"])
        assert (len(one["drift"]), len(two["drift"])) == (12, 7)
        both = [*one["drift"], *two["drift"]]
        assert both == pytest.approx([2 * each for each in expected], rel=1e-6, abs=1e-9)
        assert one["own"] == two["own"] == [None, None]
        for found in results["shard-local"]:
            assert max(max(report["weights"]) for report in found["reports"]) > 0
            assert found["warnings"] == []
            assert all(r["harm_after"] <= r["harm_before"] for r in found["reports"])

    def test_a_rank_with_one_sample_keeps_up(self, results: Results) -> None:
        for found in results["shard-local-one"]:
            assert [report["applied"] for report in found["reports"]] == [1.0] * 3

    def test_gradients_that_wait_for_replicas(self, results: Results) -> None:
        for found in results["hsdp-waits"]:
            assert found["reports"][-1]["reason"].startswith("gradients of earlier micro-batches")
            assert len(found["warnings"]) == 1

    @pytest.mark.parametrize("name", ["shard-late", "shard-late-head"])
    def test_fully_shard_after_attach(self, results: Results, name: str) -> None:
        for found in results[name]:
            assert [report["applied"] for report in found["reports"]] == [0.0] * 4
            assert any(
                "fully_shard was called after attach; attach after fully_shard" in warning
                for warning in found["warnings"]
            ), found["warnings"]


@pytest.mark.parametrize("kind", ["ddp", "shard"])
class TestTrouble:
    @pytest.mark.parametrize("trouble", ["nan", "check"])
    def test_all_ranks_fall_back_together(self, results: Results, kind: str, trouble: str) -> None:
        both = results[f"{kind}-{trouble}"]
        for found in both:
            counts = [report["fallbacks"] for report in found["reports"]]
            # After the NaN nothing is finite any more, as without us.
            assert counts == [0] * 5 + ([1, 2, 3] if trouble == "nan" else [1, 1, 1])
            assert all(weight == 0 for weight in found["reports"][5]["weights"])
            assert len(found["warnings"]) == 1
        if trouble == "check":
            reasons = [found["reports"][5]["reason"] for found in both]
            assert reasons[0] == "another rank could not compute its weights"
            assert reasons[1] == "ValueError: no such head"

    def test_a_rank_that_fails_by_itself_leaves_the_others_alone(
        self, results: Results, kind: str
    ) -> None:
        """After all was gathered nobody waits any more: that rank's gradients stay plain."""
        first, second = results[f"{kind}-recipe"]
        assert [report["fallbacks"] for report in first["reports"]] == [0] * 8
        assert [report["fallbacks"] for report in second["reports"]] == [0] * 5 + [1] * 3
        assert second["reports"][5]["reason"] == "MemoryError: no room for the matrix"
        assert second["reports"][6]["applied"] == 1.0
        assert first["params"] == second["params"]


def test_ranks_without_a_wrapper_are_warned(results: Results) -> None:
    for found in results["unseen"]:
        assert found["bytes"] == 0
        (warning,) = found["warnings"]
        assert "does not seem to run in DistributedDataParallel" in warning


def test_under_join_each_rank_solves_alone(results: Results) -> None:
    """A rank whose data have ended does not come along: no hang, and one warning."""
    for rank, found in enumerate(results["join"]):
        assert len(found["reports"]) == 4 - rank
        assert found["bytes"] == 0
        assert all(report["applied"] == 1.0 for report in found["reports"])
        (warning,) = found["warnings"]
        assert "each rank solves for its own samples under join()" in warning


def test_a_lost_rank_is_the_groups_error(tmp_path: Path) -> None:
    """The survivor ends within the group's timeout of 20 s, with the group's own error."""
    first, second = launch(tmp_path, 2, {"run": {"trouble": "killed"}})
    second.communicate(timeout=100)
    start = time.monotonic()
    error = first.communicate(timeout=60)[1]
    assert time.monotonic() - start < 30
    assert first.returncode != 0
    assert "primum" not in error.strip().splitlines()[-1]
    assert any(word in error.lower() for word in ("gloo", "connection", "peer", "timed out"))


class TestBytes:
    """What a step sends, exactly: a change that sends more fails here."""

    @pytest.mark.parametrize(
        "name", ["ddp-gather", "ddp-sum", "shard-gather", "shard-sum", "shard-local"]
    )
    def test_payload(self, results: Results, name: str) -> None:
        kind, way = name.split("-")
        inputs, outputs, most, steps = 8, 5, 12, 3
        size = (inputs + 1) * outputs * 4
        each = 6 * 8  # six whole numbers
        if kind == "shard":
            each += 3 * (inputs + 1) * 4  # its rows of the step (SGD), padded
        if way == "gather":
            each += most * (inputs + outputs) * 4
        else:
            each += size  # the gradient
        if way == "sum":
            iterations, points = 20, 22
            scalars = 2 + 3 * iterations + 3 * points + 2 + points
            each += (iterations + 1) * size + scalars * 4 + most * 3 * 4
        assert [found["bytes"] for found in results[f"{kind}-bytes-{way}"]] == [steps * each] * 2


class TestCosts:
    def ask(
        self,
        samples: int,
        inputs: int,
        outputs: int,
        trained: int | None = None,
        *,
        ranks: int = 8,
        recipe: Recipe | None = None,
        **more: Any,
    ) -> str:
        cost = Cost(
            samples=samples,
            positions=more.pop("positions", 1),
            inputs=inputs,
            outputs=outputs,
            ranks=ranks,
            products=(recipe or Primum()).products,
            **more,
        )
        return choose_strategy(cost, trained)

    def test_what_fits_is_gathered_and_the_rest_is_not(self) -> None:
        assert self.ask(256, 64, 10) == "gather"
        assert self.ask(1024, 768, 1000) == "gather"
        assert self.ask(1_048_576, 2048, 1000, ranks=1024) == "sum"

    def test_traffic(self) -> None:
        cost = Cost(samples=100, positions=3, inputs=7, outputs=5, ranks=4, products=10, itemsize=2)
        assert cost.gathered == 75 * 3 * 12 * 2
        assert cost.summed == (10 + 1) * 2 * 0.75 * 35 * 4  # the gradient, and the products

    def test_what_auto_can_afford(self) -> None:
        """A quarter of the traffic for the gradients; below 1 MiB bytes are ignored."""
        assert self.ask(128, 64, 10, 1000) == "gather"
        assert Cost(128, 1, 64, 10, 8, 13).gathered < FEW_BYTES
        assert self.ask(1024, 2048, 1000, 25_600_000) == "gather"  # ResNet-50
        assert self.ask(65_536, 2048, 1000, 25_600_000) == "local"
        assert self.ask(65_536, 2048, 1000) in ("gather", "sum")

    def test_auto_repeats_little(self) -> None:
        """A vocabulary's head: cheap to gather in bytes, but on every rank the whole problem."""
        assert self.ask(4096, 4096, 32_000, 10**9, ranks=8) == "gather"
        assert self.ask(4096, 4096, 32_000, 10**9, ranks=64) == "local"
        assert self.ask(4096, 64, 10, 10**9, ranks=64) == "gather"  # hardly any work

    def test_other_recipes_need_the_samples(self) -> None:
        assert self.ask(262_144, 2048, 1000, recipe=Paper()) == "gather"
        assert self.ask(262_144, 2048, 1000, 10**9, ranks=1024, recipe=Paper()) == "local"
        assert self.ask(262_144, 2048, 1000, recipe=Primum(radius=0)) == "gather"
