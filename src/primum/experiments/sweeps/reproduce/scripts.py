"""Figure 2 and Tables 3 and 4, by the scripts in `benchmarks`, which a checkout has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from primum.experiments.sweeps.job import Place
from primum.experiments.sweeps.reproduce.findings import Finding, Scale, judge
from primum.experiments.sweeps.settings import SettingsError
from primum.experiments.sweeps.sweep import SweepError
from primum.paper import PaperSettings

MOST = 50  # iterations of the paper's solver
MANY = 2000  # as good as its limit
CLOSE = 0.95  # of what many iterations remove, to count as converged
SUBSTANTIAL = 0.25  # of the harm removed, to count as a substantial reduction
SMALL_HEADS = {"sgd": ("64x10x128", "64x100x128", "64x100x512"), "adamw": ("384x10x128",)}


def run_gram(scale: Scale, place: Place, optimizer: str) -> list[Finding]:
    """Tables 3 (SGD) and 4 (AdamW): time and memory of the Gram matrix."""
    options = ["--optimizer", optimizer]
    if scale == "small":
        options += ["--seconds", "2", "--gain-steps", "100"]
    elif scale == "smoke":
        options += ["--sizes", *SMALL_HEADS[optimizer], "--seconds", "0.2", "--gain-steps", "2"]
        options += ["--repeats", "3", "--gain-batch", "16"]
    content = run_script("gram.py", options, place, f"gram-{optimizer}-{scale}")
    return [judge_size(row, scale) for row in content["sizes"]]


def judge_size(row: dict[str, Any], scale: Scale) -> Finding:
    """Whether the factorised matrix is quicker than the explicit one where the paper's is."""
    label = f"{row['optimizer']}, {row['inputs']}x{row['outputs']}, B={row['batch']}"
    explicit, factorised = row["paper_explicit"], row["paper_factorised"]
    if factorised is None:
        return Finding(label, "not in the paper", "–", "not judged")
    paper = (
        f"{explicit[0]:g} -> {factorised[0]:g} ms"
        if explicit
        else f"out of memory -> {factorised[0]:g} ms"
    )
    mine = row["ms"].get("explicit"), row["ms"].get("factorised")
    ours = (
        f"{_ms(mine[0])} -> {_ms(mine[1])} ms; "
        f"primum with its products {_ms(row['ms'].get('primum'))} ms"
    )
    if None in mine or explicit is None:
        return Finding(label, paper, ours, "not run", "the explicit matrix is too large")
    same = (mine[1] < mine[0]) == (factorised[0] < explicit[0])
    quicker = "factorised" if mine[1] < mine[0] else "explicit"
    note = "" if same else f"here the {quicker} one is quicker"
    return Finding(label, paper, ours, judge(same, scale), note)


def run_solver(scale: Scale, place: Place) -> list[Finding]:
    """Figure 2: how much the paper's solver removes, and in how many iterations.

    On both CIFARs if there is a folder with them; else on digits.
    """
    options = {
        "smoke": ["--batches", "16", "--steps", "6", "--problems", "2", "--seconds", "0.02"],
        "small": ["--problems", "5", "--exact-up-to", "128", "--seconds", "0.1"],
        "full": [],
    }[scale]
    if scale == "smoke" or place.data_dir is None:
        sources = [("digits", ["--dataset", "digits"])]
    else:
        sources = [
            (name, ["--dataset", name, "--data-dir", str(folder)])
            for name, folder in cifar_folders(Path(place.data_dir)).items()
        ]
    findings = []
    for name, words in sources:
        content = run_script("solvers.py", [*words, *options], place, f"solvers-{name}-{scale}")
        findings += [
            finding for group in content["groups"] for finding in judge_solver(name, group, scale)
        ]
    return findings


def cifar_folders(folder: Path) -> dict[str, Path]:
    """Where the training images of CIFAR-10 and CIFAR-100 are, as far as they are."""
    places = {
        name: folder if folder.name == name else folder / name for name in ("cifar10", "cifar100")
    }
    found = {name: place for name, place in places.items() if any(place.glob("train-*.parquet"))}
    if not found:
        raise SettingsError(
            f"no cifar10/train-*.parquet and no cifar100/train-*.parquet in {folder}; "
            "without --data-dir this is made with digits"
        )
    return found


def judge_solver(data: str, group: dict[str, Any], scale: Scale) -> list[Finding]:
    """Substantial reductions; and iterations enough for what many more would reach.

    The paper's own word for the latter is when its solver stops, by a tolerance it does not give.
    """
    label = f"{data}, {group['optimizer']}, B={group['batch']}"
    arms = [problem["arms"] for problem in group["problems"]]
    removed = fmean(each[f"paper {MOST}"]["removed"] for each in arms)
    early = fmean(each[f"paper {MOST}"]["iterations"] < MOST for each in arms)
    told = f"stops by a tolerance of {PaperSettings().tol:g} on {100 * early:.0f}%"
    followed = [each for each in arms if f"paper {MANY}" in each]
    reached = fmean(each[f"paper {MANY}"]["removed"] for each in followed) if followed else None
    in_time = [each[f"paper {MOST}"]["removed"] for each in followed]
    converged = reached is not None and fmean(in_time) >= CLOSE * reached
    return [
        Finding(
            f"{label}: harm removed",
            "substantial",
            f"{100 * removed:.0f}%, mean of {len(arms)} problems",
            judge(removed >= SUBSTANTIAL, scale),
        ),
        Finding(
            f"{label}: converges in a small number of iterations",
            f"consistently; at most {MOST}",
            "–"
            if reached is None
            else f"{100 * fmean(in_time):.0f}% after {MOST}, {100 * reached:.0f}% after {MANY:,}",
            "not run" if reached is None else judge(converged, scale),
            told,
        ),
    ]


def run_script(name: str, options: list[str], place: Place, result: str) -> dict[str, Any]:
    """The JSON that a script of `benchmarks` writes."""
    folder = Path(__file__).resolve().parents[5] / "benchmarks"
    script = folder / name
    if not script.is_file():
        raise SweepError(
            f"this part runs benchmarks/{name}, which is not installed with the package; "
            "use a checkout of the repository"
        )
    out = place.store.folder / f"{result}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, str(script), *options, "--out", str(out)]
    done = subprocess.run(words, cwd=folder, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise SweepError(f"benchmarks/{name} failed with exit code {done.returncode}")
    content: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return content


def _ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
