"""What the tests of fused losses share: a small language model, batches, both losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import ADAMW, SGD, stir
from primum import Reducer

WORDS, WIDTH, ROWS, TOKENS = 37, 8, 6, 9
IGNORED = -100

OPTIMIZERS = {"SGD": (optim.SGD, SGD), "AdamW": (optim.AdamW, ADAMW), "other": (optim.Rprop, {})}


class Language(nn.Module):
    """Gives hidden states; the head is there, but called only by `forward`."""

    def __init__(self, words: int, width: int, *, bias: bool, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, words: Tensor) -> Tensor:
        return torch.tanh(self.body(self.embedding(words)))

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.hidden(words))


class Run:
    """A model with its optimizer and reducer; the same one for the same arguments."""

    def __init__(
        self,
        kind: str = "AdamW",
        *,
        words: int = WORDS,
        width: int = WIDTH,
        bias: bool = True,
        tied: bool = False,
        dtype: torch.dtype = torch.float64,
        per: str = "token",
        attach: Any = primum.attach,
        options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = Language(words, width, bias=bias, tied=tied).to(dtype)
        make, defaults = OPTIMIZERS[kind]
        self.optimizer = make(self.model.parameters(), **(defaults | (options or {})))
        self.words, self.per = words, per
        if settings.get("recipe", "primum") == "primum":
            # The solver converges: otherwise rounding may decide between iterates that are as good.
            settings = {"radius": 0.2, "tolerance": 0.0} | settings
        self.reducer: Reducer = attach(self.model, self.optimizer, head="head", per=per, **settings)

    def batch(self, number: int, rows: int = ROWS, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
        """Words and the next ones; some of these do not count."""
        rng = torch.Generator().manual_seed(number)
        text = torch.randint(self.words, (rows, tokens + 1), generator=rng)
        targets = text[:, 1:].clone()
        targets[0, : tokens // 3] = IGNORED
        return text[:, :-1], targets

    def called(self, inputs: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """The reference: the head is called, and its hook weighs."""
        loss = F.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten(), **options)
        return loss.view(targets.shape) if options.get("reduction") == "none" else loss

    def fused(self, inputs: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return self.reducer.linear_cross_entropy(self.model.hidden(inputs), targets, **options)

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def warm_up(self) -> None:
        """A step, and then a history that pushes anywhere: the next one harms."""
        with self.reducer.paused():
            self.called(*self.batch(100)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        stir(self.optimizer)


def pair(kind: str = "AdamW", **options: Any) -> tuple[Run, Run]:
    """One whose head is called and one whose loss is fused."""
    runs = Run(kind, **options), Run(kind, **options)
    for run in runs:
        run.warm_up()
    return runs
