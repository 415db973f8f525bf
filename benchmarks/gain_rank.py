"""Error of the rank-r approximation of the gain: is r <= 5 enough, as in the paper (Sec. 4.5)?

Trains small networks with AdamW and the paper's recipe. At several steps it compares the head's
Gram matrices under the rank-r gain (`primum.paper.low_rank`) with the exact ones, all in float64,
so that they differ only in the rank. Q_1 is the matrix with the gain, Q_2 with its square.

    python benchmarks/gain_rank.py                     # scikit-learn's digits, about a minute
    python benchmarks/gain_rank.py --data-dir DIR      # DIR/cifar10, DIR/cifar100: parquet files
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _capture import Data, Transformer, cifar, digits, group_norm_cnn, optimizer_of, record
from _common import Report, as_text, make_parser, markdown_table
from torch import nn

from primum.gram import MatrixFree
from primum.paper.low_rank import gram_matrices

RANKS = (1, 2, 3, 4, 5, 8, 16)
SHOWN = ("Q1 r=1", "Q1 r=3", "Q1 r=5", "Q1 r=8", "Q1 neg", "Q2 r=5", "Q2 r=8", "Q2 neg")


def errors(head: MatrixFree, ranks: Sequence[int] = RANKS) -> dict[str, float]:
    """Relative Frobenius errors by matrix and rank; at rank 5 also the most negative eigenvalue."""
    x, g = head.features.double(), head.output_gradients.double()
    gain = torch.as_tensor(head.gain).double()
    wide = MatrixFree(x, g, gain, has_bias=head.has_bias)
    exact = [wide.dense().matrix, MatrixFree(x, g, gain**2).dense().matrix]
    found = {}
    for rank in ranks:
        for k, matrix in enumerate(gram_matrices(wide, rank)):
            found[f"Q{k + 1} r={rank}"] = ((matrix - exact[k]).norm() / exact[k].norm()).item()
            if rank == 5:
                spectrum = torch.linalg.eigvalsh(matrix)
                found[f"Q{k + 1} neg"] = (-spectrum[0] / spectrum[-1]).clamp_min(0).item()
    return found


def follow(model: nn.Module, data: Data, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train, and measure at steps 1, 2, 5, 10, 20, 50, ... and the last."""
    at = sorted({d * 10**k for k in range(6) for d in (1, 2, 5)} | {args.steps})
    batches = data.batches(args.batch, args.steps, torch.Generator().manual_seed(args.seed))
    moments = list(record(model, optimizer_of("adamw", model, args.batch), batches, args.steps, at))
    return [{"step": moment.number} | errors(moment.gram) for moment in moments[-1]]


def page_table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/paper.md: by step and head, error in % at rank 5 (and at rank 8)."""
    heads = list(dict.fromkeys((row["head"], row["model"]) for row in rows))
    found = {(row["step"], row["head"], row["model"]): row for row in rows}
    names = {"cnn": "CNN"}
    header = ["step"]
    for head, model in heads:
        header += [f"{names.get(model, model)} {head}: {matrix}" for matrix in ("Q_1", "Q_2")]
    lines = []
    for step in sorted({row["step"] for row in rows}):
        line = [str(step)]
        for head in heads:
            row = found.get((step, *head))
            for matrix in ("Q1", "Q2"):
                text = (
                    "–"
                    if row is None
                    else (f"{100 * row[f'{matrix} r=5']:.1f} ({100 * row[f'{matrix} r=8']:.1f})")
                )
                line.append(text)
        lines.append(line)
    return markdown_table(header, lines)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("gain_rank.py", __doc__)
    add = parser.add_argument
    add("--data-dir", type=Path, help="folder of cifar10/ and cifar100/; needs pyarrow")
    add("--heads", nargs="+", metavar="INxOUT", help="only these, such as 384x100")
    add("--steps", type=int, default=1000, help="training steps (default: 1000)")
    add("--batch", type=int, default=128, help="batch size (default: 128)")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    report = Report("gain_rank.py", argv, args.out)
    if args.data_dir is None:
        sets = [(digits(), 64, "cnn"), (digits(), 64, "transformer")]
    else:
        ten = cifar(args.data_dir, "cifar10", 20_000)
        hundred = cifar(args.data_dir, "cifar100", 20_000)
        sets = [(ten, 64, "cnn"), (hundred, 64, "cnn"), (hundred, 384, "transformer")]
    rows: list[dict[str, Any]] = []
    for data, width, kind in sets:
        name = {"data": data.name, "model": kind, "head": f"{width}x{data.classes}"}
        if args.heads and name["head"] not in args.heads:
            continue
        torch.manual_seed(args.seed)
        shape = (data.images.shape[1], data.images.shape[-1], data.classes)
        model = group_norm_cnn(*shape) if kind == "cnn" else Transformer(*shape, width=width)
        run = [name | row for row in follow(model, data, args)]
        rows += run
        print("\n" + ", ".join(name.values()) + ": error in %; neg: least over largest eigenvalue")
        table = [[str(row["step"]), *(f"{100 * row[c]:.2f}" for c in SHOWN)] for row in run]
        print(as_text(["step", *SHOWN], table), flush=True)
    report.save({"results": rows}, page_table(rows))
    report.show()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
