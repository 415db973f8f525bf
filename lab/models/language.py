"""Language models by name, and a user's own by import path."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lab.models.gpt import GPT
from lab.models.registry import ModelError, call_factory, find_factory


class TransformersGPT2(nn.Module):
    """Transformers' GPT-2 with a tied head, from a configuration; maps tokens to logits."""

    def __init__(
        self, vocabulary: int, length: int, *, width: int, depth: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError as error:
            raise ModelError(f"gpt2-nano needs transformers: {error}; install it") from error
        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=length,
            n_embd=width,
            n_layer=depth,
            n_head=heads,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
        self.model = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        head: nn.Module = self.model.lm_head
        return head

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] -> logits [B, T, vocabulary]."""
        made: Any = self.model(tokens)
        logits: Tensor = made.logits
        return logits


# From vocabulary size and sequence length; all have 4 heads.
LANGUAGE_MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "gpt-nano": partial(GPT, width=64, depth=2),
    "gpt-nano-tied": partial(GPT, width=64, depth=2, tied=True),
    "gpt-micro": GPT,  # 3 layers, width 96
    "gpt2-nano": partial(TransformersGPT2, width=64, depth=2, heads=4, dropout=0.1),
}


def build_language_model(name: str, vocabulary: int, length: int, *, seed: int = 0) -> nn.Module:
    """A model by name, or `package.module:factory`, called as `factory(vocabulary=, length=)`.

    Args:
        name: A key of `LANGUAGE_MODELS`, or an import path, also of modules in the working
            directory.
        vocabulary: Size of the vocabulary.
        length: Tokens per sequence.
        seed: Seed of the initialisation.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return find_language_model(name)(vocabulary, length)


def find_language_model(name: str) -> Callable[[int, int], nn.Module]:
    """A function from vocabulary and length to a model; raises for an unknown name."""
    if ":" in name:
        factory = find_factory(name)
        return lambda vocabulary, length: call_factory(
            factory, name, {"vocabulary": vocabulary, "length": length}
        )
    if name not in LANGUAGE_MODELS:
        raise ModelError(
            f"unknown language model {name!r}; choose from {', '.join(LANGUAGE_MODELS)}, "
            "or pass your own as package.module:factory"
        )
    return LANGUAGE_MODELS[name]
