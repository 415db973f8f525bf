"""Verdicts on a group of runs, in sentences that follow from the statistical rule."""

from __future__ import annotations

from statistics import fmean

from lab.arms import ARMS, CONTROLS
from lab.statistics import Difference
from lab.tables import Group, moments_by_label, of_weighting

NOT_SEEN = "no difference was seen"
SHOWN = {"accuracy": ("test accuracy", 1, " points"), "loss": ("test loss", 3, "")}
LANGUAGE = {"loss": ("held-out loss", 3, " nats per token")}
Shown = dict[str, tuple[str, int, str]]


def shown_of(group: Group) -> Shown:
    """The metrics used in a group's sentences: name, digits, unit."""
    return LANGUAGE if group.language else SHOWN


def headline(group: Group) -> str:
    """One sentence on the final test metrics of the arm in focus against base."""
    focus, shown = group.focus, shown_of(group)
    if focus is None:
        return whole_network(group) or (
            f"Only {next(iter(group.arms))} was run; there is nothing to compare."
        )
    pairs = [group.pair(focus, "base", metric) for metric in shown]
    if "base" not in group.table.index or focus not in group.table.index:
        return f"There are no finished runs of both {focus} and base; nothing can be compared."
    if not any(pairs):
        return "There are no test metrics of common seeds, so there is nothing to compare."
    if all(pair is None or len(pair[0]) < 2 for pair in pairs):
        return "One seed gives no interval, so a difference from base cannot be judged."
    tests = {metric: group.against_base(metric).get(focus) for metric in shown}
    known = {metric: test for metric, test in tests.items() if test is not None}
    if not any(test.seen for test in known.values()):
        names = " or ".join(shown[metric][0] for metric in known)
        could = " or ".join(
            f"{test.smallest:.{shown[metric][1]}f}{shown[metric][2]} in {shown[metric][0]}"
            for metric, test in known.items()
        )
        return (
            f"No difference between {focus} and base was seen in {names}. Four times out of five, "
            f"these runs would have shown a difference of {could}."
        )
    return f"{_sentence(focus, 'base', known, shown)} {_controls(group)}".strip()


def details(group: Group) -> list[str]:
    """Sentences below the headline: controls, harmed samples, time, unfinished runs."""
    focus, sentences, shown = group.focus, [], shown_of(group)
    rows = "tokens" if group.language else "samples"
    if focus is not None:
        tests = {metric: group.focus_against(metric) for metric in shown}
        for arm in group.arms:
            known = {m: tests[m][arm] for m in shown if arm in tests[m]}
            if known and all(test.interval.count > 1 for test in known.values()):
                other = ARMS[arm].phrase if arm in ARMS else arm
                sentences.append(_sentence(focus, other, known, shown))
    for arm in group.arms:
        if arm not in ("base", focus) and len(group.arms) > 1:
            continue
        before, taken = group.interval(arm, "harmed_plain"), group.interval(arm, "harmed_taken")
        if before is not None and taken is not None:
            own = "" if taken == before else f", and {taken.mean:.0f}% with the weights of {arm}"
            sentences.append(
                f"{arm}: measured in the head, a plain step would have raised the loss of "
                f"{before.mean:.0f}% of a batch's {rows}{own}."
            )
    ratio = None if focus is None else group.interval(focus, "time_ratio")
    if ratio is not None:
        sentences.append(f"A step of {focus} took {ratio.mean:.2f} times as long as one of base.")
    cut = sum(not run.complete for run in group.runs)
    if cut:
        sentences.append(f"{cut} of {len(group.runs)} runs are unfinished and not counted.")
    return sentences


def whole_network(group: Group) -> str:
    """A sentence on the last whole-network measurement; empty if there is none."""
    looked = moments_by_label(group)
    if not looked:
        return ""
    label, moments = list(looked.items())[-1]

    def mean(column: str, weighting: str) -> str:
        known = of_weighting(moments, column, weighting)
        return f"{100 * fmean(known):.0f}%" if known else "an unknown share"

    return (
        f"At {label} the next step raises the loss of {mean('harmed_real', 'plain')} of its own "
        f"batch ({mean('harmed', 'plain')} to first order, which predicts the right sign for "
        f"{mean('sign_right', 'plain')}). The head's weights would remove {mean('reor', 'head')} "
        f"of the whole network's harm, the same weights shuffled {mean('reor', 'permuted')}, the "
        f"whole network's own weights {mean('reor', 'network')}."
    )


def _controls(group: Group) -> str:
    """Compares a gain over base with the controls, if there are both.

    By accuracy, or by loss if there is no accuracy.
    """
    metric, better = group.judged_by, group.about(group.judged_by).better
    what = metric.replace("views_", "")
    gain = group.against_base(metric).get(group.focus or "")
    tests = group.focus_against(metric)
    controls = [arm for arm in CONTROLS if arm in tests]
    if gain is None or gain.verdict != better or not controls:
        return ""
    beaten = [arm for arm in controls if tests[arm].verdict == better]
    if len(beaten) == len(controls):
        return f"Its {what} was also {better} than that of the controls ({', '.join(beaten)})."
    others = " or ".join(arm for arm in controls if arm not in beaten)
    return f"Its {what} was not seen to be {better} than with {others}, so the cause is open."


def _sentence(arm: str, other: str, tests: dict[str, Difference], shown: Shown) -> str:
    parts = "; ".join(f"{shown[m][0]} {_change(t, *shown[m][1:])}" for m, t in tests.items())
    return f"{arm.capitalize()} compared with {other}: {parts}."


def _change(test: Difference, digits: int, unit: str) -> str:
    if not test.seen:
        return f"– {NOT_SEEN}"
    low = test.interval.mean - test.interval.half_width
    high = test.interval.mean + test.interval.half_width
    return (
        f"{test.verdict} by {abs(test.interval.mean):.{digits}f}{unit} "
        f"(95% interval {low:+.{digits}f} to {high:+.{digits}f})"
    )
