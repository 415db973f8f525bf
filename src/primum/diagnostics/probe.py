"""`Probe`: a model and its optimizer, about to take a step on a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim import Optimizer

from primum.diagnostics.trees import map_tensors
from primum.kernel.optimizers.predict import check_supported, group_of, shares

Loss: TypeAlias = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, eq=False)
class Probe:
    """A model, its optimizer, a loss and a batch. Measuring a probe does not affect training.

    Parameters, buffers, `.grad`, optimizer state and random state are unchanged, and a `Reducer` on
    the model is not affected. The loss of sample i is `loss` on a batch of this sample alone, and
    the batch's loss is the mean of these; gradients accumulated in `.grad` are ignored.

    Dropout draws one mask per sample, the same in every function that takes this probe.

    Args:
        model: In train or eval mode, as it is to be measured. BatchNorm must be in eval mode.
        optimizer: One or more optimizers. Frozen parameters, and those in no optimizer, are left
            out.
        loss: Maps outputs and targets to one number: a mean (`nn.CrossEntropyLoss()`), or one loss
            per sample (`reduction="none"`), since it is called with one sample at a time.
        inputs: A tensor [B, ...], a tuple of positional arguments, or a dict of keyword arguments.
        targets: A tensor [B, ...], or a tuple or dict of them.
        head: The last linear layer, as a module or dotted name. Found automatically by default.
        chunk_size: Samples per `torch.func.vmap` call. 1 runs without `vmap`, for models that it
            cannot batch.
        max_bytes: Memory limit for per-sample gradients; a single layer may exceed it.
        seed: Seed of the dropout masks and of the "permuted" weights.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> inputs, labels = torch.randn(32, 8), torch.randint(3, (32,))
        >>> probe = Probe(model, optimizer, nn.CrossEntropyLoss(), inputs, labels)
        >>> measure(probe).gram.shape  # layers, samples, samples
        torch.Size([2, 32, 32])
    """

    model: nn.Module
    optimizer: Optimizer | Iterable[Optimizer]
    loss: Loss
    inputs: Any
    targets: Any
    head: nn.Linear | str | None = None
    chunk_size: int = 16
    max_bytes: int = 1 << 30
    seed: int = 0

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be >= 1, got {self.chunk_size}")
        sizes = {_rows(leaf) for leaf in _tensors((self.inputs, self.targets))}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(
                "inputs and targets must be tensors with the same batch size, at least 1, in "
                "dimension 0; "
                f"got {sorted(sizes)}"
            )
        object.__setattr__(self, "model", _bare(self.model))
        if not isinstance(self.optimizer, Optimizer):
            object.__setattr__(self, "optimizer", tuple(self.optimizer))
        refuse_mixing(self.model)
        if not self.moved:
            raise ValueError(
                "the optimizer does not hold any trained parameter of this model; "
                "pass the optimizer that trains it"
            )
        for name, (param, owner) in self.moved.items():
            check_supported(owner, param, name)
        if len({self._maximizes(name) for name in self.moved}) > 1:
            raise ValueError(
                "maximize must be the same in all parameter groups, got True and False; "
                "use a separate optimizer and probe for each"
            )

    @property
    def batch_size(self) -> int:
        return _rows(_tensors((self.inputs, self.targets))[0])

    @cached_property
    def trained(self) -> dict[str, nn.Parameter]:
        """Parameters with `requires_grad`, by name; a shared one under its first name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @cached_property
    def moved(self) -> dict[str, tuple[nn.Parameter, Optimizer]]:
        """Parameters that the step changes, with their optimizers, by name."""
        given = self.optimizer
        optimizers = [given] if isinstance(given, Optimizer) else list(given)
        owners = {id(p): o for o in optimizers for g in o.param_groups for p in g["params"]}
        return {n: (p, owners[id(p)]) for n, p in self.trained.items() if id(p) in owners}

    @property
    def sign(self) -> int:
        """-1 if the optimizer maximizes, because harm then means a lower objective."""
        return -1 if self._maximizes(next(iter(self.moved))) else 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all results: float32, or float64 if the model uses it."""
        return torch.promote_types(next(iter(self.trained.values())).dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return next(iter(self.trained.values())).device

    def shares(self) -> tuple[dict[str, Tensor | float], Tensor | float]:
        """Each moved parameter's lr as a fraction of the largest, and the largest."""
        groups = [group_of(owner, param, name) for name, (param, owner) in self.moved.items()]
        rates = [1.0 if group.get("lr") is None else group["lr"] for group in groups]
        largest = max(rates, key=float)  # SYNC: if it is on a device
        return dict(zip(self.moved, shares(*rates), strict=True)), largest

    def _maximizes(self, name: str) -> bool:
        param, owner = self.moved[name]
        return bool(group_of(owner, param, name).get("maximize", False))


def refuse_mixing(model: nn.Module) -> None:
    """Raise if a layer mixes the samples of a batch or would update its statistics."""
    for name, module in model.named_modules():
        tracks = getattr(module, "track_running_stats", False)
        mixes = isinstance(module, _BatchNorm | _InstanceNorm)
        if mixes and module.training and tracks:
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__} in training mode: it mixes "
                "the samples of a batch and updates its statistics. Call .eval() on such layers to "
                "measure with their running statistics; or measure a copy of the model after "
                "torch.func.replace_all_batch_norm_modules_(copy), which normalises each sample "
                "separately; or train with nn.GroupNorm"
            )


def _bare(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DistributedDataParallel and DataParallel."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    inner = model.module if isinstance(model, wrappers) else getattr(model, "_orig_mod", model)
    return model if inner is model else _bare(inner)


def _rows(tensor: Tensor) -> int:
    return len(tensor) if tensor.dim() else 0


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found
