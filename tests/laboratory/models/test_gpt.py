"""The small GPT: causal, as wide as it says, tied where it should be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lab.models import GPT


def model(**options: object) -> GPT:
    torch.manual_seed(0)
    return GPT(11, 6, width=8, depth=2, heads=2, **options)  # type: ignore[arg-type]


def test_a_token_sees_nothing_of_what_follows() -> None:
    net, tokens = model().eval(), torch.randint(11, (3, 6))
    before = net(tokens)
    assert before.shape == (3, 6, 11)
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    after = net(changed)
    torch.testing.assert_close(after[:, :4], before[:, :4], rtol=0, atol=0)
    assert (after[:, 4:] != before[:, 4:]).any(dim=2).all()


def test_attention_is_that_of_the_formula() -> None:
    block, hidden = model().blocks[0], torch.randn(2, 5, 8)
    split = block.query_key_value(block.attention_norm(hidden)).chunk(3, dim=-1)
    query, key, value = (part.view(2, 5, 2, 4).transpose(1, 2) for part in split)
    scores = (query @ key.transpose(2, 3) / 2.0).masked_fill(
        torch.ones(5, 5).triu(1).bool(), -torch.inf
    )
    mixed = (scores.softmax(3) @ value).transpose(1, 2).reshape(2, 5, 8)
    expected = hidden + block.project(mixed)
    expected = expected + block.mlp_project(nn.functional.gelu(block.mlp(block.mlp_norm(expected))))
    torch.testing.assert_close(block(hidden), expected)


def test_tied_or_not() -> None:
    tied, untied = model(tied=True), model()
    assert tied.head.weight is tied.token.weight
    assert untied.head.weight is not untied.token.weight
    count = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert count == 11 * 8


def test_first_loss_is_that_of_guessing() -> None:
    logits = model()(torch.randint(11, (8, 6)))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(11, (48,)))
    assert loss.item() == pytest.approx(torch.tensor(11.0).log().item(), abs=0.05)


def test_dropout_is_for_training() -> None:
    net, tokens = model(dropout=0.5), torch.randint(11, (1, 6))
    assert not torch.equal(net(tokens), net(tokens))
    net.eval()
    assert torch.equal(net(tokens), net(tokens))


def test_heads_divide_the_width() -> None:
    with pytest.raises(ValueError, match="heads must divide the width 8, got 3"):
        GPT(11, 6, width=8, heads=3)
