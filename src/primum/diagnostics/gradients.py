"""Per-sample losses and gradients of a whole model, a few samples at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from primum.diagnostics.probe import Probe, refuse_mixing
from primum.diagnostics.trees import map_tensors, tree_map

Params: TypeAlias = Mapping[str, Tensor]
OfOne: TypeAlias = Callable[[Any, Any], Any]  # inputs and targets of one sample


def per_sample_gradients(probe: Probe) -> dict[str, Tensor]:
    """Per-sample gradients of `L_i / B`, by parameter name; they sum to the batch gradient.

    All of them are held in memory at once; `measure` and `first_order` bound their memory.

    Shapes: name -> [B, *parameter].
    """
    params = {name: param.detach() for name, param in probe.trained.items()}
    rows = gradient_rows(probe, params)
    return {name: found.view(-1, *params[name].shape) for name, found in rows.items()}


def sample_losses(probe: Probe, params: Params | None = None) -> Tensor:
    """Each sample's loss, optionally with `params` in place of the model's parameters. [B]."""
    of_one = partial(loss_of_one, probe, params or {})
    return torch.cat([losses for _, losses in over_chunks(probe, of_one)]).to(probe.dtype)


def gradient_rows(probe: Probe, params: Params) -> dict[str, Tensor]:
    """Per-sample gradients (G) of these parameters only. name -> [B, size]."""
    batch = probe.batch_size
    rows = {
        name: torch.empty(batch, param.numel(), dtype=probe.dtype, device=param.device)
        for name, param in params.items()
    }

    def of_one(inputs: Any, targets: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = grad(partial(loss_of_one, probe))(dict(params), inputs, targets)
        return found

    for place, gradients in over_chunks(probe, of_one):
        for name, row in gradients.items():
            rows[name][place] = row.flatten(1).to(probe.dtype) / batch
    return rows


def loss_of_one(probe: Probe, params: Params, inputs: Any, targets: Any) -> Tensor:
    """The loss of one sample, run as a batch of one; negated if the optimizer maximizes.

    `params` replace those of the model. Buffers are copied, so the model's own do not change.
    """
    inputs, targets = map_tensors(lambda x: x.unsqueeze(0), (inputs, targets))
    args, kwargs = arguments(inputs)
    buffers = {name: buffer.clone() for name, buffer in probe.model.named_buffers()}
    outputs = functional_call(probe.model, (dict(params), buffers), args, kwargs)
    loss = probe.loss(outputs, targets)
    if loss.numel() != 1:
        raise ValueError(
            "loss must return one number per sample, for example the mean over its positions; "
            f"got shape {list(loss.shape)}"
        )
    return probe.sign * loss.reshape(())


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as positional and keyword arguments for the model."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def over_chunks(probe: Probe, of_one: OfOne) -> Iterator[tuple[slice, Any]]:
    """Apply `of_one` to every sample; yields slices of the batch with their stacked results.

    Checks the model again, because its mode may have changed since the probe was created.
    """
    refuse_mixing(probe.model)
    for first in range(0, probe.batch_size, probe.chunk_size):
        place = slice(first, min(first + probe.chunk_size, probe.batch_size))
        yield place, _chunk(probe, of_one, place)


def _chunk(probe: Probe, of_one: OfOne, place: slice) -> Any:
    samples = map_tensors(lambda x: x[place], (probe.inputs, probe.targets))
    with (
        torch.no_grad(),  # only outside of torch.func, which still differentiates
        randomness(probe.device, probe.seed + place.start),
        _plain_attention(),
    ):
        if probe.chunk_size == 1:
            result = of_one(*map_tensors(lambda x: x[0], samples))
            return map_tensors(lambda x: x.unsqueeze(0), result)
        dims = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, samples)
        try:
            return vmap(of_one, in_dims=dims, randomness="different")(*samples)
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            raise RuntimeError(
                "torch.func.vmap cannot batch this model (see the error above); pass chunk_size=1 "
                "to run one sample at a time without vmap"
            ) from error


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Use math attention, the only backend that vmap can batch, in training and eval mode."""
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the CPU's and the device's generators for a block, and restore them afterwards."""
    module: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    where: Sequence[Any] = () if device.type in ("cpu", "mps") else (device,)
    kept, kept_there = torch.get_rng_state(), module.get_rng_state(*where)
    try:
        module.set_rng_state(torch.Generator(device).manual_seed(seed).get_state(), *where)
        torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
        yield
    finally:
        module.set_rng_state(kept_there, *where)
        torch.set_rng_state(kept)
