"""`reducer.linear_cross_entropy`: the hook's weights for a head that is never called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import primum
from loops import assert_close, report_of
from words import IGNORED, OPTIMIZERS, ROWS, TOKENS, WORDS, Run, pair

ROUNDING = 1e-9  # in float64, after a solver of a dozen iterations
BLOCKS = pytest.mark.parametrize("chunk_size", [None, 5, 16], ids=["whole", "fives", "sixteens"])


def assert_same(one: Run, other: Run, tolerance: float = ROUNDING) -> None:
    """Weights, drift and gradients of the last pass."""
    expected, found = report_of(one.reducer), report_of(other.reducer)
    assert found.fallbacks == 0, found.reason
    assert found.weighed == expected.weighed
    assert found.approximate == expected.approximate
    for name in ("extra_weights", "drift", "drift_after", "objective", "lower_bound"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=tolerance, atol=tolerance
        )
    assert_close(other.gradients(), one.gradients(), tolerance)


class TestSameAsTheHook:
    @BLOCKS
    @pytest.mark.parametrize("per", ["token", "sample"])
    @pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_over_steps(self, kind: str, bias: bool, per: str, chunk_size: int | None) -> None:
        called, fused = pair(kind, bias=bias, per=per)
        weights = []
        for number in range(3):
            for run, loss in ((called, called.called), (fused, fused.fused)):
                run.optimizer.zero_grad()
                options = {"chunk_size": chunk_size} if run is fused else {}
                found = loss(*run.batch(number), **options)
                found.backward()
            assert_same(called, fused)
            weights.append(report_of(fused.reducer).extra_weights)
            called.optimizer.step()
            fused.optimizer.step()
        assert weights[0].shape == ((ROWS * TOKENS) if per == "token" else ROWS,)
        if (kind, per) != ("other", "sample"):  # nothing pushes there
            assert max(each.max() for each in weights) > 0.01

    @BLOCKS
    @pytest.mark.parametrize(
        "options",
        [
            {"reduction": "sum"},
            {"label_smoothing": 0.2},
            {"ignore_index": 3},
            {"ignore_index": 3, "reduction": "sum", "label_smoothing": 0.1},
        ],
        ids=str,
    )
    def test_options(self, options: dict[str, Any], chunk_size: int | None) -> None:
        called, fused = pair()
        inputs, targets = called.batch(0)
        targets = targets.clamp_min(0)
        expected = called.called(inputs, targets, **options)
        found = fused.fused(inputs, targets, chunk_size=chunk_size, **options)
        torch.testing.assert_close(found, expected)
        expected.backward()
        found.backward()
        assert_same(called, fused)

    @BLOCKS
    def test_a_loss_per_token_that_the_loop_sums(self, chunk_size: int | None) -> None:
        called, fused = pair()
        inputs, targets = called.batch(0)
        share = torch.rand(targets.shape, dtype=torch.float64)
        expected = called.called(inputs, targets, reduction="none")
        found = fused.fused(inputs, targets, reduction="none", chunk_size=chunk_size)
        assert found.shape == targets.shape
        torch.testing.assert_close(found, expected)
        (share * expected).sum().backward()
        (share * found).sum().backward()
        assert_same(called, fused)

    @BLOCKS
    def test_accumulated_gradients_count(self, chunk_size: int | None) -> None:
        called, fused = pair()
        for number in range(3):
            (called.called(*called.batch(number)) / 3).backward()
            (fused.fused(*fused.batch(number), chunk_size=chunk_size) / 3).backward()
            assert_same(called, fused)

    @BLOCKS
    def test_clipping_is_measured(self, chunk_size: int | None) -> None:
        """The factor of the step before enters the prediction of the next one."""
        called, fused = pair("SGD")
        for number in range(3):
            called.called(*called.batch(number)).backward()
            fused.fused(*fused.batch(number), chunk_size=chunk_size).backward()
            assert_same(called, fused)
            for run in (called, fused):
                nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
                run.optimizer.step()
                run.optimizer.zero_grad()
        measured = [run.reducer._rescale.measured for run in (called, fused)]
        assert measured[0] == pytest.approx(measured[1], rel=1e-9)
        assert measured[0] < 0.9

    @BLOCKS
    def test_clipping_of_a_head_without_bias(self, chunk_size: int | None) -> None:
        called, fused = pair("SGD", bias=False)
        for number in range(2):
            called.called(*called.batch(number)).backward()
            fused.fused(*fused.batch(number), chunk_size=chunk_size).backward()
            assert_same(called, fused)
            for run in (called, fused):
                nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
                run.optimizer.step()
                run.optimizer.zero_grad()

    @BLOCKS
    def test_maximising(self, chunk_size: int | None) -> None:
        called, fused = pair("SGD", options={"maximize": True})
        (-called.called(*called.batch(0))).backward()
        (-fused.fused(*fused.batch(0), chunk_size=chunk_size)).backward()
        assert_same(called, fused)

    @BLOCKS
    def test_tied_to_the_embedding(self, chunk_size: int | None) -> None:
        called, fused = pair(bias=False, tied=True)
        called.called(*called.batch(0)).backward()
        fused.fused(*fused.batch(0), chunk_size=chunk_size).backward()
        assert_same(called, fused)

    @BLOCKS
    def test_a_frozen_bias(self, chunk_size: int | None) -> None:
        called, fused = pair()
        for run in (called, fused):
            run.model.head.bias.requires_grad_(False)
        called.called(*called.batch(0)).backward()
        fused.fused(*fused.batch(0), chunk_size=chunk_size).backward()
        assert_same(called, fused)

    @pytest.mark.parametrize("kind", ["SGD", "AdamW"])
    @pytest.mark.parametrize("chunk_size", [None, 100, 257])
    def test_a_large_vocabulary_is_sketched_the_same(
        self, kind: str, chunk_size: int | None
    ) -> None:
        called, fused = pair(kind, words=2000, width=32)
        for run in (called, fused):
            run.reducer.measure_exact = True
        inputs, targets = called.batch(0, 16, 32)
        called.called(inputs, targets).backward()
        fused.fused(inputs, targets, chunk_size=chunk_size).backward()
        assert_same(called, fused)
        one, other = report_of(called.reducer), report_of(fused.reducer)
        assert other.approximate
        assert other.extra_weights.max() > 0.01
        torch.testing.assert_close(other.exact().drift_after, one.exact().drift_after)

    def test_any_leading_shape(self) -> None:
        called, fused = pair()
        inputs, targets = called.batch(0)
        called.called(inputs, targets).backward()
        hidden = fused.model.hidden(inputs).view(2, 3, TOKENS, -1)
        fused.reducer.linear_cross_entropy(hidden, targets.view(2, 3, TOKENS)).backward()
        assert_same(called, fused)

    def test_one_token(self) -> None:
        run = Run()
        hidden = run.model.hidden(torch.tensor(3))
        loss = run.reducer.linear_cross_entropy(hidden, torch.tensor(5))
        torch.testing.assert_close(loss, F.cross_entropy(run.model.head(hidden), torch.tensor(5)))
        with pytest.warns(RuntimeWarning, match="a batch of one sample has nothing to trade off"):
            loss.backward()


class TestTwice:
    @BLOCKS
    def test_two_calls_in_one_pass(self, chunk_size: int | None) -> None:
        """Each is weighed by itself, as under the hook."""
        called, fused = pair()
        (called.called(*called.batch(0)) + called.called(*called.batch(1))).backward()
        one = fused.fused(*fused.batch(0), chunk_size=chunk_size)
        (one + fused.fused(*fused.batch(1), chunk_size=chunk_size)).backward()
        assert_same(called, fused)

    @BLOCKS
    def test_the_same_hidden_states_twice(self, chunk_size: int | None) -> None:
        called, fused = pair()
        inputs, targets = called.batch(0)
        others = targets.roll(1, 0)
        hidden = called.model.hidden(inputs)
        losses = [
            F.cross_entropy(called.model.head(hidden).flatten(0, 1), each.flatten())
            for each in (targets, others)
        ]
        sum(losses).backward()
        hidden = fused.model.hidden(inputs)
        losses = [
            fused.reducer.linear_cross_entropy(hidden, each, chunk_size=chunk_size)
            for each in (targets, others)
        ]
        sum(losses).backward()
        assert_same(called, fused)

    @BLOCKS
    def test_a_graph_used_twice(self, chunk_size: int | None) -> None:
        run = Run()
        run.warm_up()
        loss = run.fused(*run.batch(0), chunk_size=chunk_size)
        loss.backward(retain_graph=True)
        first = run.gradients()
        run.optimizer.zero_grad()
        with run.reducer.paused():
            loss.backward()
        assert_close(first, plain_gradients(run, 0), 10)  # weighted ones: another length
        assert_close(run.gradients(), plain_gradients(run, 0), ROUNDING)

    def test_no_second_derivative(self) -> None:
        run = Run()
        loss = run.fused(*run.batch(0))
        with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
            loss.backward(create_graph=True)


def plain_gradients(run: Run, number: int) -> list[Tensor]:
    """Of the plain loss at the model's present parameters."""
    params = list(run.model.parameters())
    with run.reducer.paused():
        return list(torch.autograd.grad(run.called(*run.batch(number)), params))


