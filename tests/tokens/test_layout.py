"""`per="auto"`: tokens where every position has a loss, samples elsewhere; decided once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.profiler import profile

import primum
from loops import SGD, assert_close, batch, gradients, make, report_of, train
from primum.kernel.recipe import Primum
from primum.paper import Paper, PaperSettings
from primum.tokens.layout import BLOCK, Granularity, seen_in

ROWS, LENGTH, WIDTH, CLASSES = 6, 9, 5, 7
FAR = torch.arange(ROWS)

Loss = Callable[[Tensor], Tensor]


def labels(*shape: int) -> Tensor:
    return torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(1))


def masked(share: float, least: int = 0) -> Loss:
    """Cross-entropy at some positions; of the first sequence, `least` at least."""
    rng = torch.Generator().manual_seed(2)
    ignored = torch.rand(ROWS, LENGTH, generator=rng) > share
    ignored[0, :least] = False
    targets = labels(ROWS, LENGTH).masked_fill(ignored, -100)
    return lambda logits: F.cross_entropy(logits.transpose(1, 2), targets)


def answers(*lengths: int) -> Loss:
    """Prompts are ignored, and so is all but the last few positions."""
    targets = labels(ROWS, LENGTH)
    for row, length in enumerate(lengths):
        targets[row, : LENGTH - length] = -100
    return lambda logits: F.cross_entropy(logits.transpose(1, 2), targets)


def attention(logits: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, LENGTH).softmax(0).to(logits)
    return F.cross_entropy((logits * weights[:, None]).sum(1), labels(ROWS))


def mean_of_some(logits: Tensor) -> Tensor:
    """Padding is left out of the mean."""
    counts = torch.arange(LENGTH) < 3 + torch.arange(ROWS)[:, None]
    pooled = (logits * counts[..., None]).sum(1) / counts.sum(1, keepdim=True)
    return F.cross_entropy(pooled, labels(ROWS))


def answer_of_a_question(logits: Tensor) -> Tensor:
    start, end, *_ = logits.unbind(-1)
    places = labels(ROWS)
    return F.cross_entropy(start, places) + F.cross_entropy(end, (places + 1) % LENGTH)


def long_text(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels(ROWS * LENGTH))


TOKENS: dict[str, Loss] = {
    "language model": long_text,
    "a sum": lambda logits: long_text(logits) * ROWS * LENGTH,
    "label smoothing": lambda logits: F.cross_entropy(
        logits.transpose(1, 2), labels(ROWS, LENGTH), label_smoothing=0.1
    ),
    "the last position has no target": lambda logits: F.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels(ROWS, LENGTH - 1)
    ),
    "masked language model": masked(0.15, least=2),
    "few are masked": masked(0.05, least=2),
    "answers after a prompt": answers(1, 1, 2, 1, 1, 1),
    "regression at each position": lambda logits: logits[..., 0].square().mean(),
    "targets far from zero": lambda logits: (
        (logits[..., 0] - 5 - labels(ROWS, LENGTH)).square().mean()
    ),
    "one class or the other": lambda logits: F.cross_entropy(
        logits[..., :2].transpose(1, 2), labels(ROWS, LENGTH) % 2
    ),
    "a mean over positions for each sequence, then over sequences": lambda logits: (
        F.cross_entropy(logits.transpose(1, 2), labels(ROWS, LENGTH), reduction="none")
        .mean(1)
        .mean()
    ),
}
SAMPLES: dict[str, Loss] = {
    "the first position": lambda logits: F.cross_entropy(logits[:, 0], labels(ROWS)),
    "the last word, wherever it is": lambda logits: F.cross_entropy(
        logits[FAR, FAR % LENGTH], labels(ROWS)
    ),
    "answers of one token": answers(*[1] * ROWS),
    "mean of the logits": lambda logits: F.cross_entropy(logits.mean(1), labels(ROWS)),
    "mean without padding": mean_of_some,
    "mean of one output": lambda logits: logits[..., :1].mean(1).square().mean(),
    "weighted mean": attention,
    "maximum of the logits": lambda logits: F.cross_entropy(logits.amax(1), labels(ROWS)),
    "a place in the sequence": answer_of_a_question,
}


def gradient_of(loss: Loss, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, LENGTH, CLASSES, generator=rng).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logits), logits)
    return (scale * gradient).to(dtype)


class TestSeen:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
    @pytest.mark.parametrize(
        ("loss", "expected"),
        [(loss, "token") for loss in TOKENS.values()]
        + [(loss, "sample") for loss in SAMPLES.values()],
        ids=[*TOKENS, *SAMPLES],
    )
    def test_losses(self, loss: Loss, expected: str, dtype: torch.dtype, scale: float) -> None:
        assert seen_in(gradient_of(loss, dtype, scale)) == expected

    def test_ctc_looks_like_tokens(self) -> None:
        """What cannot be seen: one loss per sequence, whose rows are like a language model's."""
        targets, ends = labels(ROWS, 3).clamp_min(1), torch.full((ROWS,), LENGTH)
        gradient = gradient_of(
            lambda logits: F.ctc_loss(
                logits.log_softmax(-1).transpose(0, 1), targets, ends, torch.full((ROWS,), 3)
            )
        )
        assert seen_in(gradient) == "token"

    @pytest.mark.parametrize("loss", [TOKENS["language model"], SAMPLES["weighted mean"]])
    def test_block_by_block(self, loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = seen_in(gradient_of(loss))
        monkeypatch.setattr("primum.tokens.layout.BLOCK", 2 * ROWS * LENGTH)
        assert BLOCK > ROWS * LENGTH * CLASSES
        assert seen_in(gradient_of(loss)) == expected

    def test_one_value_is_read(self) -> None:
        """Once in a run: no more is asked of an accelerator."""
        gradient = gradient_of(long_text)
        with profile() as profiled:
            seen_in(gradient)
        names = [each.name for each in profiled.events() or ()]
        assert "aten::aminmax" in names
        assert names.count("aten::_local_scalar_dense") == 1
        assert not {"aten::nonzero", "aten::masked_select", "aten::equal"} & {*names}

    @pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
    def test_nothing_to_see(self, value: float) -> None:
        gradient = gradient_of(long_text)
        assert seen_in(gradient.fill_(value)) is None
        assert seen_in(torch.ones(3, 1, 4)) is None
        assert seen_in(torch.ones(0, 5, 4)) is None

    def test_a_long_sequence_of_a_trained_model(self) -> None:
        """Rows that are noise around zero do not sum to nothing, however many there are."""
        rng = torch.Generator().manual_seed(0)
        assert seen_in(torch.randn(1, 20_000, 3, generator=rng)) == "token"


class Net(nn.Module):
    """A body on every position, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).tanh())
        return logits


def inputs(*shape: int, number: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(10 + number)
    return torch.randn(*shape, WIDTH, generator=rng, dtype=torch.float64)


def attached(**settings: Any) -> tuple[Net, optim.Optimizer, primum.Reducer]:
    model = Net()
    optimizer = optim.SGD(model.parameters(), **SGD)
    return model, optimizer, primum.attach(model, optimizer, **settings)


def step(model: nn.Module, optimizer: optim.Optimizer, loss: Loss, number: int = 0) -> None:
    optimizer.zero_grad()
    loss(model(inputs(ROWS, LENGTH, number=number))).backward()
    optimizer.step()


def radius_of(reducer: primum.Reducer) -> Any:
    return reducer._engine.recipe.radius_of(reducer._layout.per)


class TestDecision:
    @pytest.mark.parametrize(
        ("loss", "per", "radius"), [(long_text, "token", 0.1), (attention, "sample", 0.4)]
    )
    @pytest.mark.parametrize("make_one", [primum.attach, primum.observe])
    @pytest.mark.parametrize("compiled", [False, True])
    def test_as_if_it_had_been_asked_for(
        self, loss: Loss, per: str, radius: float, make_one: Any, compiled: bool
    ) -> None:
        found = []
        for settings in ({}, {"per": per, "radius": radius}):
            model = Net()
            optimizer = optim.SGD(model.parameters(), **SGD)
            reducer = make_one(model, optimizer, **settings)
            net = torch.compile(model, backend="aot_eager") if compiled else model
            for number in range(3):
                step(net, optimizer, loss, number)
            report = report_of(reducer)
            assert (report.per, radius_of(reducer)) == (per, radius)
            assert report.applied == (make_one is primum.attach)
            found.append((list(model.parameters()), report))
        assert all(map(torch.equal, found[0][0], found[1][0]))
        assert torch.equal(found[0][1].extra_weights, found[1][1].extra_weights)
        assert found[0][1].extra_weights.max() > 0.01
        assert len(found[0][1].drift) == (ROWS * LENGTH if per == "token" else ROWS)

    def test_once_for_the_run(self) -> None:
        for first, then, per in ((long_text, attention, "token"), (attention, long_text, "sample")):
            model, optimizer, reducer = attached()
            assert "per='auto'" in repr(reducer)
            for number in range(3):
                step(model, optimizer, then if number else first, number)
                assert report_of(reducer).per == per
                assert f"per='{per}'" in repr(reducer)

    def test_only_the_first_pass_looks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []
        monkeypatch.setattr("primum.tokens.layout.seen_in", lambda g: calls.append(g) or "sample")
        model, optimizer, _ = attached()
        for number in range(3):
            step(model, optimizer, long_text, number)
        assert len(calls) == 1

    @pytest.mark.parametrize("shape", [(12,), (4, 3, 2), (2, 2, 2, 2)])
    def test_rows_and_maps_are_samples(
        self, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Flattened before the head, rows may be tokens already; pixels are not tokens."""
        monkeypatch.setattr("primum.tokens.layout.seen_in", lambda g: pytest.fail("not asked"))
        model, _, reducer = attached()
        model(inputs(*shape)).square().mean().backward()
        assert report_of(reducer).per == "sample"
        assert len(report_of(reducer).extra_weights) == shape[0]
        assert "per='sample'" in repr(reducer)

    def test_one_position_leaves_it_open(self) -> None:
        """[B, 1, d]: samples and tokens are the same, until sequences are longer."""
        model, optimizer, reducer = attached()
        for length, per in ((1, "auto"), (1, "auto"), (3, "token"), (1, "token")):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs(4, length)).flatten(0, 1), labels(4 * length)).backward()
            optimizer.step()
            assert str(reducer._layout) == per
            assert len(report_of(reducer).extra_weights) == 4 * length
            assert report_of(reducer).applied

    @pytest.mark.parametrize("value", [0.0, torch.nan])
    def test_a_gradient_that_shows_nothing_leaves_it_open(self, value: float) -> None:
        model, optimizer, reducer = attached()
        with nullcontext() if value == 0 else pytest.warns(RuntimeWarning, match="not finite"):
            (model(inputs(ROWS, LENGTH)) * value).sum().backward()
        assert str(reducer._layout) == "auto"
        assert len(report_of(reducer).extra_weights) == ROWS
        step(model, optimizer, long_text)  # starts from zero gradients
        assert str(reducer._layout) == "token"

    def test_a_pause_does_not_decide(self) -> None:
        model, optimizer, reducer = attached()
        with reducer.paused():
            step(model, optimizer, attention)
        assert str(reducer._layout) == "auto"
        step(model, optimizer, long_text)
        assert str(reducer._layout) == "token"

    def test_calls_of_one_pass_share_it(self) -> None:
        """Two views: each call is weighed by itself, as decided at the first that arrives."""
        model, _, reducer = attached()
        one, two = inputs(ROWS, LENGTH), inputs(ROWS, LENGTH, number=1)
        with pytest.warns(RuntimeWarning, match="ran more than once in one backward pass"):
            (attention(model(one)) + long_text(model(two))).backward()  # the last call comes first
        assert str(reducer._layout) == "token"
        assert len(report_of(reducer).extra_weights) == ROWS * LENGTH

    def test_one_long_sequence(self) -> None:
        """A batch of one sequence has nothing to trade off; its tokens have."""
        model, _, reducer = attached()
        F.cross_entropy(model(inputs(1, 12))[0], labels(12)).backward()
        assert report_of(reducer).applied
        assert len(report_of(reducer).extra_weights) == 12

    def test_plain_bit_for_bit(self) -> None:
        parameters = []
        for settings in (None, {"radius": 0}, {"radius": 0, "per": "token"}):
            model = Net()
            optimizer = optim.SGD(model.parameters(), **SGD)
            if settings is not None:
                primum.attach(model, optimizer, **settings)
            for number in range(3):
                step(model, optimizer, long_text, number)
            parameters.append(list(model.parameters()))
        assert all(map(torch.equal, parameters[0], parameters[1]))
        assert all(map(torch.equal, parameters[0], parameters[2]))

    def test_images_are_as_before(self) -> None:
        """One row per image: the same as per="sample" with its radius, bit for bit."""
        (one, first), (two, second) = make(), make()
        primum.attach(one, first)
        primum.attach(two, second, per="sample", radius=0.4)
        for net, stepper in ((one, first), (two, second)):
            train(net, stepper, 5)
        assert all(map(torch.equal, one.parameters(), two.parameters()))


