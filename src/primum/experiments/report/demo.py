"""The page of `primum demo`: that of its runs, with what they are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from primum.experiments import verdict
from primum.experiments.report.page import render_runs
from primum.experiments.report.read import demo_runs
from primum.experiments.results import Results
from primum.experiments.summary import Summary

INTRODUCTION = (
    "An optimizer step is good for the batch on average and bad for some of its samples. Primum "
    "gives extra weight to samples so that the coming step harms fewer of them. Here two small "
    "models learn noisy handwritten digits from few samples: without primum (base), with it, and "
    "in two controls."
)
ARMS = {
    "base": "plain training; it is watched, which leaves every gradient as it is.",
    "primum": "plain training after primum.attach(model, optimizer).",
    "permuted": "control: primum's extra weights, dealt out at random within each batch.",
    "lr-matched": "control: base with its learning rate raised by the mean weight primum gave.",
}
TUNED = (
    "Learning rate and weight decay were chosen for base alone; the learning rate follows a cosine "
    "down to 0. The permuted control's own share of harmed samples is not measured. Step times "
    "come from the arms taking turns after the runs, base without being watched."
)
SHORT = (
    "The schedule is short, so faster training shows in the test figures. A longer one "
    "(--epochs 40) shows how much of a difference remains once every arm has fitted the training "
    "images."
)


def render(results: Results, summaries: Sequence[Summary]) -> str:
    """The whole page."""
    content = {
        "runs": [asdict(run) for run in results.runs],
        "step_times": [asdict(time) for time in results.times],
        "environment": results.environment,
        "command": results.command,
    }
    return render_runs(
        demo_runs(content),
        title="Does a step without harm help?",
        introduction=[INTRODUCTION],
        arms={
            arm: text
            for arm, text in ARMS.items()
            if any(summary.row(arm) for summary in summaries)
        },
        verdicts={s.recipe.title: verdict.headline(s) for s in summaries},
        notes=[
            TUNED,
            SHORT,
            f"It took {results.seconds:.0f} s. The raw numbers are in results.json.",
        ],
    )
