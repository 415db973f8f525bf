"""What the figures of a group say. Every sentence follows from an interval, none from a hope."""

from __future__ import annotations

from statistics import fmean

from primum.experiments.report.groups import (
    Against,
    Group,
    against_others,
    finished,
    harmed_before,
    harmed_taken,
    moments_by_label,
    over_seeds,
)
from primum.experiments.statistics import Difference
from primum.experiments.verdict import NOT_SEEN

CONTROLS = {
    "permuted": "the same weights given to random samples",
    "normalised": "the same weights, divided by their mean",
    "loss-weighted": "the same weights, given by the size of the loss",
    "focal": "the focal loss",
    "lr-matched": "a learning rate raised by the same mean factor",
    "time-matched": "as many more steps as the time allowed",
}
RULE = (
    "A difference is called one only when its paired 95% interval leaves out zero and Welch's "
    "test, with the seeds as two separate groups, stays below 5% after Holm's correction for all "
    "comparisons of the table."
)


def headline(group: Group) -> str:
    """One sentence: the arm in focus against base, on the last epoch's test figures."""
    focus = group.focus
    if focus is None:
        told = whole_network(group)
        only = f"Only {next(iter(group.arms))} was run; there is nothing to compare."
        return told or only
    found = {each.other: each for each in against_others(group)}
    if "base" not in found:
        return "There is no finished run of base with the same seed; nothing can be compared."
    base = found["base"]
    if base.seeds < 2:
        return "One seed gives no interval, so nothing can be said about a difference to base."
    known = _figures(base)
    if not known:
        return "No test figures were recorded, so there is nothing to compare."
    if all(text == NOT_SEEN for text in known.values()):
        return f"Between {focus} and base {NOT_SEEN} in {' and '.join(known)}."
    return f"{_against(base, 'base')} {_controls(found)}".strip()


def whole_network(group: Group) -> str:
    """What the last look at the whole network says; empty if there was none."""
    looked = moments_by_label(group)
    if not looked:
        return ""
    label, moments = list(looked.items())[-1]

    def mean(column: str, weighting: str) -> str:
        place = moments[0]["table"]["weights"].index(weighting)
        values = [moment["table"][column][place] for moment in moments]
        known = [value for value in values if value is not None and value == value]
        return f"{100 * fmean(known):.0f}%" if known else "an unknown share"

    return (
        f"At {label} the coming step raises the loss of {mean('harmed_real', 'plain')} of its own "
        f"batch ({mean('harmed', 'plain')} to first order, which has the sign right for "
        f"{mean('sign_right', 'plain')}). Of the whole network's harm the head's weights would "
        f"remove {mean('reor', 'head')}, the same weights shuffled {mean('reor', 'permuted')}, "
        f"those of the whole network's problem {mean('reor', 'network')}."
    )


def details(group: Group) -> list[str]:
    """The sentences under the headline: controls, harm, what is missing."""
    sentences = [
        _against(each, CONTROLS.get(each.other, each.other))
        for each in against_others(group)
        if each.other != "base" and each.seeds > 1 and _figures(each)
    ]
    for arm, runs in group.arms.items():
        if arm not in ("base", group.focus) and len(group.arms) > 1:
            continue
        before, taken = over_seeds(runs, harmed_before), over_seeds(runs, harmed_taken)
        if before is not None and taken is not None:
            own = "" if taken == before else f"; with the weights {arm} gave, {taken.mean:.0f}%"
            sentences.append(
                f"{arm}: seen through the head, a plain step would have raised the loss of "
                f"{before.mean:.0f}% of a batch's samples{own}."
            )
    cut = len(group.runs) - len(finished(group.runs))
    if cut:
        sentences.append(f"{cut} of {len(group.runs)} runs did not reach their end: not counted.")
    return sentences


def _controls(found: dict[str, Against]) -> str:
    """How a gain in accuracy over base compares with the controls, if there is one to compare."""
    gain = found["base"].accuracy
    controls = {name: found[name].accuracy for name in CONTROLS if name in found}
    if gain is None or not gain.seen or gain.paired.mean < 0 or not controls:
        return ""
    beaten = [n for n, c in controls.items() if c is not None and c.seen and c.paired.mean > 0]
    if len(beaten) == len(controls):
        return f"Its accuracy was also higher than that of the controls ({', '.join(beaten)})."
    others = " and ".join(name for name in controls if name not in beaten)
    return f"Its accuracy was not seen to be higher than with {others}, so the cause is open."


def _against(each: Against, name: str) -> str:
    known = "; ".join(f"{figure}, {text}" for figure, text in _figures(each).items())
    return f"{each.arm.capitalize()} against {name}: {known}."


def _figures(each: Against) -> dict[str, str]:
    found = {}
    if each.accuracy is not None:
        found["test accuracy"] = _change(each.accuracy, 1, " points")
    if each.loss is not None:
        found["test loss"] = _change(each.loss, 3, "")
    return found


def _change(change: Difference, digits: int, unit: str) -> str:
    if not change.seen:
        return NOT_SEEN
    word = "higher" if change.paired.mean > 0 else "lower"
    low, high = change.paired.low, change.paired.high
    return (
        f"{word} by {abs(change.paired.mean):.{digits}f}{unit} "
        f"(95% interval {low:+.{digits}f} to {high:+.{digits}f})"
    )