class TestRadius:
    @pytest.mark.parametrize(
        ("settings", "before", "after"),
        [
            ({}, 0.4, 0.1),
            ({"per": "token"}, 0.1, 0.1),
            ({"per": "sample"}, 0.4, 0.4),
            ({"radius": 0.3}, 0.3, 0.3),
            ({"radius": 0.2}, 0.2, 0.2),
            ({"radius": 0.3, "per": "token"}, 0.3, 0.3),
            ({"recipe": "paper"}, 0.2, 0.2),
            ({"recipe": "paper", "per": "token"}, 0.2, 0.2),
            ({"recipe": "paper", "radius": 0.3}, 0.3, 0.3),
            ({"recipe": Primum()}, 0.4, 0.1),
            ({"recipe": Primum(radius=0.3), "per": "token"}, 0.3, 0.3),
            ({"recipe": Paper(PaperSettings(radius=0.3))}, 0.3, 0.3),
        ],
        ids=lambda value: str(value).partition(" object")[0],
    )
    def test_it_follows_unless_given(
        self, settings: dict[str, Any], before: float, after: float
    ) -> None:
        model, optimizer, reducer = attached(**settings)
        assert radius_of(reducer) == before
        step(model, optimizer, long_text)
        assert radius_of(reducer) == after
        assert f"radius={after:g}" in repr(reducer)


