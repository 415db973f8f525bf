"""Functions of each tensor in nested inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map as tree_map


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """`function` of each tensor; other leaves as they are."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)
