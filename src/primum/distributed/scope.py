"""Which processes solve together in a forward pass."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch import nn

from primum.distributed.collectives import Collectives, world_size
from primum.hooks.private import joins, knows_running_wrapper, running_wrapper

Wrapper = nn.parallel.DistributedDataParallel


class Scope:
    """Which processes solve together: decided in every forward pass.

    "local": each on its own. "global", or a process group: those of the group. "auto": those over
    which the DistributedDataParallel that runs this pass averages its gradients, if any does.
    Never in passes that DistributedDataParallel does not synchronise, nor where a rank may have
    nothing to send: a collective that one rank does not join never ends.

    Args:
        scope: As passed to `attach`.
        model: Whose wrapper is looked for.
        mesh: The ranks that hold a sharded head: no pass does without them.
    """

    def __init__(self, scope: Any, model: nn.Module, mesh: Collectives | None = None) -> None:
        group = None if isinstance(scope, str) else scope
        if isinstance(scope, str) and scope not in ("auto", "global", "local"):
            raise ValueError(
                f'scope must be "auto", "global", "local" or a process group, got {scope!r}'
            )
        if scope == "global" and not world_size():
            raise ValueError(
                'scope="global" needs ranks: call torch.distributed.init_process_group first'
            )
        if group is not None and mesh is not None:
            raise ValueError(
                "a process group has no effect on a sharded head: the mesh of fully_shard "
                "determines which ranks solve together; leave scope out"
            )
        self.name: str = scope if isinstance(scope, str) else "global"
        self.sharded = mesh is not None
        self._group: dist.ProcessGroup | None = group
        self._peers: Collectives | None = mesh
        self._failed = False
        self._ddp = next(
            (weakref.ref(each) for each in model.modules() if isinstance(each, Wrapper)), None
        )
        if self.name == "global" and mesh is None:
            self._peers = self._of(self._wrapper())

    def peers(self, eager: bool) -> Collectives | None:
        """The processes of the forward pass under way, or of the last one in a compiled graph.

        In an `eager` pass that no DistributedDataParallel runs (`wrapper.module(x)` on one rank),
        "auto" does not wait for others.
        """
        if self.sharded:
            return self._peers if self._peers is not None and self._peers.size > 1 else None
        if self.name == "local" or not world_size():
            return None
        wrapper = self._wrapper()
        if eager and self.name == "auto" and knows_running_wrapper() and not running_wrapper():
            return None
        if wrapper is not None:
            synced = (
                wrapper.require_backward_grad_sync if eager else wrapper.require_forward_param_sync
            )
            if not synced or joins(wrapper) or wrapper.find_unused_parameters:
                return None
        if self._peers is None and wrapper is not None:
            self._peers = self._of(wrapper)
        if self._peers is None or self._peers.size == 1:
            return None
        return self._peers

    def why_alone(self) -> tuple[str, str] | None:
        """A kind and a message, if a user may have expected ranks where there are none."""
        if self.name == "local" or self.sharded or not world_size():
            return None
        wrapper = self._wrapper()
        alone = "each rank solves for its own samples"
        if wrapper is not None and joins(wrapper):
            return "join", (
                f"{alone} under join(): a rank that has run out of data makes no collective calls"
            )
        if wrapper is not None and wrapper.find_unused_parameters:
            return "unused", (
                f"{alone} under find_unused_parameters=True: a rank whose batch does not use the "
                'head makes no collective calls; pass scope="local" to silence this'
            )
        if self._peers is None and wrapper is None and world_size() > 1:
            return "ranks", (
                "there are several ranks, but this model does not seem to run in "
                f"DistributedDataParallel, so {alone}; pass the wrapped model to attach, or set "
                'scope="local" or scope="global"'
            )
        return None

    def _wrapper(self) -> Wrapper | None:
        running = running_wrapper()
        if running is not None or self._ddp is None:
            return running
        return self._ddp()

    @property
    def broken(self) -> bool:
        """Whether an error is the process group's own, and not to be swallowed."""
        return self._failed or (self._peers is not None and self._peers.broken)

    def _of(self, wrapper: Wrapper | None) -> Collectives:
        group = self._group
        if group is None and wrapper is not None:
            group = wrapper.process_group
        self._failed = True  # unless all ranks come along
        made = Collectives(group)
        self._failed = False
        return made