class TestExplicitForm:
    @pytest.mark.parametrize(
        ("shape", "per"),
        [((ROWS, LENGTH), "token"), ((ROWS * LENGTH,), "token"), ((ROWS,), "sample")],
    )
    def test_the_shape_of_the_losses_decides(self, shape: tuple[int, ...], per: str) -> None:
        model, optimizer, reducer = attached()
        other, stepper, hooked = attached(per=per)
        for number in range(3):
            for net in (model, other):
                net.zero_grad()
                logits = net(inputs(ROWS, LENGTH, number=number))
                losses = F.cross_entropy(
                    logits.flatten(0, 1), labels(ROWS * LENGTH), reduction="none"
                )
                losses = losses.view(ROWS, LENGTH)
                losses = losses.view(shape) if per == "token" else losses.mean(1)
                (reducer(losses) if net is model else losses.mean()).backward()
            assert_close(gradients(model), gradients(other), 1e-12)
            optimizer.step()
            stepper.step()
        assert report_of(reducer).per == report_of(hooked).per == per
        assert radius_of(reducer) == radius_of(hooked)

    @pytest.mark.parametrize("shape", [(ROWS, 3, 2), (ROWS * 6,), (ROWS,)])
    def test_pixels_are_not_tokens(self, shape: tuple[int, ...]) -> None:
        """[B, H, W, d]: weights for samples, as by the hook, also from the loss of each pixel."""
        model, optimizer, reducer = attached()
        other, stepper, hooked = attached()
        for number in range(3):
            for net in (model, other):
                net.zero_grad()
                logits = net(inputs(ROWS, 3, 2, number=number))
                losses = F.cross_entropy(logits.flatten(0, 2), labels(ROWS * 6), reduction="none")
                losses = losses.view(ROWS, -1).mean(1) if shape == (ROWS,) else losses.view(shape)
                (reducer(losses) if net is model else losses.mean()).backward()
            assert_close(gradients(model), gradients(other), 1e-12)
            torch.testing.assert_close(
                report_of(reducer).extra_weights, report_of(hooked).extra_weights
            )
            optimizer.step()
            stepper.step()
        assert report_of(reducer).per == report_of(hooked).per == "sample"
        assert report_of(reducer).extra_weights.max() > 0.01
        assert report_of(reducer).fallbacks == 0

    def test_pixels_are_tokens_if_asked_for(self) -> None:
        model, _, reducer = attached(per="token")
        reducer(model(inputs(ROWS, 3, 2)).square().mean(-1)).backward()
        assert len(report_of(reducer).extra_weights) == ROWS * 6

    def test_of_one_output_per_class_they_are_not(self) -> None:
        model, _, reducer = attached()
        losses = model(inputs(ROWS)).square()
        with pytest.raises(ValueError, match=f"saw {ROWS} samples, but there are {losses.numel()}"):
            reducer(losses)
        assert str(reducer._layout) == "auto"

    def test_after_the_decision_they_have_to_fit(self) -> None:
        model, optimizer, reducer = attached()
        step(model, optimizer, attention)
        with pytest.raises(ValueError, match='or pass per="token"'):
            reducer(model(inputs(ROWS, LENGTH)).square().mean(-1))