class TestPlain:
    """Where no weights are applied, the gradients are those of the loss, bit for bit the same."""

    @BLOCKS
    @pytest.mark.parametrize("how", ["radius=0", "observe", "enabled", "paused", "removed"])
    def test_plain_gradients(self, how: str, chunk_size: int | None) -> None:
        options: dict[str, Any] = {}
        if how == "radius=0":
            options["radius"] = 0
        elif how == "observe":
            options["attach"] = primum.observe
        run = Run(**options)
        run.warm_up()
        run.reducer.enabled = how != "enabled"
        if how == "removed":
            run.reducer.remove()
        loss = run.fused(*run.batch(0), chunk_size=chunk_size)
        if how == "paused":
            with run.reducer.paused():
                loss.backward()
        else:
            loss.backward()
        found = run.gradients()
        assert_close(found, plain_gradients(run, 0), 1e-14)
        if how in ("radius=0", "observe"):
            assert report_of(run.reducer).drift.max() > 0  # measured
            assert run.reducer._monitor._spent > 0  # which takes time
            run.optimizer.zero_grad()
            with run.reducer.paused():
                run.fused(*run.batch(0), chunk_size=chunk_size).backward()
            for one, other in zip(found, run.gradients(), strict=True):
                assert torch.equal(one, other)

    @pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 and later")
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_torchs_own_operation(self, reduction: str) -> None:
        run = Run(radius=0, words=2000, width=16)
        inputs, targets = run.batch(0, 16, 32)
        hidden = run.model.hidden(inputs).detach().flatten(0, 1).requires_grad_()
        head, share = run.model.head, torch.rand(hidden.shape[0], dtype=torch.float64)

        def gradients(loss: Tensor) -> tuple[Tensor, ...]:
            loss = loss @ share if reduction == "none" else loss
            return torch.autograd.grad(loss, [hidden, head.weight, head.bias])

        expected = F.linear_cross_entropy(
            hidden,
            head.weight,
            targets.flatten(),
            linear_bias=head.bias,
            ignore_index=IGNORED,
            reduction=reduction,
            options=nn.LinearCrossEntropyOptions(),
        )
        found = run.reducer.linear_cross_entropy(hidden, targets.flatten(), reduction=reduction)
        torch.testing.assert_close(found, expected)
        for one, other in zip(gradients(found), gradients(expected), strict=True):
            torch.testing.assert_close(one, other)

    def test_gradients_for_another_purpose(self) -> None:
        """Of the hidden states alone, as for an adversarial example: no step of the head."""
        run = Run()
        run.warm_up()
        inputs, targets = run.batch(0)
        hidden = run.model.hidden(inputs).detach().requires_grad_()
        before = run.reducer.last
        loss = run.reducer.linear_cross_entropy(hidden, targets, chunk_size=5)
        (found,) = torch.autograd.grad(loss, [hidden])
        with run.reducer.paused():
            expected = F.cross_entropy(run.model.head(hidden).flatten(0, 1), targets.flatten())
            (plain,) = torch.autograd.grad(expected, [hidden])
        torch.testing.assert_close(found, plain)
        assert run.reducer.last is before

    def test_a_frozen_backbone(self) -> None:
        called, fused = pair()
        for run in (called, fused):
            for param in (*run.model.embedding.parameters(), *run.model.body.parameters()):
                param.requires_grad_(False)
        called.called(*called.batch(0)).backward()
        fused.fused(*fused.batch(0), chunk_size=5).backward()
        assert_same(called, fused)

    def test_a_frozen_head(self) -> None:
        run = Run()
        run.model.head.requires_grad_(False)
        before = run.reducer.last
        run.fused(*run.batch(0), chunk_size=5).backward()
        assert run.model.head.weight.grad is None
        assert run.model.body.weight.grad is not None
        assert run.reducer.last is before

    def test_without_gradients(self) -> None:
        run = Run()
        with torch.no_grad():
            found = run.fused(*run.batch(0))
        torch.testing.assert_close(found, run.called(*run.batch(0)).detach())
        assert not found.requires_grad


