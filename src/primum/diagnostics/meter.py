"""Interference over a training run: metrics for each step, totals for each sample."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from primum.diagnostics.record import FIGURES, TOTALS, figures_of, gap_of, marks_of, own_samples
from primum.hooks.private import eager
from primum.kernel.report import StepReport
from primum.reducer import Reducer

AT_ONCE = 32  # Reports processed together; each holds about 50 numbers per sample until then.


class Writer(Protocol):
    """The method of `SummaryWriter` that `to_tensorboard` calls."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class InterferenceMeter:
    """Collects a reducer's reports; waits for the device only on export.

    If you pass the reducer, the meter records `reducer.last` after each optimizer step. Otherwise
    call `update` once per step; this also lets you pass the ids of the samples in the batch.

    Args:
        reducer: The result of `attach` or `observe`; None to call `update` yourself.
        num_samples: Size of the training set; needed for totals per sample.

    Examples:
        >>> model = nn.Linear(8, 3)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> meter = InterferenceMeter(primum.attach(model, optimizer))
        >>> nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.arange(4) % 3).backward()
        >>> optimizer.step()
        >>> meter.table()["batch_size"]
        [4]
    """

    def __init__(
        self,
        reducer: Reducer | None = None,
        *,
        num_samples: int | None = None,
    ) -> None:
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples must be >= 1, got {num_samples}")
        self.num_samples = num_samples
        self._steps: list[int] = []
        self._batch_sizes: list[int] = []
        self._applied: list[bool] = []
        self._figures: list[Tensor] = []  # several rows each, one per step
        self._totals: Tensor | None = None
        self._waiting: list[tuple[StepReport, Tensor | None]] = []
        self._last: weakref.ref[StepReport] | None = None
        self._written = 0
        self._handle: RemovableHandle | None = None
        if reducer is not None:
            self._handle = reducer.optimizer.register_step_post_hook(self._after_step(reducer))

    @property
    def steps(self) -> int:
        """Number of recorded steps."""
        return len(self._steps)

    def remove(self) -> None:
        """Stop recording. Collected data is kept."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def update(
        self, report: StepReport | None, ids: Tensor | None = None, step: int | None = None
    ) -> None:
        """Record one step.

        Args:
            report: `reducer.last`. None (before the first backward pass) is ignored.
            ids: Index of each sample in the training set; needs `num_samples`. Preferably on the
                model's device: no sync, but no range check either. On several ranks, the ids of
                this rank's samples. [B].
            step: Step number; by default the previous one plus 1.
        """
        if report is None:
            return
        if ids is not None:
            self._check(report, ids)
            ids = ids.to(report.drift.device, non_blocking=True, copy=True)
        if step is None:
            step = self._steps[-1] + 1 if self._steps else 0
        self._steps.append(step)
        self._batch_sizes.append(len(report.drift))
        self._applied.append(report.weighted)  # `applied` would wait for the device
        self._last = weakref.ref(report)
        self._waiting.append((report, ids))
        if len(self._waiting) >= AT_ONCE:
            self._work_off()

    def table(self) -> dict[str, list[int] | list[bool] | list[float]]:
        """One row per step, for `pandas.DataFrame`. Waits for the device once."""
        figures = self._all_figures().double()  # SYNC: asked for
        known: dict[str, list[int] | list[bool] | list[float]] = {
            "step": list(self._steps),
            "batch_size": list(self._batch_sizes),
        }
        columns = dict(zip(FIGURES, figures.unbind(1), strict=True))
        columns["gap"] = gap_of(columns)
        finite = (columns["objective"] < torch.inf).tolist()
        known["applied"] = [own and good for own, good in zip(self._applied, finite, strict=True)]
        return known | {name: column.tolist() for name, column in columns.items()}

    def samples(self) -> dict[str, list[int] | list[float]]:
        """One row per training sample: how often it was seen and harmed, and its extra weight.

        `harmed_after` counts the steps that harm it despite the extra weights; `extra_weight` is
        the sum of its own (under `observe`, both are hypothetical). Fallback steps do not count.
        """
        if self.num_samples is None:
            raise ValueError("samples() needs a meter made by InterferenceMeter(num_samples=...)")
        self._work_off()
        totals = self._totals
        if totals is None:
            totals = torch.zeros(self.num_samples, len(TOTALS))
        seen, before, after, weight = totals.t().tolist()  # SYNC: asked for
        counts = {"seen": seen, "harmed_before": before, "harmed_after": after}
        ids: dict[str, list[int] | list[float]] = {"id": list(range(self.num_samples))}
        return (
            ids
            | {name: [round(value) for value in values] for name, values in counts.items()}
            | {"extra_weight": weight}
        )

    def to_json(self, path: str | Path) -> None:
        """Write both tables as JSON. Non-finite values become null."""
        samples = None if self.num_samples is None else self.samples()
        content = {"steps": _without_nan(self.table()), "samples": samples}
        Path(path).write_text(json.dumps(content, allow_nan=False))

    @classmethod
    def from_json(cls, path: str | Path) -> InterferenceMeter:
        """Read a meter written by `to_json`. It is on the CPU and not attached to a reducer."""
        content = json.loads(Path(path).read_text())
        steps, samples = content["steps"], content["samples"]
        meter = cls(num_samples=None if samples is None else len(samples["id"]))
        rows = [[float("nan") if v is None else v for v in steps[name]] for name in FIGURES]
        meter._steps, meter._batch_sizes = steps["step"], steps["batch_size"]
        meter._applied = steps["applied"]
        meter._figures = [torch.tensor(rows, dtype=torch.float64).t()]
        if samples is not None:
            meter._totals = torch.tensor([samples[name] for name in TOTALS]).t().contiguous()
        return meter

    def to_tensorboard(self, writer: Writer, prefix: str = "primum") -> None:
        """Write the steps that have not been written yet. Can be called repeatedly."""
        table = self.table()
        for row in range(self._written, self.steps):
            for name in (*FIGURES, "gap"):
                value = float(table[name][row])
                if math.isfinite(value):
                    writer.add_scalar(f"{prefix}/{name}", value, self._steps[row])
        self._written = self.steps

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, loadable with `weights_only=True`."""
        figures = self._all_figures()
        return {
            "steps": list(self._steps),
            "batch_sizes": list(self._batch_sizes),
            "applied": list(self._applied),
            "columns": list(FIGURES),
            "figures": figures,
            "totals": None if self._totals is None else self._totals.clone(),
            "written": self._written,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state saved by `state_dict`."""
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ValueError(f"not a state_dict of an InterferenceMeter: missing {sorted(missing)}")
        if state["columns"] != list(FIGURES):
            raise ValueError(f"this state has columns {state['columns']}, expected {list(FIGURES)}")
        totals = state["totals"]
        if totals is not None and len(totals) != self.num_samples:
            raise ValueError(
                f"this state has totals for {len(totals)} samples, but the meter has num_samples="
                f"{self.num_samples}; create it with num_samples={len(totals)}"
            )
        self._steps, self._batch_sizes = list(state["steps"]), list(state["batch_sizes"])
        self._applied = list(state["applied"])
        self._figures, self._waiting = [state["figures"]], []
        self._totals = None if totals is None else totals.clone()
        self._written = state["written"]

    def _after_step(self, reducer: Reducer) -> Callable[..., None]:
        @eager
        def note(*_: Any) -> None:
            known = None if self._last is None else self._last()
            if reducer.last is not known:  # skips steps without a backward pass
                self.update(reducer.last)

        return note

    def _check(self, report: StepReport, ids: Tensor) -> None:
        if self.num_samples is None:
            raise ValueError("ids= needs a meter made by InterferenceMeter(num_samples=...)")
        own = own_samples(report)
        if ids.shape != (own,):
            raise ValueError(
                f"ids must have one entry per sample, shape [{own}], got {list(ids.shape)}"
            )
        if type(ids) is Tensor and ids.device.type == "cpu":
            ends: Any = [end.tolist() for end in ids.aminmax()]  # host memory: not a sync
            least, most = ends
            if least < 0 or most >= self.num_samples:
                raise ValueError(
                    f"ids must be between 0 and {self.num_samples - 1}, got {least} to {most}"
                )

    def _work_off(self) -> None:
        """Compute metrics and totals of the queued reports."""
        waiting, self._waiting = self._waiting, []
        for _, group in groupby(
            waiting, key=lambda pair: (pair[0].drift.shape, pair[0].drift.dtype)
        ):
            self._figures.append(figures_of([report for report, _ in group]))
        known = [(report, ids) for report, ids in waiting if ids is not None]
        if known and self.num_samples is not None:
            marks = marks_of([report for report, _ in known])
            if self._totals is None:
                self._totals = marks.new_zeros(self.num_samples, len(TOTALS))
            self._totals = self._totals.to(marks.device)  # may differ in a resumed run
            self._totals.index_add_(0, torch.cat([ids for _, ids in known]), marks)

    def _all_figures(self) -> Tensor:
        """Metrics of all steps, on the CPU. [steps, len(FIGURES)]."""
        self._work_off()
        rows = [each.cpu() for each in self._figures]  # SYNC: asked for
        self._figures = [torch.cat(rows)] if rows else [torch.empty(0, len(FIGURES))]
        return self._figures[0]


def _without_nan(table: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: [v if math.isfinite(v) else None for v in vs] for name, vs in table.items()}
