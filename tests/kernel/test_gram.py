"""The oracle is G itself, one sample at a time by automatic differentiation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from oracles import captured_head, gradients_of, gram_of, per_sample_gradients
from primum.kernel import gram
from primum.kernel.gram import Dense, MatrixFree, choose_form, operations, sample_blocks

# Sums of at most a few hundred products of numbers of order 1, relative to the largest entry.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5}

# Batch, positions (0: none), inputs, outputs.
SIZES = {
    "usual": (12, 0, 5, 4),
    "one sample": (1, 0, 5, 4),
    "more samples than parameters": (40, 0, 3, 2),
    "one output": (6, 0, 4, 1),
    "sequence": (5, 3, 6, 4),
    "one position": (5, 1, 6, 4),
    "one sequence": (1, 7, 3, 5),
    "more sequences than parameters": (20, 3, 2, 2),
}
GAINS = ("number", "scalar", "by input", "elementwise")


def _cases() -> Iterator[tuple[str, bool, str, torch.dtype]]:
    """Every size with either kind of gain; two of them with everything."""
    for name in SIZES:
        every = name in ("usual", "sequence")
        for bias, gain, dtype in product((True, False), GAINS, TOLERANCE):
            if every or (bias and gain != "scalar" and dtype == torch.float64):
                yield name, bias, gain, dtype


@pytest.fixture(
    params=_cases(), ids=lambda c: f"{c[0]}-{'' if c[1] else 'no '}bias-{c[2]}-{str(c[3])[-2:]}"
)
def case(request: pytest.FixtureRequest) -> tuple[MatrixFree, Tensor]:
    """A head after one backward pass of a real loss, and G."""
    name, *rest = request.param
    return make(SIZES[name], *rest)


@cache
def make(
    sizes: tuple[int, int, int, int], bias: bool, gain_kind: str, dtype: torch.dtype
) -> tuple[MatrixFree, Tensor]:
    batch, positions, inputs, outputs = sizes
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)
    shape = (batch, positions, inputs) if positions else (batch, inputs)
    x = torch.randn(shape, dtype=torch.float64)
    if outputs == 1:
        targets = torch.randn((*shape[:-1], 1), dtype=torch.float64)
        loss = nn.functional.mse_loss
    else:
        targets = torch.randint(outputs, shape[:-1])
        loss = nn.functional.cross_entropy
    explicit = per_sample_gradients(linear, x, targets, loss)
    head = captured_head(linear, x, targets, loss)
    gains: dict[str, Tensor | float] = {
        "number": 1.9,
        "scalar": torch.tensor(0.3, dtype=dtype),
        "by input": (10 ** torch.empty(1, explicit.shape[2]).uniform_(-2, 2)).to(dtype),
        "elementwise": (10 ** torch.empty(explicit.shape[1:]).uniform_(-2, 2)).to(dtype),
    }
    head = MatrixFree(head.features.to(dtype), head.output_gradients.to(dtype), gains[gain_kind])
    return head, explicit


def blocks_of(width: int, features: Tensor, output_gradients: Tensor) -> Iterator[slice]:
    outputs = output_gradients.shape[-1]
    return (slice(i, min(i + width, outputs)) for i in range(0, outputs, width))


def close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert (got.double() - expected).abs().max() <= TOLERANCE[got.dtype] * expected.abs().max()


def double(gain: Tensor | float) -> Tensor | float:
    return gain.double() if isinstance(gain, Tensor) else gain


def test_captured_factors_are_the_gradients(case):
    head, explicit = case
    close(gradients_of(head).to(head.features.dtype), explicit)


def test_matrix(case):
    head, explicit = case
    close(head.dense().matrix, gram_of(explicit, double(head.gain)))


def test_diagonal(case):
    head, explicit = case
    expected = gram_of(explicit, double(head.gain)).diagonal()
    close(head.diagonal, expected)
    close(head.dense().diagonal, expected)


def test_products(case):
    head, explicit = case
    vector = torch.randn(len(explicit), dtype=head.features.dtype)
    expected = gram_of(explicit, double(head.gain)) @ vector.double()
    for form in (head.dense(), head):
        close(form.times(vector), expected)


def test_along(case):
    head, explicit = case
    displacement = torch.randn(explicit.shape[1:], dtype=head.features.dtype)
    close(head.along(displacement), explicit.flatten(1) @ displacement.double().flatten())


def test_summing_over_positions_first_would_be_wrong(rng):
    """Design, section 3: a sequence's gradient is a sum of outer products, not the reverse."""
    x, g = (torch.randn(4, 3, n, generator=rng, dtype=torch.float64) for n in (5, 2))
    right, wrong = MatrixFree(x, g, 1.0), MatrixFree(x.sum(1), g.sum(1), 1.0)
    close(right.dense().matrix, gram_of(gradients_of(right), 1.0))
    assert (wrong.dense().matrix - right.dense().matrix).norm() > 0.1 * right.dense().matrix.norm()


def test_the_bias_is_a_column_of_ones_not_the_identity(rng):
    """The paper prints `x x' + I` (App. B); G has the all-ones matrix there."""
    x, g = (torch.randn(6, n, generator=rng, dtype=torch.float64) for n in (3, 2))
    head = MatrixFree(nn.functional.pad(x, (0, 1), value=1.0), g, 1.0)
    linear = nn.Linear(3, 2, dtype=torch.float64)
    # A loss with these gradients: linear in the outputs, times B because rows of G hold 1 / B.
    explicit = per_sample_gradients(linear, x, 6 * g, lambda out, target: out @ target)
    close(head.dense().matrix, gram_of(explicit, 1.0))
    printed = (x @ x.t() + torch.eye(6)) * (g @ g.t())
    assert (printed - head.dense().matrix).norm() > 0.1 * head.dense().matrix.norm()


