"""The explicit form, `loss = reducer(losses)`."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import primum
from loops import BOTH, SGD, Widen, assert_close, batch, gradients, make, make_like, report_of
from primum.hooks.explicit import _weighted_mean


class TestExplicitForm:
    @BOTH
    @pytest.mark.parametrize("shape", [(24,), (6, 5), (2,)])
    def test_same_as_the_hook(self, kind: Any, options: Any, shape: tuple[int, ...]) -> None:
        hooked, explicit = make(kind, options), make(kind, options)
        one, other = (primum.attach(*each, per="sample") for each in (hooked, explicit))
        for number in range(5):
            inputs, labels = batch(number, *shape)
            for model, optimizer in (hooked, explicit):
                optimizer.zero_grad()
                output = model(inputs).movedim(-1, 1)
                losses = F.cross_entropy(output, labels, reduction="none")
                losses = losses.view(shape[0], -1).mean(1)
                if model is explicit[0]:
                    loss = other(losses)
                    w = report_of(other).extra_weights
                    assert loss.dim() == 0
                    torch.testing.assert_close(loss, ((1 + w) * losses).mean())
                    loss.backward()
                    assert report_of(other).extra_weights is w  # not solved a second time
                else:
                    losses.mean().backward()
            torch.testing.assert_close(report_of(one).extra_weights, w)
            assert_close(gradients(explicit[0]), gradients(hooked[0]), 1e-12)
            hooked[1].step()
            explicit[1].step()
        assert report_of(other).fallbacks == 0
        if shape != (2,):
            assert w.max() > 0.01

    def test_the_hook_weighs_the_next_pass_again(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        reducer(F.cross_entropy(model(inputs), labels, reduction="none")).backward()
        first = report_of(reducer)
        F.cross_entropy(model(inputs), labels).backward()
        assert reducer.last is not first

    def test_twice_on_the_same_pass(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        first, report = reducer(losses), reducer.last
        assert torch.equal(first, reducer(losses))
        assert torch.equal(2 * first, reducer(2 * losses))
        assert reducer.last is report
        assert first > losses.mean()

    def test_two_passes_each_with_its_own_losses(self) -> None:
        """Both forward passes come first; each call finds its own, in any order."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        batches = [batch(0, 24), batch(1, 10)]
        losses = [F.cross_entropy(model(x), y, reduction="none") for x, y in batches]
        one = reducer(losses[0])
        w = report_of(reducer).extra_weights
        assert w.shape == (24,)
        torch.testing.assert_close(one, ((1 + w) * losses[0]).mean())
        two = reducer(losses[1])
        v = report_of(reducer).extra_weights
        assert v.shape == (10,)
        (one + two).backward()
        twin, _ = make()
        (a, b), (c, d) = batches
        weighted = ((1 + w) * F.cross_entropy(twin(a), b, reduction="none")).mean()
        (weighted + ((1 + v) * F.cross_entropy(twin(c), d, reduction="none")).mean()).backward()
        assert_close(gradients(model), gradients(twin), 1e-12)

    @pytest.mark.parametrize(
        ("shape", "per"), [((24,), "sample"), ((6, 4), "token"), ((24,), "token")]
    )
    def test_losses_from_two_views_of_the_same_samples(
        self, shape: tuple[int, ...], per: str
    ) -> None:
        """R-Drop and its kin: a sample's gradient is the sum over both calls of the head."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer, per=per)
        (inputs, labels), (noise, _) = batch(0, *shape), batch(1, *shape)

        def losses_of(net: nn.Module) -> Tensor:
            views = (net(inputs).flatten(0, -2), net(inputs + noise).flatten(0, -2))
            one, two = (F.cross_entropy(each, labels.flatten(), reduction="none") for each in views)
            return one + two

        twin, stepper = make_like(model, optimizer)
        rows = []
        for loss in losses_of(twin) / 24:
            grads = torch.autograd.grad(loss, list(twin[2].parameters()), retain_graph=True)
            rows.append(torch.cat([each.flatten() for each in grads]))
        before = torch.cat([p.detach().flatten() for p in twin[2].parameters()])
        losses_of(twin).mean().backward()
        stepper.step()
        after = torch.cat([p.detach().flatten() for p in twin[2].parameters()])
        drift = torch.stack(rows) @ (after - before) / SGD["lr"]

        reducer(losses_of(model).view(shape)).backward()
        report = report_of(reducer)
        torch.testing.assert_close(report.drift, drift, rtol=1e-8, atol=1e-10)
        twin, _ = make()
        ((1 + report.extra_weights) * losses_of(twin)).mean().backward()
        assert_close(gradients(model), gradients(twin), 1e-12)
        assert report.extra_weights.max() > 0.01

    @pytest.mark.parametrize("per", ["sample", "token"])
    def test_losses_from_calls_for_other_samples(self, per: str) -> None:
        """As of a loss that is computed in chunks: as if one call had seen them all."""
        found = []
        for parts in (1, 2):
            model, optimizer = make()
            reducer = primum.attach(model, optimizer, per=per)
            (x, y), (u, v) = batch(0, 10), batch(1, 14)
            chunks = [(torch.cat((x, u)), torch.cat((y, v)))] if parts == 1 else [(x, y), (u, v)]
            losses = [F.cross_entropy(model(a), b, reduction="none") for a, b in chunks]
            reducer(torch.cat(losses)).backward()
            assert report_of(reducer).applied
            found.append((report_of(reducer).extra_weights, *gradients(model)))
        assert found[0][0].max() > 0.01
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)

    def test_without_a_batch_dimension(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 1)
        losses = F.cross_entropy(model(inputs[0]), labels[0], reduction="none").unsqueeze(0)
        loss = reducer(losses)
        assert torch.equal(loss, losses.mean())
        loss.backward()
        assert report_of(reducer).extra_weights.shape == (1,)
        assert report_of(reducer).fallbacks == 0

    def test_number_of_losses_must_match(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        with pytest.raises(ValueError, match=r"got shape \[10\]: the head saw 24 samples, but"):
            reducer(losses[:10])
        losses.mean().backward()  # the hook still does its work
        assert report_of(reducer).applied

    @pytest.mark.parametrize("per", ["auto", "sample", "token"])
    def test_a_mean_is_not_a_loss_per_sample(self, per: str) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer, per=per)
        inputs, labels = batch(0, 24)
        loss = F.cross_entropy(model(inputs), labels)
        with pytest.raises(ValueError, match=r'got shape \[\].*"none", or call .backward'):
            reducer(loss)
        loss.backward()
        assert report_of(reducer).applied

    @pytest.mark.parametrize("per", ["auto", "sample"])
    def test_outputs_are_not_losses(self, per: str) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer, per=per)
        logits = model(batch(0, 24)[0])
        for _ in range(2):
            with pytest.raises(ValueError, match=r'got shape \[24, 4\].*reduction="none"'):
                reducer(logits)
            F.cross_entropy(logits, batch(0, 24)[1]).backward(retain_graph=True)

    def test_rows_of_any_shape(self) -> None:
        """Tokens that were flattened before the head are its samples, however the losses lie."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        for _ in range(2):  # the first decides what is weighed
            losses = F.cross_entropy(model(inputs), labels, reduction="none").view(6, 4)
            weighted = reducer(losses)
            w = report_of(reducer).extra_weights.view(6, 4)
            torch.testing.assert_close(weighted, ((1 + w) * losses).mean())

    @pytest.mark.parametrize(
        ("losses", "found"),
        [(None, "NoneType"), ((torch.ones(3),), "tuple"), (torch.ones(3).long(), r"torch\.int64")],
    )
    def test_not_a_tensor_of_losses(self, losses: Any, found: str) -> None:
        reducer = primum.attach(*make())
        with pytest.raises(TypeError, match=f'per sample or token, got {found}; .*"none"'):
            reducer(losses)

    @pytest.mark.parametrize("per", ["sample", "token"])
    def test_weighted_losses_are_not_weighted_again(self, per: str) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer, per=per)
        inputs, labels = batch(0, 24)
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        with pytest.raises(
            ValueError, match=r"of shape \[\] do not fit the 24 weights.*instead of"
        ):
            reducer(reducer(losses))

    def test_losses_must_come_from_the_head(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, _ = batch(0, 24)
        model(inputs)
        with pytest.raises(ValueError, match="do not depend on the head's output"):
            reducer(model[0](inputs).mean(1))

    @pytest.mark.parametrize("per", ["sample", "token"])
    def test_losses_must_be_in_the_order_of_the_rows(self, per: str) -> None:
        """Transposed logits, or a batch that is sorted after the head: the weights of others."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer, per=per)
        inputs, labels = batch(0, 7, 5)
        if per == "sample":
            losses = F.cross_entropy(model(inputs[:, 0]).flip(0), labels[:, 0], reduction="none")
        else:
            logits = model(inputs.transpose(0, 1)).permute(1, 2, 0)
            losses = F.cross_entropy(logits, labels, reduction="none")
        with pytest.raises(ValueError, match=f"not in the order of the head's {per}s.*hook"):
            reducer(losses)

    def test_losses_of_a_pass_before_attaching(self) -> None:
        model, optimizer = make()
        inputs, labels = batch(0, 24)
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        reducer = primum.attach(model, optimizer)
        with pytest.raises(ValueError, match="after attaching"):
            reducer(losses)

    def test_is_the_plain_mean_where_nothing_is_to_be_weighed(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        with torch.no_grad():
            losses = F.cross_entropy(model(inputs), labels, reduction="none")
            assert torch.equal(reducer(losses), losses.mean())
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        with torch.no_grad():
            assert torch.equal(reducer(losses), losses.mean())
        reducer.enabled = False
        assert torch.equal(reducer(losses), losses.mean())
        reducer.enabled = True
        reducer.remove()
        assert torch.equal(reducer(losses), losses.mean())
        assert reducer.last is None

    def test_a_head_that_is_frozen_for_a_phase(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        for trained in (False, True):
            model[2].requires_grad_(trained)
            losses = F.cross_entropy(model(inputs), labels, reduction="none")
            loss = reducer(losses)
            assert torch.equal(loss, losses.mean()) == (not trained)
            loss.backward()
        assert report_of(reducer).fallbacks == 0

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_activation_checkpointing_around_the_head(self, reentrant: bool) -> None:
        """A reentrant one hides the head until the backward pass: the hook applies the weights."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        inputs.requires_grad_()
        output = torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=reentrant)
        losses = F.cross_entropy(output, labels, reduction="none")
        loss = reducer(losses)
        assert torch.equal(loss, losses.mean()) == reentrant
        loss.backward()
        w = report_of(reducer).extra_weights
        assert w.max() > 0.01
        twin, _ = make()
        ((1 + w) * F.cross_entropy(twin(inputs), labels, reduction="none")).mean().backward()
        assert_close(gradients(model), gradients(twin), 1e-12)

    def test_observe_measures_and_returns_the_mean(self) -> None:
        model, optimizer = make()
        watcher = primum.observe(model, optimizer)
        inputs, labels = batch(0, 24)
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        assert torch.equal(watcher(losses), losses.mean())
        report = report_of(watcher)
        assert report.extra_weights.max() > 0.01
        losses.mean().backward()
        assert watcher.last is report  # measured once
        twin, _ = make()
        F.cross_entropy(twin(inputs), labels, reduction="none").mean().backward()
        for one, other in zip(gradients(model), gradients(twin), strict=True):
            assert torch.equal(one, other)

    def test_of_a_rank_without_samples(self) -> None:
        losses = torch.ones(0, requires_grad=True)
        loss = _weighted_mean(losses, torch.ones(0))
        assert loss.isnan()  # as the mean of nothing
        loss.backward()
        assert losses.grad is not None

    def test_under_autocast(self) -> None:
        """The head's input is used in a cast copy there: nothing but us keeps it."""
        model, optimizer = make(dtype=torch.float32)
        model.insert(2, Widen())
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = F.cross_entropy(model(inputs), labels, reduction="none")
        reducer(losses).backward()
        assert report_of(reducer).fallbacks == 0
        assert report_of(reducer).extra_weights.max() > 0.01
