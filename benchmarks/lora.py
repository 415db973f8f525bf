"""Does reweighting help when a language model is adapted by LoRA? And where to measure?

A small Llama is trained on the characters of one text (the King James Bible); then its weights are
frozen, head included, and PEFT's LoRA adapts it to another, the Python language reference
(`pydoc_data.topics`). The learning rate is the best one for plain training, on seeds of its own.

    apt-get install bible-kjv; bible -f 'Gen1:1-Rev22:21' > kjv.txt
    python benchmarks/lora.py --text kjv.txt           # a few minutes on one core

Three tables: test loss by arm; which layer's interference is most like that of all adapters; and
what a step costs.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from time import perf_counter, process_time
from typing import Any

import peft
import torch
import transformers
from _common import (
    RESULTS,
    describe,
    environment,
    finish,
    markdown_table,
    median,
    positive,
    ratio_of_medians,
    take_turns,
    use_threads,
    write_json,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn, optim
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import primum
from primum.experiments.files import write_text
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
    """Characters as numbers, the last tenth for testing."""

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
    """A frozen copy with LoRA of rank 8 on every linear layer but the head."""
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
    """How each layer's drift follows that of all adapters, sample by sample, in plain training.

    For the two matrices of the last adapter also the harm over all adapters, as it is and as the
    weights measured there would leave it.
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
    """Extra weights of the samples, measured in a layer; nothing is changed but `.grad`."""
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
    """By how much the step on weighted losses, really made on copies, changes each loss.

    First order, by parameter. grads [B, ...], weights [B] -> [B].
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
    """The gradient of each sample's own loss. -> [B, ...] for each parameter."""
    each = [
        torch.autograd.grad(model(input_ids=row, labels=row).loss, trained) for row in ids.split(1)
    ]
    return [torch.stack(grads) for grads in zip(*each, strict=True)]


# --- the price ------------------------------------------------------------------------------------


def price(base: nn.Module, text: Text, rate: float, args: Any) -> list[dict[str, Any]]:
    """Operations and time of a step, plain and attached, for two sets of adapters."""
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


def loss_table(runs: dict[str, list[dict[str, Any]]]) -> str:
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
    return markdown_table([*header, "samples, or tokens, harmed; mean extra weight"], rows)


def layer_table(rows: list[dict[str, Any]]) -> str:
    """Correlations, as means over the moments of each phase."""
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    lines = []
    for part in dict.fromkeys(row["part"] for row in rows):
        own = [row for row in rows if row["part"] == part]
        several = [[r["correlation"] for r in own if r["phase"] == phase] for phase in phases]
        lines.append([part, *(f"{sum(each) / len(each):.2f}" for each in several)])
    return markdown_table(["measured in", *phases], lines)


def price_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            *(row["adapters"], row["measured in"], f"{row['operations']:+.1%}"),
            "{:.2f} ({:.2f} to {:.2f})".format(*row["time"]),
        ]
        for row in rows
    ]
    return markdown_table(["adapters", "measured in", "operations", "time of a step, ×"], lines)


def _save(out: Path, content: dict[str, Any]) -> None:
    tables = [loss_table(content["runs"]), layer_table(content["layers"])]
    about = f"Learning rate {content['rate']:g}. {describe(content['environment'])}."
    page = "\n\n".join([*tables, price_table(content["price"]), about])
    write_json(out, content)
    write_text(out.with_suffix(".md"), page + "\n")
    print("\n" + page, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="what the model is pretrained on")
    parser.add_argument("--pretraining", type=int, default=1000, metavar="STEPS")
    parser.add_argument("--steps", type=int, default=200, help="of adapting")
    parser.add_argument("--seeds", type=positive, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--test-rows", type=int, default=384)
    parser.add_argument("--seconds", type=float, default=6, help="of timing, for each set")
    parser.add_argument(
        "--layers-only", action="store_true", help="keep the other results of --out"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "lora.json")
    args = parser.parse_args(argv)
    with use_threads(1):
        about, begin = environment("lora.py", argv), perf_counter()
        about |= {"peft": peft.__version__, "transformers": transformers.__version__}
        about |= {"pretraining": args.pretraining, "steps": args.steps}
        base = pretrained(Text(args.text.read_text()), args.pretraining)
        text = Text("\n".join(topics[name] for name in sorted(topics)))
        start = loss_on(base, text, args.test_rows)
        print(f"test loss before adapting {start:.4f}", flush=True)
        if args.layers_only:
            content = json.loads(args.out.read_text())
            several = [which_layer(base, text, content["rate"], k, args) for k in LAYER_SEEDS]
            content["layers"] = [row for rows in several for row in rows]
            finish(about, perf_counter() - begin)
            _save(args.out, content | {"environment_of_layers": about})
            return 0
        tuning = [
            train(base, text, None, rate, seed, args)
            for rate in args.rates
            for seed in TUNING_SEEDS
        ]
        means = {
            rate: sum(run["loss"] for run in tuning if run["rate"] == rate) for rate in args.rates
        }
        rate = min(means, key=lambda each: means[each])
        print(
            {each: round(total / len(TUNING_SEEDS), 4) for each, total in means.items()}, flush=True
        )
        layers = [row for seed in LAYER_SEEDS for row in which_layer(base, text, rate, seed, args)]
        costs = price(base, text, rate, args)
        runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        content = {"environment": about, "start": start, "rate": rate, "tuning": tuning}
        content |= {"runs": runs, "layers": layers, "price": costs}
        for seed in range(args.seeds):
            for arm, settings in ARMS.items():
                runs[arm].append(train(base, text, settings, rate, seed, args))
                print(arm, runs[arm][-1], flush=True)
            finish(about, perf_counter() - begin)
            _save(args.out, content)  # after each seed: a run that is stopped has results
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
