"""One claim of the paper, what was found here, and whether the two agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from primum.experiments.runs import without_nan
from primum.experiments.statistics import LEVEL
from primum.experiments.sweeps.summary import AgainstBase
from primum.experiments.sweeps.table import p_value

Status = Literal["reproduced", "not reproduced", "not run", "not judged"]
Scale = Literal["full", "small", "smoke"]


@dataclass(frozen=True)
class Finding:
    """A line of the result.

    Attributes:
        claim: What the paper says, in a few words or as the place in its table.
        paper: Its value, as text.
        ours: Ours.
        status: Whether they agree; smoke runs are not judged.
        note: Why, or what else is to be known.
        adjusted_p: Of the test behind it, corrected for all such tests of the table (Holm); None
            if there is none.
    """

    claim: str
    paper: str
    ours: str
    status: Status
    note: str = ""
    adjusted_p: float | None = None


@dataclass(frozen=True)
class Outcome:
    """An experiment's findings."""

    name: str
    title: str
    scale: Scale
    findings: tuple[Finding, ...]
    command: str
    environment: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """How many claims were reproduced."""
        judged = [f for f in self.findings if f.status in ("reproduced", "not reproduced")]
        if not judged:
            kinds = {finding.status for finding in self.findings}
            return "not judged" if "not judged" in kinds else "not run"
        good = sum(finding.status == "reproduced" for finding in judged)
        left = sum(finding.status == "not run" for finding in self.findings)
        rest = f", {left} not run" if left else ""
        if any(finding.adjusted_p is not None for finding in judged):
            strict = sum(
                finding.status == "reproduced" and (finding.adjusted_p or 0.0) < 1 - LEVEL
                for finding in judged
            )
            rest = f", {strict} of them after Holm's correction for all of them{rest}"
        return f"{good} of {len(judged)} reproduced{rest}"


def judge_gain(paper_gain: float, test: AgainstBase | None, scale: Scale) -> tuple[Status, str]:
    """Whether a difference to base has the paper's sign and Welch's interval leaves out zero."""
    if test is None:
        return "not run", ""
    change, seeds = test.change.welch, test.change.welch.count
    if scale == "smoke":
        return "not judged", "smoke"
    if seeds < 2:
        return "not judged", "one seed gives no interval"
    if not change.excludes_zero:
        return "not reproduced", f"not seen; {seeds} seeds could have seen {test.smallest:.2f}"
    if (change.mean > 0) == (paper_gain > 0):
        return "reproduced", f"Holm p {p_value(test.adjusted_p)}"
    return "not reproduced", f"the other way round, Holm p {p_value(test.adjusted_p)}"


def beside(test: AgainstBase | None, scale: Scale) -> tuple[Status, str]:
    """The same difference for a method that the paper claims nothing about."""
    if test is None:
        return "not run", ""
    change = test.change.welch
    if scale == "smoke" or change.count < 2:
        return "not judged", "smoke" if scale == "smoke" else "one seed gives no interval"
    if not change.excludes_zero:
        return "not judged", f"no difference seen; could have seen {test.smallest:.2f}"
    way = "higher" if change.mean > 0 else "lower"
    return "not judged", f"{way} than base, Holm p {p_value(test.adjusted_p)}"


def judge(holds: bool, scale: Scale) -> Status:
    """A claim that holds or does not, unless the run was only a trial."""
    if scale == "smoke":
        return "not judged"
    return "reproduced" if holds else "not reproduced"


def text_table(findings: Sequence[Finding]) -> str:
    """For a terminal."""
    lines = [("claim", "paper", "ours", "", ""), *(_cells(finding) for finding in findings)]
    widths = [max(len(line[place]) for line in lines) for place in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown(outcome: Outcome) -> str:
    """A page."""
    lines = ["| claim | paper | ours | | |", "| --- | --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(_cells(finding)) + " |" for finding in outcome.findings]
    parts = [f"# {outcome.title} ({outcome.scale})", f"**{outcome.verdict}**", "\n".join(lines)]
    parts += [*outcome.notes, f"```sh\n{outcome.command}\n```"]
    parts.append(", ".join(f"{key} {value}" for key, value in outcome.environment.items()))
    return "\n\n".join(parts) + "\n"


def as_json(outcome: Outcome) -> str:
    """Everything."""
    content = {"format": "primum-reproduction-1", **asdict(outcome), "verdict": outcome.verdict}
    return json.dumps(without_nan(content), indent=1, allow_nan=False) + "\n"


def _cells(finding: Finding) -> tuple[str, str, str, str, str]:
    return finding.claim, finding.paper, finding.ours, finding.status, finding.note
