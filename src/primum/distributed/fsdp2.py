"""A head that `fully_shard` (FSDP2, HSDP) has split: each process predicts the rows it holds.

The optimizer holds DTensors split by rows, and so are its moments. Through their local tensors they
are a plain head of fewer outputs. Step and gain of all rows are then gathered, so that everything
else is as under DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from primum.distributed.collectives import Collectives, chunks, rows_of_rank
from primum.hooks.private import (
    divide_factor,
    fsdp_modules,
    is_sharded,
    offloads,
    partly_reduced,
    shard_of,
    shard_records,
    unreduced,
    version,
)
from primum.kernel.batch import HeadBatch
from primum.kernel.head import Head, Plain
from primum.kernel.optimizers.dry_run import dry_run
from primum.kernel.optimizers.predict import Part, Update, group_of, rule_for


class HeadShard(Head):
    """The rows of a split head that this process holds, and the processes that hold the others.

    Attributes:
        ranks: Those over which gradients are averaged.
    """

    def __init__(
        self, model: nn.Module, layer: nn.Linear, optimizers: Mapping[str, Optimizer], name: str
    ) -> None:
        super().__init__(layer, optimizers, name)
        self._records = shard_records(model, layer)
        self._params = {
            part: param
            for part, param in layer.named_parameters(recurse=False)
            if is_sharded(param)
        }
        weight: Any = self._params["weight"]
        _check(weight, name, self._records)
        for optimizer in self.optimizers.values():
            _check_rule(optimizer)
        mesh = weight.device_mesh
        self._outputs, self._inputs = weight.shape
        self._holders = Collectives(mesh.get_group(mesh.ndim - 1))
        self.ranks = self._holders
        self._replicas: Collectives | None = None
        if mesh.ndim > 1:
            self._replicas = Collectives(mesh.get_group(0))
            everyone = sorted(mesh.mesh.flatten().tolist())
            world = len(everyone) == dist.get_world_size()
            made: Any = None if world else dist.new_group(everyone, use_local_synchronization=True)
            self.ranks = Collectives(made)
        self._counts = chunks(self._outputs, self._holders.size)
        if len(weight.to_local()) != self._counts[self._holders.rank]:
            raise ValueError(
                f"{name}.weight must be split into equal chunks of rows, as fully_shard does"
            )
        self._rows = rows_of_rank(self._counts, self._holders.rank)

    @property
    def by_rows(self) -> bool:
        """Each prediction gathers all rows."""
        return False

    @property
    def shape(self) -> tuple[int, int]:
        return self._outputs, self._inputs

    def divisor(self) -> float:
        """What the sum of the ranks' gradients is divided by."""
        group = self._records["weight"][1] if "weight" in self._records else None
        given = divide_factor(group)
        return float(self.ranks.size if given is None else given)

    def check(self) -> None:
        """Raise `Plain` if the coming step cannot be predicted, the same on every rank."""
        weight = self.weight
        if weight is None or not weight.requires_grad:
            raise Plain("the head is now frozen or replaced; call .remove() and attach again")
        for part, (record, group) in self._records.items():
            now, own = shard_of(record), self._params.get(part)
            if now is not None and own is not None and now is not own:
                raise Plain(
                    "the head's parameters were replaced after primum was attached "
                    "(load_state_dict(assign=True)?); recreate the optimizer and attach again"
                )
            if partly_reduced(group):
                raise Plain(
                    "gradients of earlier micro-batches wait for an all-reduce over replicas, "
                    "where primum cannot see them; use set_requires_gradient_sync instead of "
                    "set_requires_all_reduce"
                )

    def group(self, part: str) -> dict[str, Any] | None:
        return group_of(self.optimizers[part], self._params[part])

    @property
    def trained(self) -> list[str]:
        return [part for part in self.optimizers if self._params[part].requires_grad]

    @property
    def version(self) -> int:
        return version(_local(self._params["weight"]))

    def grads(self) -> dict[str, Tensor]:
        held = {part: self._params[part].grad for part in self.optimizers}
        return {part: _local(grad) for part, grad in held.items() if grad is not None}

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients wait on this rank for a reduction, as under `no_sync`."""
        partly = any(partly_reduced(group) for _, group in self._records.values())
        return partly or bool(self._unreduced())

    def parts(self) -> dict[str, Part]:
        """The local rows, with stand-ins for the optimizers, whose states are local."""
        found = {}
        for part in self.trained:
            param, optimizer = self._params[part], self.optimizers[part]
            local = _local(param).detach()
            stand_in: Any = object.__new__(type(optimizer))
            state = optimizer.state.get(param, {})
            stand_in.defaults = optimizer.defaults
            stand_in.state = {local: {key: _local(value) for key, value in state.items()}}
            found[part] = Part(local, stand_in, group_of(optimizer, param))
        return found

    @torch.no_grad()
    def update(self, grad: Tensor, batch: HeadBatch, rows: slice | None = None) -> Update:
        """What the step will do to all rows, on every rank; each predicts its own."""
        before, own = batch.before, grad[self._rows]
        if before is None:  # on a mesh of one rank
            before = self.reduced(grad.dtype, grad.new_ones(()), waits=self.holds_gradients)
        update = self.predict(self.parts(), own if before is None else own + before)
        step, gain = self._holders.gather(update.step, self._counts), update.gain
        if isinstance(gain, Tensor) and gain.dim() == 2:
            gain = self._holders.gather(gain.expand_as(update.step), self._counts)
        return Update(step, gain, update.lr)

    @torch.no_grad()
    def reduced(self, dtype: torch.dtype, share: Tensor, *, waits: bool) -> Tensor | None:
        """What has accumulated of the gradient of this rank's rows; `waits`: somewhere unreduced.

        Reduced already it is the mean over ranks; otherwise it is reduced here, once more.
        """
        grads = self.grads()
        if any(part in grads for part in self.trained):
            rows = [
                grads.get(part, torch.zeros_like(_local(self._params[part])))
                for part in self.trained
            ]
            total: Tensor | None = self.side_by_side([each.to(dtype) for each in rows])
        else:
            total = None
        if not waits:
            return total
        held, shapes = self._unreduced(), {part: self._params[part].shape for part in self.trained}
        own = [
            held[part].detach().to(dtype) if part in held else share.new_zeros(shape).to(dtype)
            for part, shape in shapes.items()
        ]
        mean = self._holders.reduce_scatter(self.side_by_side(own), self._counts)
        mean = mean if self._replicas is None else self._replicas.all_reduce(mean.contiguous())
        return mean * share if total is None else total + mean * share

    def _unreduced(self) -> dict[str, Tensor]:
        found = {part: unreduced(record) for part, (record, _) in self._records.items()}
        return {part: grad for part, grad in found.items() if grad is not None}


def reshard(model: nn.Module) -> None:
    """Free the whole parameters, which may still be there after an evaluation."""
    for module in fsdp_modules(model):
        module.reshard()


def is_split(model: nn.Module, layer: nn.Linear, name: str) -> bool:
    """Whether `fully_shard` has split a layer; raises for other kinds of sharding."""
    if not is_sharded(layer.weight):
        return False
    if not any(fsdp_modules(model)):
        raise ValueError(
            f"{name}.weight is a DTensor, but no module of this model was passed to fully_shard: "
            "tensor parallelism is not supported for the head; leave it out of the plan. Under "
            "fully_shard, pass the outermost model to attach"
        )
    return True


def _check_rule(optimizer: Optimizer) -> None:
    """Refuse an optimizer that is only known from dry runs: these need the whole head."""
    if rule_for(type(optimizer)) is dry_run:
        raise TypeError(
            f"{type(optimizer).__name__} is not supported under fully_shard: primum has no formula "
            "for its step, and a dry run needs the whole head; use SGD, AdamW or another class of "
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


def _local(value: Any) -> Any:
    """The rows of a DTensor that are here; anything else as it is."""
    return value.to_local() if is_sharded(value) else value
