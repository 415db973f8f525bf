"""Several processes give what one process gives on the joined batch; nothing hangs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from primum.distributed.over_ranks import Sizes, choose_way
from primum.kernel.recipe import Primum
from primum.paper import Paper
from rank_child import train

CHILD = Path(__file__).parent / "rank_child.py"


def launch(folder: Path, ranks: int, runs: dict[str, Any]) -> list[subprocess.Popen[str]]:
    (folder / "runs.json").write_text(json.dumps(runs))
    return [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(folder), str(rank), str(ranks)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


WAYS = {
    "gather": {"way": "gather"},
    "sum": {"way": "sum"},
    "rows": {"way": "rows", "dense": True},
    "free": {"way": "rows", "dense": False},
}
BATCHES = {
    "even": {"counts": [12, 12]},
    "uneven": {"counts": [12, 7]},
    "three": {"counts": [8, 5, 9], "short": 3},
}
OPTIMIZERS = {"SGD": {"optimizer": "SGD"}, "AdamW": {"optimizer": "AdamW"}}
WIDE = {"dtype": "float64"}  # Twenty steps of training multiply rounding.
LOOPS = {
    "no_sync": {"micro_batches": 3},
    "clipped": {"micro_batches": 2, "clip": 0.05, "optimizer": "AdamW"},
    "sequences": {"tokens": 4, "per": "sample"},
    "tokens": {"tokens": 4},
    "no-bias": {"bias": False, "clip": 0.05},
    "by-hand": {"wrap": False, "scope": "global"},
}
FORMS: dict[str, Any] = {
    "explicit": {"explicit": True},
    "compiled": {"compile": True},
    "inner": {"inner": True},
}


def all_runs() -> dict[str, dict[str, Any]]:
    """Settings by name, of everything that needs several ranks and ends well."""
    runs: dict[str, dict[str, Any]] = {}
    for way, by in WAYS.items():
        for batch, counts in BATCHES.items():
            for optimizer, kind in OPTIMIZERS.items():
                runs[f"steps-{batch}-{optimizer}-{way}"] = WIDE | by | counts | kind
        runs[f"float32-{way}"] = BATCHES["uneven"] | by | {"steps": 3}
        runs[f"bytes-{way}"] = BATCHES["uneven"] | by | {"steps": 4}
        for loop, settings in LOOPS.items():
            runs[f"{loop}-{way}"] = BATCHES["uneven"] | WIDE | by | {"steps": 8} | settings
        for kind in ("nan", "eval"):
            runs[f"{kind}-{way}"] = by | {"trouble": kind, "steps": 7}
    for optimizer, kind in OPTIMIZERS.items():
        runs[f"paper-{optimizer}"] = BATCHES["uneven"] | WIDE | kind | {"recipe": "paper"}
    for form, settings in FORMS.items():
        runs[form] = WIDE | {"steps": 5} | settings
    tokens = BATCHES["uneven"] | {"tokens": 4, "steps": 3}
    runs["tokens-compiled"] = tokens | {"compile": True}
    runs["tokens-explicit"] = tokens | {"explicit": True}
    runs["tokens-local"] = tokens | {"scope": "local"}
    runs["tokens-on-one-rank"] = tokens | {"picked": True}
    runs["join"] = {"counts": [12, 12], "steps": 4, "join": True}
    runs["memory"] = {"way": "gather", "trouble": "memory", "steps": 8}
    runs["unseen"] = {"wrap": False, "steps": 2}
    runs["local"] = WIDE | {"steps": 1, "scope": "local"}
    return runs


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Of every run, the ranks' results. One group of two processes and one of three make all."""
    by_size: dict[int, dict[str, Any]] = {2: {}, 3: {}}
    for name, own in all_runs().items():
        by_size[len(own.get("counts", [0, 0]))][name] = own
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks, runs in by_size.items():
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
        children = launch(folder, ranks, runs)
        errors = [child.communicate(timeout=200)[1] for child in children]
        assert [child.returncode for child in children] == [0] * ranks, "\n".join(errors)
        files = [folder / f"results-{rank}.json" for rank in range(ranks)]
        parts = [json.loads(each.read_text()) for each in files]
        found |= {name: [part[name] for part in parts] for name in runs}
    return found


