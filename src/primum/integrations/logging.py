"""The figures of the steps into TensorBoard, or into anything that takes a dict: one line."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch._compile import _disable_dynamo as eager  # torch.compiler.disable, imported lazily
from torch.utils.hooks import RemovableHandle

from primum import Reducer, StepReport
from primum.integrations.attachment import PREFIX


@runtime_checkable
class Writer(Protocol):
    """A TensorBoard `SummaryWriter`, torch's or another."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any: ...


def log_to(
    reducer: Reducer,
    log: Callable[[dict[str, float]], Any] | Writer,
    *,
    every: int = 50,
    first_step: int = 0,
) -> RemovableHandle:
    """Log `reducer.last.as_dict()` after every so many optimizer steps, as `primum/...`.

    Only steps that are logged wait for the device. A step without a report of its own, as while
    the reducer is paused, is not logged.

    Args:
        reducer: As made by `attach` or `observe`.
        log: A TensorBoard `SummaryWriter`, or any callable that takes a dict, such as `wandb.log`.
            The dict also has the number of the step, as `primum/step`.
        every: Optimizer steps from one entry to the next.
        first_step: Steps already made, for a run that is resumed.

    Returns:
        A handle; its `.remove()` ends the logging.

    Examples:
        >>> handle = log_to(primum.attach(model, optimizer), SummaryWriter("runs/1"))
    """
    if every < 1:
        raise ValueError(f"every must be >= 1, got {every}")
    if not (isinstance(log, Writer) or callable(log)):
        raise TypeError(
            f"log must take a dict, or be a SummaryWriter with add_scalar; got {type(log).__name__}"
        )
    steps = first_step
    source = weakref.ref(reducer)  # the optimizer owns the hook; the head owns the reducer
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
        if steps % every:
            return
        figures = {PREFIX + name: value for name, value in report.as_dict().items()}
        if isinstance(log, Writer):
            for name, value in figures.items():
                log.add_scalar(name, value, steps)
        else:
            log(figures | {PREFIX + "step": steps})

    return reducer.optimizer.register_step_post_hook(after_step)
