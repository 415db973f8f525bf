"""The guide says what the benchmark of the second look measured."""

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[3] / "lab" / "bench" / "results"


def test_the_guide_says_what_was_measured():
    runs = json.loads((RESULTS / "second_look.json").read_text())["runs"]
    assert {run["measurements"] for run in runs.values()} == {26}
    plain, own = runs["plain"], runs["primum"]

    def real_harm(row) -> int:
        return round(1000 * row["batch"]["total"]["harm"])

    # The sentences below the table.
    assert [real_harm(plain[kind]) for kind in ("plain", "primum")] == [56, 34]
    assert [real_harm(own[kind]) for kind in ("plain", "primum")] == [89, 52]
    assert real_harm(plain["shuffled"]) > real_harm(plain["plain"])
    assert real_harm(own["shuffled"]) > real_harm(own["plain"])
    assert round(100 * plain["plain"]["batch"]["head_share"]) == 14
    assert round(100 * plain["plain"]["agreement"]["same_sign"]) == 76
    assert round(1000 * plain["plain"]["batch"]["common"]["harm"]) == 49
    falls = [plain["plain"], own["primum"]]
    assert [round(-1000 * row["batch"]["total"]["mean"]) for row in falls] == [20, 42]
    for look, low, high in (("head", 0.97, 0.99), ("network", 0.65, 0.68)):
        cosines = sorted(round(run[f"second look, {look}"]["cosine"], 2) for run in runs.values())
        assert cosines == [low, high]
