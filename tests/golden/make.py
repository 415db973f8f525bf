"""Small training runs whose extra weights, drift and gradients are kept in `golden.json`.

    python tests/golden/make.py                       rewrite golden.json from what the code does
    python tests/golden/make.py FOLDER RANK RANKS     one rank of the runs over several ranks

Only the public interface is used, so that the files survive a rewrite of everything behind it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden.json"
KEPT = 20  # numbers kept of a long vector, evenly spaced, besides its projections
DIGITS = 9

# Tolerances of weights, which are at most 2. A relative change of all parameters by 1e-13 changed
# no weight of a float64 run by more than 5e-11, and one by 2e-7 none of a float32 run by more than
# 8e-6. The solver stops at a certified gap of 0.5%, before it is done: two correct solvers agree
# only if they visit the same points. In these runs they do: no point is all zeros, where the CPU
# solver used to give up, and none is better than the best before by less than 1e-9 of the harm. In
# bfloat16 other kernels round differently.
CLOSE = 1e-6
SINGLE: dict[str, Any] = {"weights": 2e-4, "close": 2e-5}
HALF: dict[str, Any] = {"weights": 5e-3, "close": 2e-3}


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        optimizer: Name of a class of `torch.optim`.
        options: Its settings.
        attach: Settings of `primum.attach`.
        model: A key of `MODELS`, which also says what inputs it takes.
        rows: Leading shape of the inputs, of each rank if there are several.
        weights: Tolerance for extra weights, absolute. They are at most 2.
        close: Tolerance for all else: of drift, relative to the sum of its absolute values; of
            objective and bound, relative to the harm; of gradients, relative to their length.
        steps: Number of optimizer steps.
        dtype: Of the model.
        loss: "mean", or "explicit" for `reducer(losses)`.
        micro_batches: Backward passes per step.
        clip: Norm that all gradients are clipped to.
        scaler: Initial scale of a GradScaler.
        autocast: Whether to train under bfloat16 autocast.
        compile: Whether to compile the model, with "aot_eager".
        observe: Whether to measure only.
        bias_lr: Learning rate of the head's bias, in a group of its own.
        ranks: "", "ddp", "hand" (gradients averaged by the loop) or "fsdp2".
        seed: Of weights, inputs and labels.
    """

    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1, "momentum": 0.9})
    attach: dict[str, Any] = field(default_factory=dict)
    model: str = "mlp"
    rows: tuple[int, ...] | tuple[tuple[int, ...], ...] = (24,)
    weights: float = CLOSE
    close: float = 1e-6
    steps: int = 4
    dtype: str = "float64"
    loss: str = "mean"
    micro_batches: int = 1
    clip: float = 0.0
    scaler: float = 0.0
    autocast: bool = False
    compile: bool = False
    observe: bool = False
    bias_lr: float = 0.0
    ranks: str = ""
    seed: int = 0


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.mix(self.embedding(words)).tanh())
        return logits