class TestState:
    @pytest.mark.parametrize(("loss", "per"), [(long_text, "token"), (attention, "sample")])
    def test_a_resumed_run_keeps_the_decision(
        self, loss: Loss, per: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, optimizer, reducer = attached()
        step(model, optimizer, loss)
        saved = reducer.state_dict()
        assert saved["per"] == per
        caplog.clear()
        other, stepper, resumed = attached()
        resumed.load_state_dict(saved)
        assert (str(resumed._layout), radius_of(resumed)) == (per, radius_of(reducer))
        step(other, stepper, attention if per == "token" else long_text)
        assert report_of(resumed).per == per
        assert not caplog.records

    def test_open_questions_stay_open(self) -> None:
        saved = attached()[2].state_dict()
        assert saved["per"] == "auto"
        model, optimizer, resumed = attached()
        resumed.load_state_dict(saved)
        step(model, optimizer, long_text)
        assert report_of(resumed).per == "token"

    def test_what_was_asked_for_wins(self) -> None:
        model, optimizer, reducer = attached()
        step(model, optimizer, long_text)
        _kept, _, other = attached(per="sample", radius=0.3)
        other.load_state_dict(reducer.state_dict())
        assert (str(other._layout), radius_of(other)) == ("sample", 0.3)


def said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if each.module == "layout"]


