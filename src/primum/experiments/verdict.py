"""What the numbers say, in words. Every sentence follows from an interval, none from a hope."""

from __future__ import annotations

from primum.experiments.statistics import Difference
from primum.experiments.summary import Comparison, Summary

NOT_SEEN = "no difference could be seen"
RULE = (
    "A difference is called one only when its 95% interval leaves out zero twice: paired seed by "
    "seed, and with the seeds as two separate groups (Welch). Several differences are looked at, "
    "so one that is barely seen deserves doubt."
)


def headline(summary: Summary) -> str:
    """One sentence: primum against base, on the last epoch's test figures."""
    base = _against(summary, "base")
    if base is None:
        return "Only base was run; there is nothing to compare."
    if len(summary.seeds) < 2:
        return "One seed gives no interval, so nothing can be said about a difference to base."
    accuracy, loss = _points(base.accuracy), _loss(base.loss)
    if accuracy == loss == NOT_SEEN:
        return f"Between primum and base {NOT_SEEN}, neither in test accuracy nor in test loss."
    words = f"Primum against base: test accuracy, {accuracy}; test loss, {loss}."
    return f"{words} {_controls(summary)}".strip()


def details(summary: Summary) -> list[str]:
    """The sentences under the headline: controls, harm, time."""
    sentences = []
    for other, name in (
        ("permuted", "the same weights given to random samples"),
        ("lr-matched", "a learning rate raised by the same mean factor"),
    ):
        control = _against(summary, other)
        if control is not None and len(summary.seeds) > 1:
            accuracy, loss = _points(control.accuracy), _loss(control.loss)
            sentences.append(
                f"Primum against {name}: test accuracy, {accuracy}; test loss, {loss}."
            )
    row = summary.row("primum")
    if row is not None and row.harmed_after is not None:
        sentences.append(
            f"Seen through the head, a plain step would have raised the loss of "
            f"{row.harmed_before.mean:.0f}% of a batch's samples; "
            f"with the extra weights it was {row.harmed_after.mean:.0f}%."
        )
        sentences.append(
            f"A step took {row.time_ratio.mean:.2f} times as long as a plain one. This model is "
            f"tiny ({row.milliseconds.mean / row.time_ratio.mean:.0f} ms a step), and the extra "
            "time depends on head and batch, not on the rest of the model."
        )
    return sentences


def _controls(summary: Summary) -> str:
    """How a gain in accuracy over base compares with the controls, if there is one to compare."""
    base = _against(summary, "base")
    controls = [c for c in summary.comparisons if c.other != "base"]
    if base is None or not base.accuracy.seen or base.accuracy.paired.mean < 0 or not controls:
        return ""
    beaten = [c.other for c in controls if c.accuracy.seen and c.accuracy.paired.mean > 0]
    if len(beaten) == len(controls):
        return f"Its accuracy was also higher than that of the controls ({', '.join(beaten)})."
    others = " and ".join(c.other for c in controls if c.other not in beaten)
    return f"Its accuracy was not seen to be higher than with {others}, so the cause is open."


def _against(summary: Summary, other: str) -> Comparison | None:
    return next((c for c in summary.comparisons if c.other == other), None)


def _points(change: Difference) -> str:
    if not change.seen:
        return NOT_SEEN
    word = "higher" if change.paired.mean > 0 else "lower"
    return f"{word} by {abs(change.paired.mean):.1f} points ({_range(change, 1)})"


def _loss(change: Difference) -> str:
    if not change.seen:
        return NOT_SEEN
    word = "higher" if change.paired.mean > 0 else "lower"
    return f"{word} by {abs(change.paired.mean):.3f} ({_range(change, 3)})"


def _range(change: Difference, digits: int) -> str:
    low, high = change.paired.low, change.paired.high
    return f"95% interval {low:+.{digits}f} to {high:+.{digits}f}"