class Pooled(nn.Module):
    """Averages the logits over positions: one term of the loss per sequence."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, width), nn.Tanh())
        self.head = nn.Linear(width, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs)).mean(1)


def mlp(inputs: int, width: int, outputs: int, *, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs, bias=bias))


# By name: how to make it, inputs (0: words instead), outputs, and the names of head and backbone.
MODELS: dict[str, tuple[Callable[[], nn.Module], int, int, str, str]] = {
    "mlp": (lambda: mlp(6, 8, 4), 6, 4, "2", "0"),
    "no-bias": (lambda: mlp(6, 8, 4, bias=False), 6, 4, "2", "0"),
    "classes": (lambda: mlp(6, 16, 1000), 6, 1000, "2", "0"),
    "words": (lambda: mlp(6, 48, 1200), 6, 1200, "2", "0"),
    "tied": (Tied, 0, 12, "head", "mix"),
    "pooled": (lambda: Pooled(6, 8, 4), 6, 4, "head", "body.0"),
}


def cases() -> dict[str, Case]:
    """All runs by name."""
    found: dict[str, Case] = {}
    sgd = {
        "plain": {"lr": 0.1},
        "momentum": {"lr": 0.1, "momentum": 0.9},
        "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
        "decay": {"lr": 0.1, "weight_decay": 1e-2},
        "dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.3},
        "maximize": {"lr": 0.01, "momentum": 0.9, "maximize": True},
    }
    for name, options in sgd.items():
        found[f"SGD-{name}"] = Case(options=options)
    others: dict[str, tuple[str, dict[str, Any]]] = {
        "Adam": ("Adam", {"lr": 0.01, "weight_decay": 1e-2}),
        "AdamW": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
        "AdamW-amsgrad": ("AdamW", {"lr": 0.01, "amsgrad": True}),
        "AdamW-maximize": ("AdamW", {"lr": 0.01, "maximize": True}),
        "NAdam": ("NAdam", {"lr": 0.01}),
        "RAdam": ("RAdam", {"lr": 0.01, "betas": (0.8, 0.9)}),
        "Adamax": ("Adamax", {"lr": 0.01}),
        "RMSprop": ("RMSprop", {"lr": 0.003, "centered": True, "momentum": 0.5}),
        "RMSprop-plain": ("RMSprop", {"lr": 0.003}),
        "Adagrad": ("Adagrad", {"lr": 0.05, "lr_decay": 0.1}),
        "Adadelta": ("Adadelta", {"lr": 1.0}),
        "ASGD": ("ASGD", {"lr": 0.1}),
        "Rprop": ("Rprop", {"lr": 0.01}),
    }
    for name, (kind, settings) in others.items():
        found[name] = Case(optimizer=kind, options=settings)
    adamw: dict[str, Any] = {"optimizer": "AdamW", "options": {"lr": 0.01, "weight_decay": 0.1}}
    clipped = {"clip": 0.05, "micro_batches": 2}
    for kind, own in {"SGD": {}, "AdamW": adamw}.items():
        found |= {
            f"no-bias-{kind}": Case(model="no-bias", **own),
            f"bias-group-{kind}": Case(bias_lr=0.03, **own),
            f"sequences-{kind}": Case(rows=(16, 3), attach={"per": "sample"}, **own),
            f"tokens-{kind}": Case(rows=(6, 5), attach={"per": "token"}, **own),
            f"auto-tokens-{kind}": Case(rows=(6, 5), **own),
            f"auto-samples-{kind}": Case(model="pooled", rows=(24, 2), **own),
            f"maps-{kind}": Case(rows=(16, 2, 2), attach={"per": "sample"}, **own),
            f"accumulation-{kind}": Case(micro_batches=2, **own),
            f"clipped-{kind}": Case(clip=0.05, **own),
            f"clipped-no-bias-{kind}": Case(clip=0.05, model="no-bias", **own),
            f"clipped-accumulation-{kind}": Case(**clipped, **own),
            f"scaler-{kind}": Case(scaler=1024.0, **own),
            f"scaler-clipped-{kind}": Case(scaler=1024.0, clip=0.05, **own),
            f"compiled-{kind}": Case(compile=True, **own),
            f"explicit-{kind}": Case(loss="explicit", **own),
            f"explicit-tokens-{kind}": Case(loss="explicit", rows=(6, 5), **own),
            f"tied-{kind}": Case(model="tied", rows=(24, 3), attach={"per": "sample"}, **own),
            f"tied-tokens-{kind}": Case(model="tied", rows=(6, 5), seed=3, **own),
            f"radius-0-{kind}": Case(attach={"radius": 0.0}, **own),
            f"observe-{kind}": Case(observe=True, **own),
            f"paper-{kind}": Case(attach={"recipe": "paper"}, **own),
            f"paper-accumulation-{kind}": Case(attach={"recipe": "paper"}, micro_batches=2, **own),
            f"float32-{kind}": Case(dtype="float32", **SINGLE, **own),
            f"autocast-{kind}": Case(dtype="float32", autocast=True, **HALF, **own),
        }
        ranks = {"rows": ((12,), (7,)), "ranks": "ddp"} | own
        found |= {
            f"ddp-global-{kind}": Case(attach={"scope": "global"}, **ranks),
            f"ddp-auto-{kind}": Case(attach={"scope": "auto"}, **ranks),
            f"ddp-local-{kind}": Case(attach={"scope": "local"}, **ranks),
            f"ddp-clipped-{kind}": Case(clip=0.05, **ranks),
            f"ddp-paper-{kind}": Case(attach={"recipe": "paper", "scope": "global"}, **ranks),
        }
    found |= {
        "head-and-radius": Case(attach={"head": "2", "radius": 0.1}),
        "radius-1": Case(attach={"radius": 1.0}),
        "more-rows-than-parameters": Case(rows=(64,), **adamw),
        "classes-SGD": Case(model="classes", options={"lr": 3.0, "momentum": 0.9}),
        "classes-AdamW": Case(model="classes", steps=3, **adamw),
        "sketched": Case(model="words", rows=(8, 64), steps=3, dtype="float32", **SINGLE, **adamw),
        "ddp-tokens": Case(rows=((4, 5), (3, 5)), ranks="ddp"),
        "ddp-by-hand": Case(rows=((12,), (7,)), attach={"scope": "global"}, ranks="hand"),
        "fsdp2-global": Case(rows=((12,), (7,)), attach={"scope": "global"}, ranks="fsdp2"),
        "fsdp2-auto": Case(rows=((12,), (12,)), ranks="fsdp2"),
        "fsdp2-clipped": Case(rows=((12,), (7,)), clip=0.05, ranks="fsdp2"),
    }
    return found


def run(case: Case, rank: int = 0, ranks: int = 1) -> list[dict[str, Any]]:
    """What each step records: one report per backward pass, and the gradients before the step."""
    make, _, _, head, backbone = MODELS[case.model]
    torch.manual_seed(case.seed)
    model = make().to(getattr(torch, case.dtype))
    net, forward = _wrapped(model, case)
    optimizer = _optimizer(model, case, head)
    scaler = torch.amp.GradScaler("cpu", init_scale=case.scaler) if case.scaler else None
    attach = primum.observe if case.observe else primum.attach
    reducer = attach(net, optimizer, scaler=scaler, **case.attach)
    found = []
    for step in range(case.steps):
        optimizer.zero_grad()
        reports = []
        for part in range(case.micro_batches):
            loss = _loss(forward, reducer, case, 100 * step + 10 * part + rank, rank)
            loss = loss / (1 if case.loss == "explicit" else case.micro_batches)
            (loss if scaler is None else scaler.scale(loss)).backward()
            reports.append(_figures(reducer))
        if case.ranks == "hand":
            for param in model.parameters():
                torch.distributed.all_reduce(param.grad)
                param.grad /= ranks
        grads = {name: _grad(model, name) for name in (head, backbone)}
        found.append({"reports": reports, "gradients": [_digest(g) for g in grads.values()]})
        if scaler is not None:
            scaler.unscale_(optimizer)
        if case.clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            assert float(norm) > 1.5 * case.clip, "clipping must bite"
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    reducer.remove()
    return found


def _wrapped(model: nn.Module, case: Case) -> tuple[nn.Module, nn.Module]:
    """What to attach to, and what to call."""
    if case.ranks == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if case.ranks == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    return model, torch.compile(model, backend="aot_eager") if case.compile else model


def _optimizer(model: nn.Module, case: Case, head: str) -> optim.Optimizer:
    groups: Any = model.parameters()
    if case.bias_lr:
        bias = model.get_parameter(f"{head}.bias")
        rest = [param for param in model.parameters() if param is not bias]
        groups = [{"params": rest}, {"params": [bias], "lr": case.bias_lr}]
    made: optim.Optimizer = getattr(optim, case.optimizer)(groups, **case.options)
    return made


def _loss(model: nn.Module, reducer: primum.Reducer, case: Case, number: int, rank: int) -> Tensor:
    _, inputs, outputs, _, _ = MODELS[case.model]
    rng = torch.Generator().manual_seed(1000 * case.seed + number + 1)
    rows: Any = case.rows[rank] if case.ranks else case.rows
    shape = rows[:1] if case.model == "pooled" else rows
    # A few labels and inputs that have much in common: the samples are in each other's way.
    labels = torch.randint(4, shape, generator=rng) * (outputs // 4)
    if case.attach.get("per") == "sample":  # of one label, or there is nothing to do
        labels = labels.flatten(1)[:, :1].view(-1, *[1] * (len(shape) - 1)).expand(shape)
    if inputs:
        x = 1 + torch.randn(*rows, inputs, generator=rng, dtype=torch.float64)
        x = x.to(getattr(torch, case.dtype))
    else:
        x = torch.randint(outputs, rows, generator=rng)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        logits = model(x)
    logits = logits.float() if case.autocast else logits
    each = F.cross_entropy(logits.flatten(0, -2), labels.reshape(-1), reduction="none")
    if case.loss == "explicit":
        loss: Tensor = reducer(each.view(labels.shape) / case.micro_batches)
        return loss
    return each.mean()


def _grad(model: nn.Module, name: str) -> Tensor:
    grad = model.get_submodule(name).weight.grad
    assert isinstance(grad, Tensor)
    full: Tensor = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return full.detach().double().flatten()


def _figures(reducer: primum.Reducer) -> dict[str, Any]:
    report = reducer.last
    assert report is not None
    kept: dict[str, Any] = {"per": report.per, "applied": report.applied}
    kept |= {
        "weights": _thinned(report.extra_weights),
        "drift": _thinned(report.drift),
        "after": _digest(report.drift_after.double()),
        "scale": _rounded([float(report.drift.double().abs().sum())]),
    }
    harms = (report.harm_before, report.objective, report.lower_bound)
    return kept | {"harm": _rounded([float(value) for value in harms])}


def _thinned(vector: Tensor) -> list[float]:
    """A vector, or every k-th number of a long one and its projections."""
    wide, every = vector.detach().double(), -(-len(vector) // KEPT)
    return _rounded(wide[::every].tolist()) + (_digest(wide) if every > 1 else [])


def _digest(vector: Tensor) -> list[float]:
    """Two fixed projections of a vector, and its length."""
    where = torch.arange(1, len(vector) + 1, dtype=torch.float64)
    directions = torch.stack([torch.cos(where * where), torch.sin(3 * where * where + 1)])
    return _rounded([*(directions @ vector).tolist(), float(vector.norm())])


def _rounded(values: list[float]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]


@contextlib.contextmanager
def started(ranks: int = 2) -> Iterator[Callable[[], dict[str, Any]]]:
    """Start the runs over several ranks; call what is yielded for the first rank's results."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        children = [
            subprocess.Popen(
                [sys.executable, __file__, folder, str(rank), str(ranks)],
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

        def results() -> dict[str, Any]:
            said = [child.communicate(timeout=100)[1] for child in children]
            assert all(child.returncode == 0 for child in children), "\n".join(said)
            found: dict[str, Any] = json.loads((Path(folder) / "results.json").read_text())
            return found

        try:
            yield results
        finally:
            for child in children:
                child.kill()
                child.communicate()


def one_rank(folder: Path, rank: int, ranks: int) -> None:
    chosen = {name: case for name, case in cases().items() if case.ranks}
    found = {name: run(case, rank, ranks) for name, case in chosen.items()}
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(found))


def main() -> None:
    torch.set_num_threads(1)
    with started() as results:
        found = {name: run(case) for name, case in cases().items() if not case.ranks}
        found |= results()
    lines = [
        f"{json.dumps(name)}:{json.dumps(found[name], separators=(',', ':'))}" for name in found
    ]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        from rank_group import run_rank

        run_rank(one_rank, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    main()