class TestSaid:
    def test_tokens(self, caplog: pytest.LogCaptureFixture) -> None:
        """A line that shows without any setup of logging, once."""
        model, optimizer, reducer = attached()
        for number in range(3):
            step(model, optimizer, long_text, number)
        (record,) = said(caplog)
        assert (record.name, record.levelno) == ("primum", logging.WARNING)
        assert record.getMessage().startswith(
            "primum: reweighting tokens ([6, 9] positions at head 'head', each with a loss), "
            "radius 0.1; pass per='token' to silence this"
        )
        assert "tokens harmed by a step" in reducer.summary_text()

    def test_samples(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "primum")
        model, optimizer, reducer = attached()
        step(model, optimizer, attention)
        (record,) = said(caplog)
        assert record.levelno == logging.INFO
        assert "reweighting samples, radius 0.4: head 'head' has [6, 9]" in record.getMessage()
        assert "samples harmed by a step" in reducer.summary_text()

    @pytest.mark.parametrize("per", ["sample", "token"])
    def test_not_if_asked_for(self, per: str, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "primum")
        model, optimizer, _ = attached(per=per)
        step(model, optimizer, long_text)
        assert not said(caplog)

    def test_not_where_there_is_no_choice(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "primum")
        model, optimizer = make()
        primum.attach(model, optimizer)
        train(model, optimizer, 2)
        assert not said(caplog)


class TestVotes:
    @pytest.mark.parametrize(
        ("votes", "per"),
        [
            ([0], "auto"),
            ([0, 0], "auto"),
            ([1], "sample"),
            ([2], "token"),
            ([1, 2, 0], "token"),
            ([0, 1], "sample"),
            ([2, 3], "sample"),  # the second has decided, as one that ran alone before
            ([4, 1], "token"),
        ],
    )
    def test_all_decide_alike(self, votes: list[int], per: str) -> None:
        own = Granularity("auto", "head")
        own.settle(votes, Primum())
        assert str(own) == per

    def test_what_a_rank_contributes(self) -> None:
        own = Granularity("auto", "head", says=False)
        text, pooled = gradient_of(long_text), gradient_of(attention)
        assert [own.look([each], None) for each in (text, pooled, 0 * text)] == [2, 1, 0]
        assert own.look([text], "sample") == 1  # the losses of the explicit form say it
        own.settle([1], Primum())
        assert own.look([text], None) == 3
        assert Granularity("token", "head").look([pooled], None) == 4

    def test_one_that_had_decided_otherwise_follows(self) -> None:
        own = Granularity("auto", "head", says=False)
        own.settle([1], Primum())
        own.settle([4, 3], Primum())
        assert own.per == "token"

    def test_one_process_speaks_for_all(self, caplog: pytest.LogCaptureFixture) -> None:
        for says in (False, True):
            own = Granularity("auto", "head", says=says)
            own.look([gradient_of(long_text)], None)
            own.settle([2, 2], Primum())
            assert len(caplog.records) == says


def test_batches_of_the_loops_have_a_choice() -> None:
    """What the other tests pass `per="sample"` for."""
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    given, targets = batch(0, 6, 5)
    F.cross_entropy(model(given).transpose(1, 2), targets).backward()
    assert report_of(reducer).per == "token"
