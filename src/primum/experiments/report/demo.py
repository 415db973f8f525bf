"""The demo's HTML page: one file, nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from primum.experiments import figures, verdict
from primum.experiments.recipes import Recipe
from primum.experiments.results import Results
from primum.experiments.statistics import Difference
from primum.experiments.summary import COLUMNS, Summary, show

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
READING = (
    "Figures are means over seeds with 95% Student-t intervals, from the last epoch, never the "
    "best. A sample is harmed when a step raises its loss, to first order and through the head "
    "alone. Each share is the mean over all steps of a run; the permuted control's own share is "
    "not measured. Step times come from the arms taking turns after the runs, base without being "
    "watched."
)
SHORT = (
    "The schedule is short, so faster training shows in the test figures. A longer one "
    "(--epochs 40) shows how much of a difference remains once every arm has fitted the training "
    "images."
)


def render(results: Results, summaries: Sequence[Summary]) -> str:
    """The whole page."""
    css = files("primum.experiments").joinpath("page.css").read_text(encoding="utf-8")
    verdicts = "".join(
        f"<p><strong>{escape(s.recipe.title)}.</strong> {escape(verdict.headline(s))}</p>"
        for s in summaries
    )
    models = "".join(_model(results, summary) for summary in summaries)
    arms = "".join(
        f"<dt>{arm}</dt><dd>{escape(text)}</dd>"
        for arm, text in ARMS.items()
        if any(summary.row(arm) for summary in summaries)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>primum demo</title>
<style>
{css}</style>
</head>
<body>
<h1>Does a step without harm help?</h1>
<p class="soft">{escape(INTRODUCTION)}</p>
<section class="verdict"><h3>Verdict</h3>{verdicts}
<p class="note">{escape(verdict.RULE)}</p></section>
<dl>{arms}</dl>
<p class="note">{escape(READING)}</p>
{models}
{_settings(results, summaries)}
</body>
</html>
"""


def _model(results: Results, summary: Summary) -> str:
    """One recipe: words, table, differences, pictures."""
    arms = results.arms(summary.recipe.name)
    shown = arms.get("primum", arms["base"])[0]
    pictures = [
        (figures.curves(arms, "train_loss"), "Training loss: mean of each epoch's batches."),
        (figures.curves(arms, "test_loss"), "Test loss after each epoch; bands are 95% intervals."),
        (figures.harmed_share(arms), "Share of a batch harmed, mean of each epoch and seeds."),
        (
            figures.one_batch(shown),
            f"One batch, step {shown.batch.step} of {summary.recipe.steps}, seed "
            f"{shown.settings.seed}: above zero, the step harms the sample.",
        ),
    ]
    drawn = "".join(
        f"<figure>{svg}<figcaption>{escape(text)}</figcaption></figure>" for svg, text in pictures
    )
    points = "".join(f"<li>{escape(sentence)}</li>" for sentence in verdict.details(summary))
    return (
        f"<h2>{escape(summary.recipe.title)}</h2>{_table(summary)}<ul>{points}</ul>"
        f'<div class="figures">{drawn}</div>{_differences(summary)}'
    )


def _table(summary: Summary) -> str:
    rows = [(row.arm, [row.arm, *row.cells()]) for row in summary.rows]
    return _html_table(["", *COLUMNS], rows)


def _differences(summary: Summary) -> str:
    """Primum against each other arm, both intervals and p-values."""
    if not summary.comparisons or len(summary.seeds) < 2:
        return ""
    rows = []
    for c in summary.comparisons:
        cells = [*_difference(c.accuracy, 2), *_difference(c.loss, 4)]
        rows.append(("", [f"minus {c.other}", *cells]))
    head = ["primum"]
    for figure in ("accuracy", "loss"):
        head += [f"{figure}, paired", "p", f"{figure}, Welch", "p"]
    return "<h3>Differences</h3>" + _html_table(head, rows)


def _difference(change: Difference, digits: int) -> list[str]:
    return [
        show(change.paired, digits),
        f"{change.paired_p:.2g}",
        show(change.welch, digits),
        f"{change.welch_p:.2g}",
    ]


def _html_table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr class="{name}">' + "".join(f"<td>{_cell(cell)}</td>" for cell in cells) + "</tr>"
        for name, cells in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(text: str) -> str:
    """On a phone the interval goes below the mean."""
    mean, sign, half_width = escape(text).partition(" ± ")
    return f'{mean}<span class="interval"> ± {half_width}</span>' if sign else mean


def _settings(results: Results, summaries: Sequence[Summary]) -> str:
    settings = {s.recipe.title: _recipe(s.recipe) for s in summaries}
    seeds = ", ".join(str(seed) for seed in summaries[0].seeds)
    return (
        f'<h2>Settings</h2>{_list(settings)}<p class="note">{escape(SHORT)}</p>'
        f"<h2>Made with</h2>{_list({'seeds': seeds, **results.environment})}"
        f"<h2>Do it again</h2><pre>{escape(results.command)}</pre>"
        f'<p class="note">It took {results.seconds:.0f} s. The raw numbers are in results.json.</p>'
    )


def _recipe(recipe: Recipe) -> str:
    warmup = f"warm-up over {recipe.warmup:.0%} of the steps, then " if recipe.warmup else ""
    return (
        f"{recipe.train_size} training images, pixel noise {recipe.noise}, {recipe.epochs} epochs, "
        f"batches of {recipe.batch_size}, learning rate {recipe.lr}, {warmup}cosine to 0, "
        f"weight decay {recipe.weight_decay}, radius {recipe.radius}; learning rate "
        "and weight decay chosen for base alone"
    )


def _list(items: dict[str, str]) -> str:
    pairs = (f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in items.items())
    return f"<dl>{''.join(pairs)}</dl>"
