"""A head that `fully_shard` (FSDP2, HSDP) has split: each rank predicts the rows that it holds.

The optimizer holds DTensors split by rows, and so are its moments. Seen through their local tensors
they are a plain head with a plain optimizer, of fewer outputs. `distributed.weigh_sharded` solves
with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.compat import (
    divide_factor,
    fsdp_modules,
    is_sharded,
    offloads,
    partly_reduced,
    shard_of,
    shard_records,
    unreduced,
)
from primum.pipeline import Captured
from primum.ranks import Ranks, chunks, rows_of_rank
from primum.rows import Part
from primum.rules import columns
from primum.update import accumulated, sliceable


@dataclass
class Rows:
    """A stand-in for a head, with the rows of this rank."""

    weight: Tensor
    bias: Tensor | None


class Shards:
    """The rows of a sharded head that this rank holds, and the ranks that hold the others.

    Attributes:
        ranks: Those over which gradients are averaged.
        holders: Those among which the rows are split; with HSDP fewer, else the same.
    """

    def __init__(self, model: nn.Module, head: nn.Linear, name: str) -> None:
        self._records = shard_records(model, head)
        self._params = {
            part: param for part, param in head.named_parameters(recurse=False) if is_sharded(param)
        }
        weight: Any = self._params["weight"]
        _check(weight, name, self._records)
        mesh = weight.device_mesh
        self.outputs, self.inputs = weight.shape
        self.holders = Ranks(mesh.get_group(mesh.ndim - 1))
        self.ranks = self.holders
        self._replicas: Ranks | None = None
        if mesh.ndim > 1:
            self._replicas = Ranks(mesh.get_group(0))
            everyone = sorted(mesh.mesh.flatten().tolist())
            world = len(everyone) == dist.get_world_size()
            made: Any = None if world else dist.new_group(everyone, use_local_synchronization=True)
            self.ranks = Ranks(made)
        counts = chunks(self.outputs, self.holders.size)
        if len(weight.to_local()) != counts[self.holders.rank]:
            raise ValueError(
                f"{name}.weight must be split into equal chunks of rows, as fully_shard does"
            )
        self.rows, self._counts = rows_of_rank(counts, self.holders.rank), counts

    def trouble(self) -> str:
        """Why the coming step cannot be predicted, the same on every rank; "" if it can."""
        for part, (record, group) in self._records.items():
            now, own = shard_of(record), self._params.get(part)
            if now is not None and own is not None and now is not own:
                return (
                    "the head's parameters were replaced after primum was attached "
                    "(load_state_dict(assign=True)?); recreate the optimizer and attach again"
                )
            if partly_reduced(group):
                return (
                    "gradients of earlier micro-batches wait for an all-reduce over replicas, "
                    "where primum cannot see them; use set_requires_gradient_sync instead of "
                    "set_requires_all_reduce"
                )
        return ""

    @torch.no_grad()
    def weight(self) -> Tensor:
        """This rank's rows of the weight: the memory that the optimizer changes."""
        return _local(self._params["weight"])

    def after_step(self, measure: Callable[..., None]) -> Callable[..., None]:
        """`Rescale.after_step` on this rank's rows, summed over those that hold the others."""
        total = self.holders.sum if self.holders.size > 1 else None

        def measure_rows(_: Any, found_inf: Tensor | None = None) -> None:
            measure(self.head(), found_inf, self.rows, total)

        return measure_rows

    @torch.no_grad()
    def head(self) -> Rows:
        """This rank's rows with their gradients, as the optimizer sees them."""
        local = {part: _local(param) for part, param in self._params.items()}
        return Rows(local["weight"], local.get("bias"))

    def kept(self) -> Tensor | None:
        """Whether gradients of earlier passes are still there; None if they are not."""
        weight = self.weight()
        if weight.grad is None and not self.unreduced():
            return None
        if weight.grad is None or not len(weight):
            return torch.ones((), dtype=torch.bool, device=weight.device)
        kept: Tensor = weight.grad.norm() != 0
        return kept

    def unreduced(self) -> dict[str, Tensor]:
        """Gradients that wait on this rank for a reduction, as under `no_sync`."""
        found = {part: unreduced(record) for part, (record, _) in self._records.items()}
        return {part: grad for part, grad in found.items() if grad is not None}

    def divisor(self) -> float:
        """What the sum of the ranks' gradients is divided by."""
        group = self._records["weight"][1] if "weight" in self._records else None
        given = divide_factor(group)
        return float(self.ranks.size if given is None else given)

    def part(self, owners: Mapping[str, Optimizer]) -> Part:
        """This rank's rows with stand-ins for the optimizers, whose states are local."""
        head = self.head()
        local = {
            id(param): tensor
            for part, param in self._params.items()
            if (tensor := getattr(head, part)) is not None
        }
        seen = {id(owner): _stand_in(owner, local) for owner in owners.values()}
        trained = {
            part: seen[id(owner)]
            for part, owner in owners.items()
            if self._params[part].requires_grad
        }
        return Part(head, trained, self.outputs, self.holders, whole=False)

    def before(self, part: Part, captured: Captured, share: Tensor, waits: bool) -> Tensor | None:
        """What has accumulated of the gradient of this rank's rows; `waits`: somewhere unreduced.

        Reduced already it is the mean over ranks; otherwise it is reduced here, once more.
        """
        total = accumulated(part.head, part.owners, captured.dtype, captured.before)
        if not waits:
            return total
        held, like = self.unreduced(), captured.gradients.new_empty(0, dtype=captured.dtype)
        shapes = {"weight": (self.outputs, self.inputs), "bias": (self.outputs,)}
        own = [held[p] if p in held else like.new_zeros(shapes[p]) for p in part.owners]
        own = [each.detach().to(like.dtype) for each in own]
        mean = self.reduce(columns(*own) if len(own) == 2 else own[0]) * share
        mean = mean if captured.before is None else mean * captured.before
        return mean if total is None else total + mean

    def mean(self, tensor: Tensor) -> Tensor:
        """Over ranks, as gradients are averaged."""
        return self.ranks.sum(tensor / self.divisor())

    def reduce(self, whole: Tensor) -> Tensor:
        """This rank's rows of the sum over all ranks. [d_out, d] -> [rows, d]."""
        if self.ranks.size == 1:
            return whole
        own = self.holders.scatter(whole, self._counts)
        return own if self._replicas is None else self._replicas.sum(own.contiguous())


