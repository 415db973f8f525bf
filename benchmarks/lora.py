"""Does reweighting help when a language model is adapted by LoRA? In which layer to measure?

A small character-level Llama is pretrained on one text (the King James Bible); then its weights are
frozen, head included, and PEFT's LoRA adapts it to another, the Python language reference
(`pydoc_data.topics`). The learning rate is the best one for plain training, on separate seeds.

    apt-get install bible-kjv; bible -f 'Gen1:1-Rev22:21' > kjv.txt
    python benchmarks/lora.py --text kjv.txt           # a few minutes on one core

Three tables: test loss by arm; which layer's interference agrees best with that of all adapters;
and the cost of a step.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean, median
from time import process_time
from typing import Any

import peft
import torch
import transformers
from _common import (
    Report,
    Table,
    describe,
    make_parser,
    positive,
    ratio_of_medians,
    take_turns,
    use_threads,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn, optim
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import primum
from primum.experiments.statistics import family, interval

LENGTH, BATCH = 48, 16
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
TUNING_SEEDS = (100,)
LAYER_SEEDS = (0, 1)
LAST = "layers.{}.mlp.down_proj.lora_{}.default"
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ARMS: dict[str, dict[str, Any] | None] = {
    "base": None,
    "primum": {"per": "sample"},
    "primum, per token": {"per": "token", "radius": 0.1},
    "primum, measured in A": {"per": "sample", "head": "A"},
}


class Text:
    """Characters as integers; the last tenth is held out for testing."""

    def __init__(self, text: str) -> None:
        codes = torch.tensor([min(ord(letter), 127) for letter in text])
        cut = len(codes) * 9 // 10
        self.train, self.test = codes[:cut], codes[cut:]

    def batches(self, seed: int, steps: int) -> Iterator[Tensor]:
        rng = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            starts = torch.randint(len(self.train) - LENGTH, (BATCH, 1), generator=rng)
            yield self.train[starts + torch.arange(LENGTH)]

    def test_batches(self, rows: int) -> Iterator[Tensor]:
        whole = self.test[: len(self.test) // LENGTH * LENGTH].view(-1, LENGTH)
        chosen = whole[torch.linspace(0, len(whole) - 1, min(rows, len(whole))).long()]
        yield from chosen.split(4 * BATCH)


def pretrained(text: Text, steps: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, intermediate_size=128, max_position_embeddings=LENGTH, **SHAPE
    )
    model = LlamaForCausalLM(config)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    warm = optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    model.train()
    for ids in text.batches(0, steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        warm.step()
    return model


def adapted(base: nn.Module, seed: int) -> tuple[nn.Module, list[nn.Parameter]]:
    """A frozen copy with LoRA of rank 8 on every linear layer except the head."""
    torch.manual_seed(seed)
    settings = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
    model = get_peft_model(copy.deepcopy(base), settings)
    model.train()
    return model, [p for p in model.parameters() if p.requires_grad]


def loss_on(model: nn.Module, text: Text, rows: int) -> float:
    model.eval()
    with torch.no_grad():
        found = [
            model(input_ids=ids, labels=ids).loss.expand(len(ids))
            for ids in text.test_batches(rows)
        ]
    model.train()
    return torch.cat(found).mean().item()


def attached(
    model: nn.Module, optimizer: optim.Optimizer, arm: dict[str, Any] | None
) -> primum.Reducer | None:
    if arm is None:
        return None
    head = {"head": "model." + LAST.format(SHAPE["num_hidden_layers"] - 1, "A")}
    return primum.attach(model, optimizer, **(arm | (head if "head" in arm else {})))


def train(
    base: nn.Module, text: Text, arm: dict[str, Any] | None, rate: float, seed: int, args: Any
) -> dict[str, Any]:
    model, trained = adapted(base, seed)
    optimizer = optim.AdamW(trained, lr=rate)
    reducer = attached(model, optimizer, arm)
    decay = optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.steps)
    figures: list[dict[str, float]] = []
    begin = process_time()
    for number, ids in enumerate(text.batches(seed, args.steps)):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        decay.step()
        if reducer is not None and reducer.last is not None and number % 10 == 9:
            figures.append(reducer.last.as_dict())
    seconds = process_time() - begin
    found: dict[str, Any] = {"rate": rate, "seed": seed, "seconds": round(seconds, 2)}
    found["loss"] = loss_on(model, text, args.test_rows)
    if figures:
        for name in ("harmed_before", "harmed_after", "mean_extra_weight", "fallbacks"):
            found[name] = sum(each[name] for each in figures) / len(figures)
    if reducer is not None:
        found["layer"], found["output"] = reducer.head_name, reducer.output_name
        reducer.remove()
    return found


# --- which layer ----------------------------------------------------------------------------------


def which_layer(
    base: nn.Module, text: Text, rate: float, seed: int, args: Any
) -> list[dict[str, Any]]:
    """Correlation over samples of each layer's drift with that of all adapters, in plain training.

    For the two matrices of the last adapter also the harm over all adapters: that of the plain step
    and that of the step with weights measured there.
    """
    model, trained = adapted(base, seed)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    optimizer = optim.AdamW(trained, lr=rate)
    decay = optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.steps)
    phases = {"first step": [0], "first third": range(5), "second": range(5, 10)}
    phases |= {"last": range(10, 15)}
    at = {
        max(int(args.steps * (k + 0.5) / 15), 1) if phase != "first step" else 0: phase
        for phase, several in phases.items()
        for k in several
    }
    block = SHAPE["num_hidden_layers"] - 1
    last = {f"last lora_{one}": LAST.format(block, one) for one in "BA"}
    parts = {name: [layer] for name, layer in last.items()}
    parts["last lora_A and lora_B"] = list(last.values())
    parts["first lora_B of the last block"] = [f"layers.{block}.self_attn.q_proj.lora_B"]
    parts["all adapters of the last block"] = [f"layers.{block}."]
    rows: list[dict[str, Any]] = []
    for number, ids in enumerate(text.batches(seed, args.steps)):
        if number in at:
            grads = _per_sample(model, trained, ids)
            whole = _drifts(model, optimizer, grads, torch.zeros(len(ids)))
            harm = sum(whole).clamp_min(0).sum()
            for part, layers in parts.items():
                belongs = [any(layer in name for layer in layers) for name in names]
                own = sum(d for d, inside in zip(whole, belongs, strict=True) if inside)
                pair = torch.stack((own, sum(whole)))
                usable = bool((pair.std(1) > 0).all())
                row = {"seed": seed, "step": number, "phase": at[number], "part": part}
                row["correlation"] = torch.corrcoef(pair)[0, 1].item() if usable else 0.0
                if part in last:
                    weights = _weights(model, optimizer, "model." + last[part], ids)
                    left = sum(_drifts(model, optimizer, grads, weights)).clamp_min(0).sum()
                    row |= {"harm": harm.item(), "left": left.item()}
                rows.append(row)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        decay.step()
    return rows


def _weights(model: nn.Module, optimizer: optim.Optimizer, layer: str, ids: Tensor) -> Tensor:
    """Extra weights of the samples, measured in a layer; changes only `.grad`."""
    optimizer.zero_grad()
    with primum.observe(model, optimizer, head=layer, per="sample") as reducer:
        model(input_ids=ids, labels=ids).loss.backward()
        assert reducer.last is not None
        weights = reducer.last.extra_weights
    optimizer.zero_grad()
    return weights


def _drifts(
    model: nn.Module, optimizer: optim.Optimizer, grads: list[Tensor], weights: Tensor
) -> list[Tensor]:
    """First-order change of each loss by a real step of a copy on weighted losses, by parameter.

    grads [B, ...], weights [B] -> [B].
    """
    twin, stepper = copy.deepcopy((model, optimizer))
    trained = [p for p in twin.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    for p, each in zip(trained, grads, strict=True):
        p.grad = torch.tensordot((1 + weights) / len(weights), each, 1)
    stepper.step()
    return [
        each.flatten(1) @ (p.detach() - old).flatten()
        for each, p, old in zip(grads, trained, before, strict=True)
    ]


def _per_sample(model: nn.Module, trained: list[nn.Parameter], ids: Tensor) -> list[Tensor]:
    """Per-sample gradients: [B, ...] for each parameter."""
    each = [
        torch.autograd.grad(model(input_ids=row, labels=row).loss, trained) for row in ids.split(1)
    ]
    return [torch.stack(grads) for grads in zip(*each, strict=True)]


# --- the price ------------------------------------------------------------------------------------


def price(base: nn.Module, text: Text, rate: float, args: Any) -> list[dict[str, Any]]:
    """FLOPs and time of a step, plain and with primum, for two sets of adapters."""
    rows = []
    ids = next(text.batches(0, 1))
    for targets in (["q_proj", "v_proj"], "all-linear"):
        steps: list[Callable[[], object]] = []
        operations = []
        for arm in (None, {}):
            settings = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=targets)
            model = get_peft_model(copy.deepcopy(base), settings)
            model.train()
            optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
            reducer = attached(model, optimizer, arm)

            def step(model: nn.Module = model, optimizer: optim.Optimizer = optimizer) -> None:
                optimizer.zero_grad()
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()

            step()
            with FlopCounterMode(display=False) as counter:
                step()
            operations.append(counter.get_total_flops())
            steps.append(step)
        times = take_turns(steps, args.seconds, 200, 5, process_time)
        ratio, low, high = ratio_of_medians(times[1], times[0])
        assert reducer is not None
        rows.append(
            {
                "adapters": " and ".join(targets) if isinstance(targets, list) else targets,
                "measured in": reducer.head_name.removeprefix("base_model.model.model."),
                "operations": operations[1] / operations[0] - 1,
                "plain_ms": 1e3 * median(times[0]),
                "time": [ratio, low, high],
            }
        )
    return rows


# --- tables ---------------------------------------------------------------------------------------


def loss_table(runs: dict[str, list[dict[str, Any]]]) -> Table:
    losses = {arm: [run["loss"] for run in found] for arm, found in runs.items()}
    against = family({arm: (losses[arm], losses["base"]) for arm in losses if arm != "base"})
    rows = []
    for arm, found in runs.items():
        mean = interval(losses[arm])
        row = [arm, f"{mean.mean:.4f} ± {mean.half_width:.4f}"]
        if arm == "base":
            rows.append([*row, "", "", "", ""])
            continue
        percent = [
            100 * (own / plain - 1) for own, plain in zip(losses[arm], losses["base"], strict=True)
        ]
        paired = interval(percent)
        row += [f"{paired.mean:+.2f} ± {paired.half_width:.2f}%"]
        row += [f"{sum(each < 0 for each in percent)} of {len(percent)}", against[arm].verdict]
        before, after, extra = (
            sum(run[name] for run in found) / len(found)
            for name in ("harmed_before", "harmed_after", "mean_extra_weight")
        )
        rows.append([*row, f"{before:.1%} → {after:.1%}, {extra:.2f}"])
    header = ["arm", "test loss", "against base, pair by pair", "seeds better", "loss against base"]
    return [*header, "samples, or tokens, harmed; mean extra weight"], rows


def layer_table(rows: list[dict[str, Any]]) -> Table:
    """Mean correlations over the measured steps of each phase."""
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    lines = []
    for part in dict.fromkeys(row["part"] for row in rows):
        own = [row for row in rows if row["part"] == part]
        several = [[r["correlation"] for r in own if r["phase"] == phase] for phase in phases]
        lines.append([part, *(f"{sum(each) / len(each):.2f}" for each in several)])
    return ["measured in", *phases], lines


def price_table(rows: list[dict[str, Any]]) -> Table:
    lines = [
        [
            *(row["adapters"], row["measured in"], f"{row['operations']:+.1%}"),
            "{:.2f} ({:.2f} to {:.2f})".format(*row["time"]),
        ]
        for row in rows
    ]
    return ["adapters", "measured in", "operations", "time of a step, ×"], lines


def _write(report: Report, content: dict[str, Any]) -> None:
    report.write(
        content,
        loss_table(content["runs"]),
        layer_table(content["layers"]),
        price_table(content["price"]),
        f"Learning rate {content['rate']:g}. {describe(content['environment'])}.",
    )


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("lora.py", __doc__)
    add = parser.add_argument
    add("--text", type=Path, required=True, help="text file for pretraining")
    add("--pretraining", type=int, default=1000, metavar="STEPS")
    add("--steps", type=int, default=200, help="adaptation steps (default: 200)")
    add("--seeds", type=positive, default=5, help="seeds per arm (default: 5)")
    add("--rates", type=float, nargs="+", default=RATES, help="learning rates to choose from")
    add("--test-rows", type=int, default=384, help="held-out sequences (default: 384)")
    add("--seconds", type=float, default=6, help="time budget for each set of adapters")
    add("--layers-only", action="store_true", help="only measure layers; keep other results")
    args = parser.parse_args(argv)
    with use_threads(1):
        versions = {"peft": peft.__version__, "transformers": transformers.__version__}
        sizes = {"pretraining": args.pretraining, "steps": args.steps}
        report = Report("lora.py", argv, args.out, **versions, **sizes)
        base = pretrained(Text(args.text.read_text()), args.pretraining)
        text = Text("\n".join(topics[name] for name in sorted(topics)))
        start = loss_on(base, text, args.test_rows)
        print(f"test loss before adapting {start:.4f}", flush=True)
        if args.layers_only:
            content = json.loads(args.out.read_text())
            several = [which_layer(base, text, content["rate"], k, args) for k in LAYER_SEEDS]
            content["layers"] = [row for rows in several for row in rows]
            _write(report, content | {"environment_of_layers": report.finish()})
            report.show()
            return 0
        tuning = [
            train(base, text, None, rate, seed, args)
            for rate in args.rates
            for seed in TUNING_SEEDS
        ]
        means = {
            rate: fmean(run["loss"] for run in tuning if run["rate"] == rate) for rate in args.rates
        }
        rate = min(means, key=lambda each: means[each])
        print({each: round(mean, 4) for each, mean in means.items()}, flush=True)
        layers = [row for seed in LAYER_SEEDS for row in which_layer(base, text, rate, seed, args)]
        costs = price(base, text, rate, args)
        runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        content = {"environment": report.record, "start": start, "rate": rate, "tuning": tuning}
        content |= {"runs": runs, "layers": layers, "price": costs}
        for seed in range(args.seeds):
            for arm, settings in ARMS.items():
                runs[arm].append(train(base, text, settings, rate, seed, args))
                print(arm, runs[arm][-1], flush=True)
            report.finish()
            _write(report, content)  # after each seed: a run that is stopped has results
    report.show()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
