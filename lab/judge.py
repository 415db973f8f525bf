"""Judge the paper's claims: from observed values to a status and a text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lab.claims import Statement
from lab.formatting import p_value
from lab.runs import without_nan
from lab.scales import Scale
from lab.statistics import Difference
from lab.text_tables import markdown_table, text_table

Status = Literal["reproduced", "not reproduced", "not run", "not judged"]


@dataclass(frozen=True)
class Finding:
    """A claim and what was observed.

    Attributes:
        claim: The paper's claim, in a few words or as a position in its table.
        paper: The paper's value, as text.
        ours: Our value, as text.
        status: Whether they agree; smoke runs are not judged.
        note: The reason, or further information.
        adjusted_p: Corrected p-value of the test behind it; None without a test.
    """

    claim: str
    paper: str
    ours: str
    status: Status
    note: str = ""
    adjusted_p: float | None = None


def judge_statement(
    label: str, statement: Statement, value: float | None, ours: str, scale: Scale, note: str = ""
) -> Finding:
    """Judge a statement: reproduced if the measured value is within its bounds."""
    claim = f"{label}{statement.label}"
    if value is None:
        return Finding(claim, statement.paper, "–", "not run", note)
    holds = statement.least <= value <= statement.most
    return Finding(claim, statement.paper, ours, _status(holds, scale), note)


def judge_gain(
    claim: str,
    paper: str,
    gain: float | None,
    test: Difference | None,
    ours: str,
    scale: Scale,
) -> Finding:
    """Judge a gain: reproduced if, by the rule, there is a difference with the paper's sign.

    `gain` is the paper's; None for a method that the paper makes no claim about.
    """
    if test is None:
        return Finding(claim, paper, "–", "not run")
    p = None if math.isnan(test.adjusted_p) else test.adjusted_p
    if scale == "smoke" or test.interval.count < 2:
        why = "smoke" if scale == "smoke" else "one seed gives no interval"
        return Finding(claim, paper, ours, "not judged", why, p)
    note = f"{test.verdict} than base, Holm p {p_value(test.adjusted_p)}"
    if not test.seen:
        note = f"no difference seen; {test.interval.count} seeds could see {test.smallest:.2f}"
    if gain is None:
        return Finding(claim, paper, ours, "not judged", note, p)
    agrees = test.seen and (test.interval.mean > 0) == (gain > 0)
    return Finding(claim, paper, ours, _status(agrees, scale), note, p)


def _status(holds: bool, scale: Scale) -> Status:
    if scale == "smoke":
        return "not judged"
    return "reproduced" if holds else "not reproduced"


@dataclass(frozen=True)
class Outcome:
    """The findings of an experiment.

    Attributes:
        runs: Keys of the runs behind them, by cell or network, then by arm.
        scripts: Results of the scripts behind them, by name.
    """

    name: str
    title: str
    scale: Scale
    findings: tuple[Finding, ...]
    command: str
    environment: dict[str, str]
    notes: tuple[str, ...] = ()
    runs: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    scripts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """A summary: how many claims were reproduced."""
        judged = [f for f in self.findings if f.status in ("reproduced", "not reproduced")]
        if not judged:
            kinds = {finding.status for finding in self.findings}
            return "not judged" if "not judged" in kinds else "not run"
        good = sum(finding.status == "reproduced" for finding in judged)
        left = sum(finding.status == "not run" for finding in self.findings)
        return f"{good} of {len(judged)} reproduced" + (f", {left} not run" if left else "")

    def text(self) -> str:
        """The findings as text for a terminal."""
        rows = [["claim", "paper", "ours", "", ""], *map(_cells, self.findings)]
        return f"{self.title}, {self.scale}\n\n{text_table(rows, left=5)}\n\n{self.verdict}"

    def markdown(self, level: int = 1) -> str:
        """The findings as a Markdown page or section, without the environment."""
        table = markdown_table(
            ["claim", "the paper", "here", "", ""], list(map(_cells, self.findings))
        )
        parts = [f"{'#' * level} {self.title}", f"**{self.verdict}**", *self.notes, table]
        return "\n\n".join([*parts, f"```sh\n{self.command}\n```"])

    def page(self) -> str:
        """The Markdown page that `reproduce` writes."""
        made = ", ".join(f"{key} {value}" for key, value in self.environment.items())
        return f"{self.markdown()}\n\nScale: {self.scale}. {made}\n"

    def json(self) -> str:
        """All findings as JSON."""
        content = {"format": "primum-reproduction-1", **asdict(self), "verdict": self.verdict}
        return json.dumps(without_nan(content), indent=1, allow_nan=False) + "\n"


def _cells(finding: Finding) -> list[str]:
    return [finding.claim, finding.paper, finding.ours, finding.status, finding.note]