def shards_of(model: nn.Module, head: nn.Linear, name: str) -> Shards | None:
    """The shards of a head that `fully_shard` has split; None if the head is whole."""
    modules = list(fsdp_modules(model))
    for module in modules:
        module.reshard()  # after an evaluation the whole parameters may still be there
    weight = head.weight
    if not is_sharded(weight):
        return None
    if not modules:
        raise ValueError(
            f"{name}.weight is a DTensor, but no module of this model was passed to fully_shard: "
            "tensor parallelism is not supported for the head; leave it out of the plan. Under "
            "fully_shard, pass the outermost model to attach"
        )
    return Shards(model, head, name)


def check_rules(owner: Optimizer) -> None:
    """Refuse an optimizer that is only known from dry runs: these need the whole head."""
    if not sliceable({"weight": owner}):
        raise TypeError(
            f"{type(owner).__name__} is not supported under fully_shard: primum has no formula for "
            "its step, and a dry run needs the whole head; use SGD, AdamW or another class of "
            "torch.optim for the head's parameters"
        )


def _check(weight: Any, name: str, records: Mapping[str, Any]) -> None:
    """Raise for placements other than those of FSDP2 and HSDP, and for offloaded shards."""
    placements = weight.placements
    kinds = [type(each).__name__ for each in placements]
    if kinds[-1] != "Shard" or any(kind != "Replicate" for kind in kinds[:-1]):
        raise ValueError(
            f"{name}.weight is a DTensor with placements {list(map(str, placements))}: primum "
            "supports fully_shard on a one- or two-dimensional mesh (FSDP2, HSDP); tensor "
            "parallelism is not supported for the head: leave it out of the plan"
        )
    if placements[-1].dim != 0:
        raise ValueError(
            f"{name}.weight is split along its inputs (Shard({placements[-1].dim})), but primum "
            "predicts whole rows; return Shard(0) for it in shard_placement_fn"
        )
    offloaded = any(offloads(record) for record, _ in records.values())
    if offloaded or weight.device.type != weight.device_mesh.device_type:
        raise ValueError(
            f"{name}.weight is offloaded to the CPU (CPUOffloadPolicy), which primum does not "
            "support; call fully_shard on the head without offload_policy"
        )


def _local(param: Any) -> Tensor:
    """The rows of a DTensor that are here, with their gradient."""
    local: Tensor = param.to_local().detach().requires_grad_(param.requires_grad)
    if param.grad is not None:
        local.grad = _own(param.grad)
    return local


def _own(value: Any) -> Any:
    return value.to_local() if is_sharded(value) else value


@torch.no_grad()
def _stand_in(optimizer: Optimizer, local: Mapping[int, Tensor]) -> Optimizer:
    """What the rules read of an optimizer: class, defaults, groups, states; with local tensors."""
    made: Any = object.__new__(type(optimizer))
    made.defaults = optimizer.defaults
    groups, states = [], {}
    for group in optimizer.param_groups:
        held = [param for param in group["params"] if id(param) in local]
        if held:
            groups.append({**group, "params": [local[id(param)] for param in held]})
        for param in held:
            state = optimizer.state.get(param, {})
            states[local[id(param)]] = {key: _own(value) for key, value in state.items()}
    made.param_groups, made.state = groups, states
    stand_in: Optimizer = made
    return stand_in