Results = dict[str, list[dict[str, Any]]]


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Relative to each parameter's size."""
    for name, value in expected["params"].items():
        one, other = (torch.tensor(x, dtype=torch.float64) for x in (found["params"][name], value))
        assert (one - other).norm() <= tolerance * other.norm(), name


class TestOneProcess:
    """What one process gives, on the joined batch.

    In float64 parameters agree to 1e-9 after twenty steps; in float32 the weights of the first
    steps agree to 1e-5, before rounding of the parameters themselves adds up.
    """

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("batch", BATCHES)
    def test_twenty_steps(self, results: Results, batch: str, optimizer: str, way: str) -> None:
        name = f"steps-{batch}-{optimizer}-{way}"
        own = all_runs()[name]
        expected = train(own)
        assert max(max(report["weights"]) for report in expected["reports"]) > 0.1
        for rank, found in enumerate(results[name]):
            assert_same(found, expected, 1e-9)
            assert found["warnings"] == []
            for step, (one, other) in enumerate(
                zip(found["reports"], expected["reports"], strict=True)
            ):
                for figure in ("harm_before", "harm_after", "harmed_before", "mean_extra_weight"):
                    assert one[figure] == pytest.approx(other[figure], rel=1e-6, abs=1e-9)
                assert one["gap"] == pytest.approx(other["gap"], abs=1e-7)
                assert one["weights"] == pytest.approx(other["weights"], abs=1e-6)
                assert one["drift"] == pytest.approx(other["drift"], rel=1e-6, abs=1e-9)
                assert one["applied"] == 1.0
                assert one["fallbacks"] == 0
                counts = list(own["counts"])
                counts[-1] -= own.get("short", 0) if step % 3 == 2 else 0
                first = sum(counts[:rank])
                assert one["own"] == [first, first + counts[rank]]

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_paper(self, results: Results, optimizer: str) -> None:
        name = f"paper-{optimizer}"
        expected = train(all_runs()[name])
        assert max(expected["reports"][-1]["weights"]) > 0
        for found in results[name]:
            assert_same(found, expected, 1e-9)

    @pytest.mark.parametrize("way", WAYS)
    def test_weights_in_float32(
        self, results: Results, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = f"float32-{way}"
        if way in (
            "sum",
            "free",
        ):  # ranks compute step lengths in float32, one process in Python's numbers
            monkeypatch.setattr(sys.modules["primum.solve"], "on_host", lambda value: False)
        expected = train(all_runs()[name])
        for found in results[name]:
            for one, other in zip(found["reports"], expected["reports"], strict=True):
                assert max(other["weights"]) > 0.01
                assert one["weights"] == pytest.approx(other["weights"], abs=1e-5)

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("loop", LOOPS)
    def test_loops(self, results: Results, loop: str, way: str) -> None:
        name = f"{loop}-{way}"
        expected = train(all_runs()[name])
        assert max(expected["reports"][-1]["weights"]) > 0
        for found in results[name]:
            assert_same(found, expected, 1e-8)

    @pytest.mark.parametrize("form", FORMS)
    def test_other_forms(self, results: Results, form: str) -> None:
        expected = train(WIDE | {"steps": 5})
        for found in results[form]:
            assert found["bytes"] > 0
            assert_same(found, expected, 1e-8)

    @pytest.mark.parametrize("name", ["tokens-compiled", "tokens-local", "tokens-on-one-rank"])
    def test_all_ranks_decide_alike(self, results: Results, name: str) -> None:
        """What is weighed, and so what is sent: also if only one of them sees tokens."""
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
        alone = train(WIDE | {"steps": 1, "counts": [12]})
        one, two = results["local"]
        assert one["bytes"] == two["bytes"] == 0
        expected = alone["reports"][0]["weights"]
        assert one["reports"][0]["weights"] == pytest.approx(expected, abs=1e-9)
        assert two["reports"][0]["weights"] != pytest.approx(expected, abs=1e-3)


class TestTrouble:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("kind", ["nan", "eval"])
    def test_all_ranks_fall_back_together(self, results: Results, kind: str, way: str) -> None:
        both = results[f"{kind}-{way}"]
        for found in both:
            counts = [report["fallbacks"] for report in found["reports"]]
            # After the NaN nothing is finite any more, as without us.
            assert counts == [0, 0, 0, 0, 0, 1, 2 if kind == "nan" else 1]
            assert all(weight == 0 for weight in found["reports"][5]["weights"])
            assert len(found["warnings"]) == 1
        if kind == "eval":
            reasons = [found["reports"][5]["reason"] for found in both]
            assert reasons[0] == "another rank could not compute its weights"
            assert reasons[1].startswith("the head ran in eval mode")

    def test_a_rank_that_fails_by_itself_leaves_the_others_alone(self, results: Results) -> None:
        """After all was gathered nobody waits any more: that rank's gradients stay plain."""
        first, second = results["memory"]
        assert [report["fallbacks"] for report in first["reports"]] == [0] * 8
        assert [report["fallbacks"] for report in second["reports"]] == [0] * 5 + [1] * 3
        assert second["reports"][5]["reason"] == "MemoryError: no room for the matrix"
        assert second["reports"][6]["applied"] == 1.0
        assert first["params"] == second["params"]

    def test_ranks_without_a_wrapper_are_said(self, results: Results) -> None:
        for found in results["unseen"]:
            assert found["bytes"] == 0
            (warning,) = found["warnings"]
            assert "does not seem to run in DistributedDataParallel" in warning

    def test_under_join_each_rank_solves_alone(self, results: Results) -> None:
        """A rank whose data have ended does not come along: no hang, and it is said once."""
        for rank, found in enumerate(results["join"]):
            assert len(found["reports"]) == 4 - rank
            assert found["bytes"] == 0
            assert all(report["applied"] == 1.0 for report in found["reports"])
            assert [each[:38] for each in found["warnings"]] == [
                "primum: each rank solves for its own s"
            ]

    @pytest.mark.parametrize("kind", ["killed", "raises"])
    def test_a_lost_rank_is_the_groups_error(self, tmp_path: Path, kind: str) -> None:
        """The survivor ends within the group's timeout of 20 s, with the group's own error."""
        first, second = launch(tmp_path, 2, {"run": {"trouble": kind}})
        own = second.communicate(timeout=100)[1]
        start = time.monotonic()
        error = first.communicate(timeout=60)[1]
        assert time.monotonic() - start < 30
        assert first.returncode != 0
        assert second.returncode != 0
        assert "primum" not in error.strip().splitlines()[-1]
        assert any(word in error.lower() for word in ("gloo", "connection", "peer", "timed out"))
        if kind == "raises":
            assert "this rank has had enough" in own


class TestBytes:
    """What a step sends, exactly: a change that sends more fails here."""

    @pytest.mark.parametrize("way", WAYS)
    def test_payload(self, results: Results, way: str) -> None:
        inputs, outputs, most, steps = 8, 5, 12, 4
        met = 5 * 8  # five whole numbers
        probe = outputs * 4  # what the bias's gradient will be
        size = (inputs + 1) * outputs * 4
        if way == "gather":
            each = met + probe + most * (inputs + outputs) * 4
        elif way in ("rows", "free"):
            batch = 12 + 7
            numbers = batch + 1 + (batch * batch if way == "rows" else batch + 21 * batch)
            each = met + probe + most * (inputs + outputs) * 4 + numbers * 4
        else:
            iterations, points = 20, 22
            products = (iterations + 1) * size
            certificate = 2 * points * 4 + 4 + 2 * points * 4
            scalars = 2 * 4 + iterations * 3 * 4 + certificate
            each = met + probe + size + products + scalars + most * 3 * 4
        assert [found["bytes"] for found in results[f"bytes-{way}"]] == [steps * each] * 2


class TestCosts:
    def ask(
        self,
        rows: int,
        inputs: int,
        outputs: int,
        params: int | None = None,
        *,
        ranks: int = 8,
        recipe: Any = None,
        by_rows: bool = True,
        **more: Any,
    ) -> str | None:
        products = (recipe or Primum()).products
        sizes = Sizes(rows, more.pop("positions", 1), inputs, outputs, ranks, products, **more)
        return choose_way(sizes, params, by_rows=by_rows)

    def test_few_samples_are_gathered_and_many_are_not(self) -> None:
        assert self.ask(256, 64, 10) == "gather"
        assert self.ask(1_048_576, 2048, 1000, ranks=1024) == "sum"

    def test_a_matrix_that_factorises_is_cheap(self) -> None:
        assert self.ask(1024, 768, 1000) == "rows"
        assert self.ask(1024, 768, 1000, by_rows=False) == "sum"
        assert self.ask(1024, 768, 1000, factorises=True) == "rows"
        assert self.ask(1024, 768, 1000, factorises=True, by_rows=False) == "gather"

    def test_traffic(self) -> None:
        sizes = Sizes(100, 3, 7, 5, ranks=4, products=10, itemsize=2)
        sent = sizes.traffic()
        assert sent["gather"] == 75 * 3 * 12 * 2
        assert sent["sum"] == (10 + 1) * 2 * 0.75 * 35 * 4  # the gradient, and the products
        numbers = 100 * 100 if sizes.rows_are_dense else 11 * 100  # and drift, and size
        assert sent["rows"] == sent["gather"] + 2 * 0.75 * 4 * (numbers + 101)

    def test_a_few_samples_have_a_matrix_and_many_do_not(self) -> None:
        assert Sizes(64, 1, 768, 1000, ranks=8, products=13).rows_are_dense
        assert Sizes(64, 2048, 4096, 32_000, ranks=8, products=13).rows_are_dense  # sequences
        assert not Sizes(1024, 1, 768, 1000, ranks=8, products=13).rows_are_dense
        assert Sizes(1024, 1, 768, 1000, ranks=8, products=13, factorises=True).rows_are_dense
        assert not Sizes(16, 1, 64, 10, ranks=8, products=0).rows_are_dense

    def test_sharded(self) -> None:
        """Small and middle problems by rows, long sequences by sums, or alone under "auto"."""
        words: dict[str, Any] = {"positions": 2048, "holders": 8}
        assert self.ask(1024, 768, 1000, holders=8) == "rows"
        assert self.ask(1024, 768, 1000, 10**8, holders=8) == "rows"
        assert self.ask(64, 4096, 32_000, **words) == "sum"
        assert self.ask(64, 4096, 32_000, 10**9, **words) is None
        assert self.ask(64, 4096, 32_000, **words, recipe=Paper()) == "rows"

    def test_what_auto_can_afford(self) -> None:
        """The cheaper way in bytes, if the other sends too much; neither, if both do."""
        assert self.ask(128, 64, 10, 1000) == "gather"  # below 1 MiB bytes are ignored
        assert self.ask(65_536, 2048, 1000) == "sum"
        assert self.ask(1024, 2048, 1000, 25_600_000) == "rows"  # ResNet-50
        assert self.ask(65_536, 2048, 1000, 25_600_000) is None
        assert self.ask(65_536, 2048, 1000, 10**9) == "sum"

    def test_auto_repeats_little(self) -> None:
        """A vocabulary's head: cheap to gather in bytes, but on every rank the whole problem."""
        assert self.ask(4096, 4096, 32_000, 10**9, ranks=8, by_rows=False) == "gather"
        assert self.ask(4096, 4096, 32_000, 10**9, ranks=64, by_rows=False) is None
        assert self.ask(4096, 4096, 32_000, 10**9, ranks=64) == "rows"  # this repeats nothing
        assert self.ask(4096, 64, 10, 10**9, ranks=64) == "gather"  # hardly any work

    def test_other_recipes_need_the_samples(self) -> None:
        assert self.ask(262_144, 2048, 1000, recipe=Paper()) == "gather"
        assert self.ask(262_144, 2048, 1000, 10**9, ranks=1024, recipe=Paper()) is None
        assert self.ask(262_144, 2048, 1000, recipe=Primum(radius=0)) == "gather"
