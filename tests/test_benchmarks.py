"""The benchmarks run, measure what they say and leave whole files behind."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from primum.experiments import tasks
from primum.experiments.job import own_random_numbers
from primum.experiments.shift_meter import CommonShift
from primum.experiments.shift_runs import shift_runs
from primum.experiments.trainer import Trainer
from primum.gram import Gram
from primum.recipe import Primum

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_overhead(load, tmp_path, capsys):
    threads = torch.get_num_threads()
    out = tmp_path / "new" / "overhead.json"
    sizes = ["--heads", "8x3", "--batches", "4", "--seconds", "2", "--repeats", "3"]
    assert load("overhead").main([*sizes, "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    assert [p.name for p in sorted(out.parent.iterdir())] == ["overhead.json", "overhead.md"]
    assert len(content["results"]) + len(content["missing"]) == 4
    assert content["results"]
    for result in content["results"]:
        assert result["route"] in ("dense", "matrix-free")
        assert result["ratio_low"] <= result["ratio"] <= result["ratio_high"]
        assert result["attached_peak_bytes"] >= result["plain_peak_bytes"] > 0
        # The hooks of the stopwatch still enclose primum's, whose solver runs for longer than this.
        assert 0.1 < result["stopwatch_ms"] < result["attached_ms"]
    assert {"torch", "cpu", "threads", "command", "date"} <= content["environment"].keys()
    assert str(Path.home()) not in json.dumps(content["environment"])
    assert "stopwatch ms" in capsys.readouterr().out
    assert torch.get_num_threads() == threads


def test_peak_memory_counts_what_is_held_at_once(load):
    entries = 1 << 16

    def run() -> None:
        first = torch.zeros(entries)
        del first
        kept = [torch.zeros(entries), torch.zeros(entries)]
        kept.clear()

    assert load("overhead").peak_memory(run) == 2 * 4 * entries


def test_routes(load, tmp_path, capsys):
    out = tmp_path / "routes.json"
    sizes = ["--batches", "8", "64", "--inputs", "8", "--outputs", "3", "--positions", "2"]
    routes = load("routes")
    assert routes.main([*sizes, "--seconds", "3", "--repeats", "2", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    assert out.with_suffix(".md").exists()
    assert len(content["results"]) == 6  # two batches and two gains, and a sequence for each gain
    assert content["summary"]["all"]["mean"] >= 1
    assert content["summary"]["all"]["fitted_mean"] <= content["summary"]["all"]["mean"] + 1e-3
    assert "Regret" in capsys.readouterr().out


def test_routes_counts_the_products_of_the_solver(load):
    class Counting(Gram):
        diagonal = torch.ones(4)
        count = 0

        def times(self, vector: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return vector

    gram = Counting()
    gram.over_ranks, gram.collective = torch.clone, True  # where it does not stop early
    Primum()(gram, torch.ones(4), torch.tensor(1.0), 0.1)
    assert gram.count == load("routes").PRODUCTS


@pytest.mark.parametrize("name", ["overhead", "routes"])
def test_bad_sizes_are_refused(load, name, capsys):
    with pytest.raises(SystemExit):
        load(name).main(["--batches", "0"])
    assert "above 0" in capsys.readouterr().err


def test_the_table_shows_what_parts_measured():
    rows = (BENCHMARKS / "results" / "parts.md").read_text().split("\n\n")[0]
    found = json.loads((BENCHMARKS / "results" / "parts.json").read_text())["parts"]
    assert f"| backbone alone | {found['backbone alone']['head']:.2f} |" in rows
    assert found["backbone alone"]["cosine"] < 0 < found["backbone alone, shuffled"]["cosine"]


def test_early_shift(load, tmp_path, capsys):
    out = tmp_path / "early_shift.json"
    with load("_common").use_threads(2):
        assert load("early_shift").main(["--quick", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    assert content["environment"]["threads"] == 1  # those it measured with
    assert len(content["shares"]) == 2
    for shares in content["shares"].values():
        assert len(shares) == 20
        assert all(0 < share <= 1 for share in shares)
    assert content["ranks"] == {}  # no stored runs of generated images
    assert "over 0 settings" in capsys.readouterr().out
    written = {path: path.read_text() for path in (out, out.with_suffix(".md"))}
    assert load("early_shift").main(["--quick", "--render", "--out", str(out)]) == 0
    assert {path: path.read_text() for path in written} == written


def test_early_shift_compares_with_the_gains_of_today(load, tmp_path):
    stored = BENCHMARKS / "results" / "early_shift.json"
    out = tmp_path / stored.name
    out.write_bytes(stored.read_bytes())
    assert (
        load("early_shift").main(
            ["--render", "--out", str(out), "--results", str(BENCHMARKS.parent / "results")]
        )
        == 0
    )
    for suffix in (".json", ".md"):
        assert out.with_suffix(suffix).read_text() == stored.with_suffix(suffix).read_text()


def test_early_shift_measures_the_steps_after_the_first_epoch(load):
    module = load("early_shift")
    settings = replace(shift_runs(smoke=True)[0], epochs=8, shift_every=1)
    data = tasks.load(settings)
    with own_random_numbers(settings.seed, torch.device("cpu")):
        meter = CommonShift()
        trainer = Trainer(settings, data, [meter])
        epoch = len(trainer.batches)
        for _ in range(epoch + 20):
            trainer.step()
    assert module.early_shares(settings, data) == meter.table["common_shift"][epoch:]
