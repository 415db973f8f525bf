"""DistributedDataParallel with the one added line: the problem is the global batch's, on any number
of processes. Here on the CPU, with gloo.

Run: torchrun --nproc-per-node 2 examples/ddp.py
 or: python examples/ddp.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import primum

TRAIN = 600  # images; the rest is for testing


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN on noisy digits, with DDP")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=60, help="of all ranks together")
    parser.add_argument("--checkpoint", type=Path, help="written after every epoch; if there, read")
    return parser.parse_args(given)


@contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """This rank and how many there are: torchrun's, or one process that is a group by itself."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.get_rank(), dist.get_world_size()
        dist.barrier()  # gloo may abort a rank that exits while its last operation is cleaned up
    finally:
        dist.destroy_process_group()


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images += 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return images, torch.tensor(data.target)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def write(state: dict[str, object], path: Path) -> None:
    """All or nothing: a run killed in the middle leaves the checkpoint before it."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def same_on_all_ranks(model: nn.Module) -> bool:
    own = nn.utils.parameters_to_vector(model.parameters()).detach()
    first = own.clone()
    dist.broadcast(first, src=0)
    return torch.equal(own, first)


def train(args: argparse.Namespace, rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    images, labels = digits()
    data = TensorDataset(images[:TRAIN], labels[:TRAIN])
    # Rank r takes every ranks-th sample: together they see the batches that one process would see.
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, ranks, rank, seed=0)
    loader = DataLoader(data, batch_size=args.batch_size // ranks, sampler=sampler)

    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reducer = primum.attach(model, optimizer)  # <- the one added line, on every rank

    parts = {"model": model.module, "optimizer": optimizer, "reducer": reducer}
    first = 0
    if args.checkpoint is not None and args.checkpoint.exists():
        state = torch.load(args.checkpoint, weights_only=True)
        first = state["epoch"]
        for name, part in parts.items():
            part.load_state_dict(state[name])

    most = 0.0
    for epoch in range(first, args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert reducer.last is not None
        step = reducer.last.as_dict()  # of the global batch: the same on every rank
        most = max(most, step["mean_extra_weight"])
        if rank == 0:
            model.eval()
            with torch.no_grad():  # model.module: evaluating on one rank must not wait for others
                logits = model.module(images[TRAIN:])
            accuracy = (logits.argmax(1) == labels[TRAIN:]).float().mean()
            print(
                f"epoch {epoch + 1}  loss {loss:.3f}  test accuracy {accuracy:.1%}  harmed "
                f"{step['harmed_before']:.0%} -> {step['harmed_after']:.0%} of "
                f"{len(reducer.last.drift)} samples; ranks: {ranks}"
            )
            if args.checkpoint is not None:
                state = {name: part.state_dict() for name, part in parts.items()}
                write(state | {"epoch": epoch + 1}, args.checkpoint)

    # Weights were really applied, in every step, and the ranks agree to the last bit.
    assert same_on_all_ranks(model)
    if first < args.epochs:
        assert reducer.last is not None
        assert reducer.last.applied
        assert reducer.last.fallbacks == 0
        assert len(reducer.last.drift) == args.batch_size // ranks * ranks
        assert most > 0


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    with process_group() as (rank, ranks):
        train(args, rank, ranks)


if __name__ == "__main__":
    main()
