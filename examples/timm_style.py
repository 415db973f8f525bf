"""A training script of the usual kind, with a switch for primum: mixed precision, accumulation,
clipping, EMA, warm-up and cosine schedule, channels_last, checkpoints that a killed run can resume.

Run: python examples/timm_style.py --opt sgd --lr 0.1 --amp bfloat16 --model-ema --no-primum
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import primum

TRAIN = 600  # images; the rest is for testing


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN on noisy handwritten digits")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--warmup-epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--grad-accum-steps", type=int, default=1)
    parser.add_argument("--opt", choices=["sgd", "adamw"], default="adamw")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--clip-grad", type=float, default=1.0, metavar="NORM")
    parser.add_argument("--amp", choices=["float16", "bfloat16"], help="autocast to this type")
    parser.add_argument("--model-ema", action="store_true", help="evaluate a moving average")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="write it after every epoch")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint, if there")
    parser.add_argument("--primum", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--radius", type=float, default=0.4)
    return parser.parse_args(given)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU()
        )
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.drop(self.body(self.stem(images)).mean((2, 3))))


def digits(device: str) -> tuple[Tensor, Tensor]:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images += 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return images.to(device), torch.tensor(data.target, device=device)


def write(state: dict[str, object], path: Path) -> None:
    """All or nothing: a run killed in the middle leaves the checkpoint before it."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def main(given: Sequence[str] | None = None) -> nn.Module:
    args = arguments(given)
    torch.manual_seed(args.seed)
    images, labels = digits(args.device)
    model = Net().to(args.device)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)

    # As usual: no weight decay for biases and norms. The head's weight and bias are in two groups.
    decay = [p for p in model.parameters() if p.dim() > 1]
    groups = [
        {"params": decay, "weight_decay": args.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if args.opt == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            groups, lr=args.lr, momentum=0.9, nesterov=True
        )
    else:
        optimizer = torch.optim.AdamW(groups, lr=args.lr)
    steps = math.ceil(TRAIN / (args.batch_size * args.grad_accum_steps))  # per epoch
    warm, total = args.warmup_epochs * steps, args.epochs * steps

    def schedule(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    scaler = torch.amp.GradScaler(args.device, enabled=args.amp == "float16")
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95)) if args.model_ema else None
    reducer = None
    if args.primum:
        reducer = primum.attach(model, optimizer, radius=args.radius, scaler=scaler)

    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    parts |= {name: part for name, part in (("ema", ema), ("reducer", reducer)) if part is not None}
    first = 0
    if args.resume and args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location=args.device, weights_only=True)
        first = state["epoch"]
        torch.set_rng_state(state["rng"].cpu())
        for name, part in parts.items():
            part.load_state_dict(state[name])

    autocast = torch.autocast(
        args.device, dtype=getattr(torch, args.amp or "bfloat16"), enabled=args.amp is not None
    )
    most = 0.0
    for epoch in range(first, args.epochs):
        model.train()
        batches = torch.randperm(TRAIN).split(args.batch_size)
        for number, batch in enumerate(batches, 1):
            with autocast:
                logits = model(images[batch])
                loss = nn.functional.cross_entropy(logits, labels[batch], label_smoothing=0.1)
            scaler.scale(loss / args.grad_accum_steps).backward()
            if number % args.grad_accum_steps and number < len(batches):
                continue
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            if ema is not None:
                ema.update_parameters(model)

        judged = model if ema is None else ema
        judged.eval()
        with torch.no_grad(), autocast:
            accuracy = (judged(images[TRAIN:]).argmax(1) == labels[TRAIN:]).float().mean()
        told = ""
        if reducer is not None and reducer.last is not None:
            step = reducer.last.as_dict()
            most = max(most, step["mean_extra_weight"])
            told = f"  harmed {step['harmed_before']:.0%} -> {step['harmed_after']:.0%}"
        print(f"epoch {epoch + 1:2d}  loss {loss:.3f}  test accuracy {accuracy:.1%}{told}")
        if args.checkpoint is not None:
            state = {name: part.state_dict() for name, part in parts.items()}
            write(state | {"epoch": epoch + 1, "rng": torch.get_rng_state()}, args.checkpoint)

    if reducer is not None:  # Weights were really applied, in every step.
        assert reducer.last is not None
        assert reducer.last.applied
        assert reducer.last.fallbacks == 0
        assert most > 0 or args.radius == 0
    return model


if __name__ == "__main__":
    main()