class TestTrouble:
    @BLOCKS
    def test_nothing_counts(self, chunk_size: int | None) -> None:
        """As `F.cross_entropy`: the mean of nothing is not a number, its gradients are zero."""
        run = Run()
        inputs, _ = run.batch(0)
        nothing = torch.full(inputs.shape, IGNORED)
        loss = run.fused(inputs, nothing, chunk_size=chunk_size)
        assert loss.isnan()
        loss.backward()
        assert all(not grad.any() for grad in run.gradients())
        run.optimizer.zero_grad()
        run.fused(inputs, nothing, chunk_size=chunk_size, reduction="sum").backward()
        assert all(not grad.any() for grad in run.gradients())

    @BLOCKS
    def test_gradients_that_are_returned_and_not_zeroed(self, chunk_size: int | None) -> None:
        run = Run()
        for number in range(2):
            loss = run.fused(*run.batch(number), chunk_size=chunk_size)
            params = list(run.model.parameters())
            for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                param.grad = grad
            run.optimizer.step()
        assert report_of(run.reducer).applied
        assert report_of(run.reducer).fallbacks == 0

    @BLOCKS
    def test_no_tokens(self, chunk_size: int | None) -> None:
        run = Run()
        none = torch.zeros(0, dtype=torch.int64)
        with pytest.warns(RuntimeWarning, match="nothing to trade off"):
            run.fused(none, none, chunk_size=chunk_size, reduction="sum").backward()
        assert all(not grad.any() for grad in run.gradients())
        assert report_of(run.reducer).fallbacks == 0

    @BLOCKS
    def test_eval_mode_stays_plain(self, chunk_size: int | None) -> None:
        run = Run()
        run.warm_up()
        run.model.eval()
        loss = run.fused(*run.batch(0), chunk_size=chunk_size)
        with pytest.warns(RuntimeWarning, match="the head ran in eval mode"):
            loss.backward()
        assert_close(run.gradients(), plain_gradients(run, 0), 1e-14)
        assert report_of(run.reducer).fallbacks == 1
        assert len(report_of(run.reducer).extra_weights) == ROWS * TOKENS

    @BLOCKS
    def test_an_error_of_ours_stays_plain(
        self, chunk_size: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = Run()
        run.warm_up()

        def broken(*args: Any) -> Any:
            raise ArithmeticError("on purpose")

        monkeypatch.setattr("primum.recipe.solve", broken)
        loss = run.fused(*run.batch(0), chunk_size=chunk_size)
        with pytest.warns(RuntimeWarning, match="ArithmeticError: on purpose"):
            loss.backward()
        assert_close(run.gradients(), plain_gradients(run, 0), 1e-14)
        assert report_of(run.reducer).fallbacks == 1
        run.optimizer.step()

    @BLOCKS
    def test_values_that_are_not_finite(self, chunk_size: int | None) -> None:
        run = Run()
        hidden = run.model.hidden(run.batch(0)[0])
        hidden = torch.where(
            torch.arange(hidden.numel()).view(hidden.shape) == 9, torch.inf, hidden
        )
        loss = run.reducer.linear_cross_entropy(hidden, run.batch(0)[1], chunk_size=chunk_size)
        with pytest.warns(RuntimeWarning, match="step's values were not finite"):
            loss.backward()
        assert not report_of(run.reducer).applied
        assert report_of(run.reducer).fallbacks == 1

    def test_the_papers_recipe_needs_all_gradients_at_once(self) -> None:
        run = Run(recipe="paper")
        run.fused(*run.batch(0)).backward()  # small: they are there
        assert report_of(run.reducer).fallbacks == 0
        run.optimizer.step()
        loss = run.fused(*run.batch(1), chunk_size=5)
        with pytest.warns(RuntimeWarning, match="recipe 'paper' needs the whole gradient"):
            loss.backward()

    def test_gradients_that_are_discarded_are_noticed(self) -> None:
        run = Run()
        run.warm_up()
        run.fused(*run.batch(0), chunk_size=5).backward()
        run.optimizer.zero_grad()
        loss = run.fused(*run.batch(1), chunk_size=5)
        with pytest.warns(RuntimeWarning, match="discarded before an optimizer"):
            loss.backward()

    def test_the_head_counts_as_reached(self) -> None:
        """Nothing is said about a bypassed hook."""
        run = Run()
        for number in range(4):
            run.optimizer.zero_grad()
            run.fused(*run.batch(number)).backward()
            run.optimizer.step()
        assert report_of(run.reducer).applied

    @pytest.mark.parametrize("called", [False, True], ids=["alone", "beside the head"])
    @pytest.mark.parametrize("reduction", ["none", "mean"])
    def test_not_for_the_explicit_form(self, reduction: str, called: bool) -> None:
        """It applies the weights by itself; in both, the weights would count twice."""
        run = Run()
        inputs, targets = run.batch(0)
        losses = run.fused(inputs, targets, reduction=reduction)
        passed = losses + run.called(inputs, targets, reduction="none") if called else losses
        with pytest.raises(ValueError, match=r"come from reducer\.linear_cross_entropy, which al"):
            run.reducer(passed)
        losses.mean().backward()  # as the message says
        assert report_of(run.reducer).applied
        assert torch.equal(run.reducer(losses.detach()), losses.mean())  # nothing to weigh

    def test_fused_losses_of_another_reducer_are_not_ours(self) -> None:
        one, other = Run(), Run()
        inputs, targets = one.batch(0)
        losses = one.called(inputs, targets, reduction="none")
        one.reducer(losses + other.fused(inputs, targets, reduction="none")).backward()
        assert report_of(one.reducer).applied
        assert report_of(other.reducer).applied

    def test_arguments(self) -> None:
        run = Run()
        inputs, targets = run.batch(0)
        hidden, of = run.model.hidden(inputs), run.reducer.linear_cross_entropy
        with pytest.raises(ValueError, match=r"hidden must be \[..., 8\] and targets of the same"):
            of(hidden, targets[:, 1:])
        with pytest.raises(ValueError, match=r"hidden must be \[..., 8\]"):
            of(hidden[..., 1:], targets)
        with pytest.raises(TypeError, match="targets must be class indices"):
            of(hidden, targets.double())
        with pytest.raises(ValueError, match='reduction must be "mean", "sum" or "none", got'):
            of(hidden, targets, reduction="median")
        with pytest.raises(ValueError, match="label_smoothing must be between 0 and 1, got 2"):
            of(hidden, targets, label_smoothing=2)
        with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
            of(hidden, targets, chunk_size=0)
        with pytest.raises(TypeError, match=r"hidden is torch.float32, but the head's weight"):
            of(hidden.float(), targets)
        with pytest.raises(IndexError, match=f"target {WORDS} is out of bounds"):
            of(hidden, torch.full_like(targets, WORDS))
        with pytest.raises(TypeError, match="softcap"):
            of(hidden, targets, softcap=30.0)
