"""Text scripts of the clients study: a recurrent word model and a small GPT on characters."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from lab.bench._clients import Run, Script, characters, started, words

ATTACH = "primum.attach(model, optimizer)"
PER_SAMPLE = 'primum.attach(model, optimizer, per="sample")'


class Recurrent(nn.Module):
    def __init__(self, size: int, width: int = 64) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(size, width)
        self.rnn = nn.LSTM(width, width)
        self.decoder = nn.Linear(width, size)

    def forward(
        self, text: Tensor, hidden: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.drop(self.encoder(text)), hidden)
        return self.decoder(self.drop(output)), hidden


def word_rnn(run: Run) -> float:
    """Time first, truncated backpropagation, plain SGD with a large rate, clipping."""
    started(run)
    text, batch, length = words(), 20, 35
    model = Recurrent(text.size)
    optimizer = optim.SGD(model.parameters(), lr=5.0)
    run.attach(model, optimizer)

    def columns(stream: Tensor) -> Tensor:
        rows = len(stream) // batch
        return stream[: rows * batch].view(batch, rows).t()

    train, test = columns(text.train), columns(text.test)
    hidden: tuple[Tensor, Tensor] | None = None
    model.train()
    for step in range(run.few(180)):
        start = step * length % (len(train) - length - 1)
        if hidden is not None:
            hidden = (hidden[0].detach(), hidden[1].detach())
        optimizer.zero_grad()
        output, hidden = model(train[start : start + length], hidden)
        targets = train[start + 1 : start + length + 1]
        loss = F.cross_entropy(output.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        output, _ = model(test[:-1], None)
    return float(F.cross_entropy(output.flatten(0, 1), test[1:].flatten()))


class Layer(nn.Module):
    """Attention and a perceptron, with norms before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.ln1(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    """Head and embedding share their weight."""

    def __init__(self, size: int, length: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(size, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Layer(width, 4) for _ in range(layers)))
        self.ln = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, size, bias=False)
        self.wte.weight = self.lm_head.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        place = torch.arange(text.shape[1])
        output: Tensor = self.lm_head(self.ln(self.blocks(self.wte(text) + self.wpe(place))))
        return output


def language_loss(model: nn.Module, windows: Tensor) -> Tensor:
    output = model(windows[:, :-1])
    return F.cross_entropy(output.flatten(0, 1), windows[:, 1:].flatten())


def char_gpt(run: Run) -> float:
    """AdamW with warm-up, cosine schedule and clipping; no decay for vectors."""
    rng, text, length = started(run), characters(), 64
    model = Gpt(text.size, length)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.99))
    run.attach(model, optimizer)
    steps, warm = run.few(200), 20
    model.train()
    for step in range(steps):
        rise = min(1.0, (step + 1) / warm)
        fall = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * rise * fall
        optimizer.zero_grad(set_to_none=True)
        language_loss(model, text.batch(16, length, rng)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        held_out = text.batch(256, length, torch.Generator().manual_seed(0), test=True)
        return float(language_loss(model, held_out))


SCRIPTS = [
    Script("LSTM on words, SGD", "PyTorch examples: word_language_model", word_rnn,
           {PER_SAMPLE: {"per": "sample"}}, seeds=3),
    Script("GPT on characters, AdamW", "nanoGPT", char_gpt,
           {PER_SAMPLE: {"per": "sample"},
            'primum.attach(model, optimizer, per="token", radius=0.2)':
                {"per": "token", "radius": 0.2},
            ATTACH: {}}),
]  # fmt: skip
