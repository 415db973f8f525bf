"""`log_to`: metrics to TensorBoard, Weights and Biases, MLflow or any `log(dict)`, in one line."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch.utils.hooks import RemovableHandle

from primum import Reducer, StepReport
from primum.hooks.private import eager
from primum.integrations.attachment import PREFIX

STEP = PREFIX + "step"


@runtime_checkable
class Writer(Protocol):
    """A TensorBoard `SummaryWriter`, from torch or elsewhere."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any: ...


@runtime_checkable
class Run(Protocol):
    """A Weights and Biases run, or the module `wandb` after `wandb.init`."""

    @property
    def define_metric(self) -> Callable[..., Any]: ...

    @property
    def log(self) -> Callable[..., Any]: ...


@runtime_checkable
class Tracker(Protocol):
    """The module `mlflow`, or a Lightning logger."""

    @property
    def log_metrics(self) -> Callable[..., Any]: ...


def log_to(
    reducer: Reducer,
    log: Callable[[dict[str, float]], Any] | Writer | Run | Tracker,
    *,
    every: int = 50,
    first_step: int = 0,
) -> RemovableHandle:
    """Log `reducer.last.as_dict()` every `every` optimizer steps, with names `primum/...`.

    Only logged steps wait for the device. Steps without a new report, for example while the reducer
    is paused, are not logged.

    Args:
        reducer: The result of `attach` or `observe`.
        log: A TensorBoard `SummaryWriter`; a Weights and Biases run, or `wandb` itself;
            `mlflow`, or anything else with `log_metrics(metrics, step=...)`; or any callable that
            takes a dict. W&B and callables get the step number as `primum/step`.
        every: Number of optimizer steps between entries.
        first_step: Number of steps already taken, for a resumed run.

    Returns:
        A handle; `.remove()` stops the logging.

    Examples:
        >>> handle = log_to(primum.attach(model, optimizer), SummaryWriter("runs/1"))
    """
    if every < 1:
        raise ValueError(f"every must be >= 1, got {every}")
    write = _writing_to(log)
    steps = first_step
    source = weakref.ref(reducer)  # so that the hook does not keep the reducer alive
    previous: weakref.ref[StepReport] | None = None

    @eager
    def after_step(*_: Any) -> None:
        nonlocal steps, previous
        steps += 1
        found = source()
        report = None if found is None else found.last
        if report is None or (previous is not None and report is previous()):
            return
        previous = weakref.ref(report)
        if steps % every == 0:
            write({PREFIX + name: value for name, value in report.as_dict().items()}, steps)

    return reducer.optimizer.register_step_post_hook(after_step)


def _writing_to(log: Any) -> Callable[[dict[str, float], int], None]:
    """A function that writes metrics at a step number to this destination."""
    if isinstance(log, Writer):

        def write(metrics: dict[str, float], step: int) -> None:
            for name, value in metrics.items():
                log.add_scalar(name, value, step)

    elif isinstance(log, Run):
        # W&B's own step counts every call to log, so our metrics get their own x-axis.
        log.define_metric(STEP)
        log.define_metric(PREFIX + "*", step_metric=STEP)

        def write(metrics: dict[str, float], step: int) -> None:
            log.log(metrics | {STEP: step})

    elif isinstance(log, Tracker):

        def write(metrics: dict[str, float], step: int) -> None:
            log.log_metrics(metrics, step=step)

    elif callable(log):

        def write(metrics: dict[str, float], step: int) -> None:
            log(metrics | {STEP: step})

    else:
        raise TypeError(
            "log must be a SummaryWriter, a W&B run, mlflow, or a callable that takes a dict; "
            f"got {type(log).__name__}"
        )
    return write
