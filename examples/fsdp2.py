"""fully_shard (FSDP2) with the one added line: parameters, gradients and optimizer states are split
over the processes, the problem is the global batch's. Here on the CPU, with gloo.

Run: torchrun --nproc-per-node 2 examples/fsdp2.py
 or: python examples/fsdp2.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import primum

TRAIN = 600  # images; the rest is for testing


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images.flatten(1))
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on noisy digits, sharded")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=60, help="of all ranks together")
    parser.add_argument("--checkpoint", type=Path, help="folder, written at the end")
    parser.add_argument("--resume", type=Path, help="such a folder, of any number of ranks")
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


def train(args: argparse.Namespace, rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    images, labels = digits()
    data = TensorDataset(images[:TRAIN], labels[:TRAIN])
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, ranks, rank, seed=0)
    loader = DataLoader(data, batch_size=args.batch_size // ranks, sampler=sampler)

    mesh = init_device_mesh("cpu", (ranks,))
    model = Network()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after fully_shard
    reducer = primum.attach(model, optimizer)  # <- the one added line, on every rank

    if args.resume is not None:
        parts = get_state_dict(model, optimizer)
        dcp.load({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=args.resume)
        set_state_dict(model, optimizer, model_state_dict=parts[0], optim_state_dict=parts[1])

    most = 0.0
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        assert reducer.last is not None
        step = reducer.last.as_dict()  # of the global batch: the same on every rank
        most = max(most, step["mean_extra_weight"])
        model.eval()
        with torch.no_grad():  # on every rank: the parameters have to be gathered
            accuracy = (model(images[TRAIN:]).argmax(1) == labels[TRAIN:]).float().mean()
        if rank == 0:
            print(
                f"epoch {epoch + 1}  loss {loss:.3f}  test accuracy {accuracy:.1%}  harmed "
                f"{step['harmed_before']:.0%} -> {step['harmed_after']:.0%} of "
                f"{len(reducer.last.drift)} samples; ranks: {ranks}"
            )

    if args.checkpoint is not None:
        parts = get_state_dict(model, optimizer)
        dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=args.checkpoint)

    # Weights were really applied, in every step.
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
