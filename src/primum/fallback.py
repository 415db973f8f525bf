"""Passes that fall back to plain gradients: counted, and warned about once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from torch import Tensor

Method = TypeVar("Method", bound=Callable[..., Any])


class Plain(RuntimeError):
    """Why a step is left plain although nothing broke. Counted as a fallback, if `counted`."""

    def __init__(self, reason: str, *, counted: bool = True) -> None:
        super().__init__(reason)
        self.counted = counted


def check_several(samples: int) -> None:
    """Leave a batch of one sample plain."""
    if samples < 2:
        raise Plain(
            "a batch of one sample has nothing to trade off and keeps its plain gradient",
            counted=False,
        )


def guarded(method: Method) -> Method:
    """A method of a `Reducer` that returns None, for plain gradients, after an error of ours.

    The last tensor among its arguments has the shape of the gradient at the head's output. An error
    of the process group is the run's own and is raised.
    """

    @wraps(method)
    def call(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Warning:
            raise  # turned into an error by the user's own filter
        except Exception as error:
            if self._scope.broken:
                raise
            self._monitor.passes += 1  # it came by here
            self._fall_back([each for each in args if isinstance(each, Tensor)][-1], error)
            return None

    return cast(Method, call)
