"""The benchmarks run, measure what they say and leave whole files behind."""

import json
from pathlib import Path

import pytest
import torch

from lab.bench import overhead


def test_overhead(tmp_path, capsys):
    threads = torch.get_num_threads()
    out = tmp_path / "new" / "overhead.json"
    sizes = ["--heads", "8x3", "--batches", "4", "--seconds", "2", "--repeats", "3"]
    assert overhead.main([*sizes, "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    assert [p.name for p in sorted(out.parent.iterdir())] == ["overhead.json", "overhead.md"]
    assert len(content["results"]) + len(content["missing"]) == 4
    assert content["results"]
    for result in content["results"]:
        assert result["route"] in ("dense", "matrix-free", "none")  # none where nobody is harmed
        assert result["ratio_low"] <= result["ratio"] <= result["ratio_high"]
        assert result["attached_peak_bytes"] >= result["plain_peak_bytes"] > 0
        # The hooks of the stopwatch still enclose primum's, whose solver runs for longer than this.
        assert 0.1 < result["stopwatch_ms"] < result["attached_ms"]
    assert {"torch", "cpu", "threads", "command", "date"} <= content["environment"].keys()
    assert str(Path.home()) not in json.dumps(content["environment"])
    assert "stopwatch ms" in capsys.readouterr().out
    assert torch.get_num_threads() == threads


def test_peak_memory_counts_what_is_held_at_once():
    entries = 1 << 16

    def run() -> None:
        first = torch.zeros(entries)
        del first
        kept = [torch.zeros(entries), torch.zeros(entries)]
        kept.clear()

    assert overhead.peak_memory(run) == 2 * 4 * entries


def test_bad_sizes_are_refused(capsys):
    with pytest.raises(SystemExit):
        overhead.main(["--batches", "0"])
    assert "above 0" in capsys.readouterr().err