@pytest.mark.parametrize("width", [1, 2, 3, 100])
def test_blocks_change_nothing(case, width, monkeypatch):
    """From one output at a time to all of them at once."""
    head, explicit = case
    monkeypatch.setattr(gram, "sample_blocks", partial(blocks_of, width))
    again = MatrixFree(head.features, head.output_gradients, head.gain)  # nothing is cached
    expected = gram_of(explicit, double(head.gain))
    close(again.dense().matrix, expected)
    close(again.diagonal, expected.diagonal())


def test_blocks_cover_all_outputs_once():
    for batch, inputs, outputs in ((6, 5, 16), (512, 1025, 1000), (2, 1 << 20, 3)):
        x, g = torch.empty(batch, inputs, device="meta"), torch.empty(batch, outputs, device="meta")
        blocks = list(sample_blocks(x, g))
        assert [i for rows in blocks for i in range(rows.start, rows.stop)] == list(range(outputs))


def test_blocks_bound_the_memory():
    """No block holds more than 4 MiB or a sixteenth of what backward holds, or one output."""
    for batch, inputs, outputs in ((6, 5, 16), (512, 1025, 1000), (64, 4096, 32_000), (2, 9**7, 3)):
        x, g = torch.empty(batch, inputs, device="meta"), torch.empty(batch, outputs, device="meta")
        widest = max(rows.stop - rows.start for rows in sample_blocks(x, g))
        most = max(2**20, (batch * outputs + inputs * outputs) / 16)
        assert widest == 1 or widest * batch * inputs <= most
        assert widest == outputs or (widest + 1) * batch * inputs > most  # and no smaller


def test_what_is_formed_is_one_block_at_a_time(monkeypatch):
    head, _ = make((6, 0, 5, 16), True, "elementwise", torch.float64)
    monkeypatch.setattr(gram, "sample_blocks", partial(blocks_of, 4))
    assert [block.shape for block in head.by_output()] == [(6, 4 * 6)] * 4


def test_nothing_is_modified(case):
    head, explicit = case
    kept = [t.clone() for t in (head.features, head.output_gradients)]
    gain = head.gain.clone() if isinstance(head.gain, Tensor) else head.gain
    vector = torch.ones(len(explicit), dtype=head.features.dtype)
    for form in (head.dense(), head):
        form.times(2 * form.times(vector))
    assert all(
        torch.equal(*pair)
        for pair in zip(kept, (head.features, head.output_gradients), strict=True)
    )
    assert (torch.as_tensor(head.gain) == gain).all()


def test_what_factorises():
    uniform = make(SIZES["usual"], True, "scalar", torch.float64)[0]
    sequence = make(SIZES["sequence"], True, "number", torch.float64)[0]
    elementwise = make(SIZES["usual"], True, "elementwise", torch.float64)[0]
    by_input = make(SIZES["usual"], True, "by input", torch.float64)[0]
    assert uniform.factorises
    assert by_input.factorises
    assert not make(SIZES["sequence"], True, "by input", torch.float64)[0].factorises
    assert not by_input.uniform_gain
    assert not sequence.factorises
    assert not elementwise.factorises
    assert sequence.uniform_gain
    assert not elementwise.uniform_gain


# --- the cost model -------------------------------------------------------------------------------


def dense_is_cheaper(batch, inputs, outputs, *, positions=1, products=22, factorises=True) -> bool:
    dense, free = operations(
        batch, positions, inputs, outputs, products=products, factorises=factorises
    )
    return dense <= free


def test_small_batches_are_dense():
    """B = 128 is dense for all heads of the benchmark, as measured in design.md, section 3."""
    for size, uniform in product([(65, 10), (385, 100), (769, 200)], [True, False]):
        assert dense_is_cheaper(32, *size, factorises=uniform)
        assert dense_is_cheaper(128, *size, factorises=True)


def test_large_batches_with_small_heads_are_not():
    assert not dense_is_cheaper(8192, 65, 10)
    assert not dense_is_cheaper(4096, 65, 10, factorises=False)
    assert not dense_is_cheaper(4096, 769, 200, factorises=False)


def test_more_products_never_make_the_matrix_dearer():
    """Its price is paid once: what is dense for few products stays so for more."""
    for batch, size, uniform in product(
        [64, 512, 2048, 8192], [(65, 10), (769, 200)], [True, False]
    ):
        chosen = [
            dense_is_cheaper(batch, *size, products=n, factorises=uniform)
            for n in (1, 4, 16, 64, 256, 1024)
        ]
        if 8 * batch * batch < 4 * batch * size[0] * size[1]:  # else its products are dearer, too
            assert chosen == sorted(chosen)


def test_choose_follows_the_cost_model(monkeypatch):
    calls = []

    def model(*sizes: int, products: int, factorises: bool) -> tuple[int, int]:
        calls.append((sizes, products, factorises))
        return (1, 2) if answer else (2, 1)

    monkeypatch.setattr(gram, "operations", model)
    flat = make((8, 0, 5, 4), True, "elementwise", torch.float64)[0]
    sequence = make((5, 3, 6, 4), False, "number", torch.float64)[0]
    uniform = MatrixFree(flat.features, flat.output_gradients, 1.0)
    for head, answer in product((flat, uniform, sequence), (True, False)):
        assert isinstance(choose_form(head, 22), Dense if answer else MatrixFree)
    assert calls[::2] == [
        ((8, 1, 6, 4), 22, False),
        ((8, 1, 6, 4), 22, True),
        ((5, 3, 6, 4), 22, False),
    ]
