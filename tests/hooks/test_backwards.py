"""Backward passes that are not the plain one of the README."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import (
    ADAMW,
    PRECISE,
    SGD,
    Widen,
    assert_close,
    batch,
    gradients,
    make,
    report_of,
    slow_solution,
    train,
)
from primum import StepReport
from primum.kernel.engine import Observer


class TestOtherBackwards:
    def test_retain_graph(self) -> None:
        """The second pass adds to what the first has left in `.grad`, and is weighed as such."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        output = model(inputs)
        F.cross_entropy(output, labels).backward(retain_graph=True)
        w = report_of(reducer).extra_weights
        F.mse_loss(output, F.one_hot(labels, 4).double()).backward()
        v = report_of(reducer).extra_weights
        assert v is not w
        twin, _ = make()
        output = twin(inputs)
        one = ((1 + w) * F.cross_entropy(output, labels, reduction="none")).mean()
        two = (1 + v) * (output - F.one_hot(labels, 4)).square().mean(1)
        (one + two.mean()).backward()
        assert_close(gradients(model), gradients(twin), 1e-12)
        assert report_of(reducer).fallbacks == 0

    def test_retain_graph_under_autocast_may_find_the_input_gone(self) -> None:
        model, optimizer = make(dtype=torch.float32)
        model.insert(2, Widen())
        primum.attach(model, optimizer)
        inputs, labels = batch(0, 24, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward(retain_graph=True)
        with pytest.warns(RuntimeWarning, match="the head's input was freed"):
            loss.backward()

    def test_create_graph(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        loss = F.cross_entropy(model(inputs), labels)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        w = report_of(reducer).extra_weights
        assert w.max() > 0.01
        assert not w.requires_grad
        sum(g.square().sum() for g in grads).backward()
        twin, _ = make()
        loss = ((1 + w) * F.cross_entropy(twin(inputs), labels, reduction="none")).mean()
        expected = torch.autograd.grad(loss, list(twin.parameters()), create_graph=True)
        for one, other in zip(grads, expected, strict=True):
            torch.testing.assert_close(one, other)

    def test_gradients_for_another_purpose_are_plain(self) -> None:
        """Adversarial examples, gradient penalties, saliency: the head is not trained by them."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        inputs.requires_grad_()
        loss = F.cross_entropy(model(inputs), labels)
        (found,) = torch.autograd.grad(loss, inputs, create_graph=True)
        assert reducer.last is None
        twin, _ = make()
        other = F.cross_entropy(twin(inputs), labels)
        (expected,) = torch.autograd.grad(other, inputs)
        assert torch.equal(found, expected)
        torch.autograd.grad(loss, model[0].weight, retain_graph=True)
        loss.backward(inputs=list(model[0].parameters()), retain_graph=True)
        assert reducer.last is None
        optimizer.zero_grad()
        (loss + found.square().sum()).backward()  # and now the head is
        assert report_of(reducer).applied
        assert report_of(reducer).fallbacks == 0

    @pytest.mark.parametrize("only_head", [True, False])
    def test_autograd_grad_for_the_parameters_is_training(self, only_head: bool) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        params = list((model[2] if only_head else model).parameters())
        found = torch.autograd.grad(F.cross_entropy(model(inputs), labels), params)
        w = report_of(reducer).extra_weights
        twin, _ = make()
        losses = (1 + w) * F.cross_entropy(twin(inputs), labels, reduction="none")
        params = list((twin[2] if only_head else twin).parameters())
        assert_close(list(found), list(torch.autograd.grad(losses.mean(), params)), 1e-12)

    @pytest.mark.parametrize("parts", [1, 2])
    def test_autograd_grad_without_zero_grad(self, parts: int) -> None:
        """A `.grad` that a step has used does not count; one that a loop adds up itself does."""
        model, optimizer = make()
        twin, other = make()
        reducer, expected = primum.attach(model, optimizer), primum.attach(twin, other)
        for number in range(3):
            other.zero_grad()
            for part in range(parts):
                inputs, labels = batch(10 * number + part, 24)
                params = list(model.parameters())
                found = torch.autograd.grad(F.cross_entropy(model(inputs), labels), params)
                for param, grad in zip(params, found, strict=True):
                    param.grad = grad if part == 0 else param.grad + grad
                F.cross_entropy(twin(inputs), labels).backward()
                drift = report_of(reducer).drift
                torch.testing.assert_close(drift, report_of(expected).drift)
            optimizer.step()
            other.step()

    def test_two_forwards_one_backward(self) -> None:
        """Each call is weighed on its own: approximate, for neither sees the other's gradient."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        reports: list[StepReport] = []

        class Noting(Observer):
            def on_solution(self, report: StepReport) -> None:
                reports.append(report)

        reducer._engine.observers.append(Noting())
        batches = [batch(0, 24), batch(1, 10)]
        losses = [F.cross_entropy(model(x), y) for x, y in batches]
        with pytest.warns(RuntimeWarning, match="ran more than once in one backward pass"):
            sum(losses).backward()
        ws = {len(r.extra_weights): r.extra_weights for r in reports}
        assert set(ws) == {24, 10}
        twin, _ = make()
        sum(
            ((1 + ws[len(y)]) * F.cross_entropy(twin(x), y, reduction="none")).mean()
            for x, y in batches
        ).backward()
        assert_close(gradients(model), gradients(twin), 1e-12)

    def test_head_used_twice_in_one_forward(self) -> None:
        class Siamese(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.body(x)) + self.head(self.body(-x).tanh())

        torch.manual_seed(0)
        model = Siamese().double()
        optimizer = optim.SGD(model.parameters(), **SGD)
        reducer = primum.attach(model, optimizer)
        with pytest.warns(RuntimeWarning, match="ran more than once in one backward pass"):
            train(model, optimizer, 3)
        assert report_of(reducer).fallbacks == 0
        assert all(p.isfinite().all() for p in model.parameters())

    def test_torch_func(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        params = {k: v.detach() for k, v in model.named_parameters()}

        def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

        per_sample_gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
        found = per_sample_gradients(params, inputs, labels)
        reducer.enabled = False
        torch.testing.assert_close(found, per_sample_gradients(params, inputs, labels))

        def loss_of(x: Tensor) -> Tensor:
            return F.cross_entropy(model(x), labels)

        plain = torch.func.grad(loss_of)(inputs)
        reducer.enabled = True
        assert torch.equal(torch.func.grad(loss_of)(inputs), plain)
        torch.func.jacrev(model)(inputs)
        torch.func.jvp(model, (inputs,), (inputs,))
        assert reducer.last is None

    def test_functional_call_with_other_weights(self) -> None:
        """Meta-learning: the gradient is not the head's own."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        fast = {k: nn.Parameter(v.detach().clone()) for k, v in model.named_parameters()}
        F.cross_entropy(torch.func.functional_call(model, fast, (inputs,)), labels).backward()
        twin, _ = make()
        F.cross_entropy(twin(inputs), labels).backward()
        assert all(map(torch.equal, (p.grad for p in fast.values()), gradients(twin)))
        assert reducer.last is None

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_activation_checkpointing_around_the_head(self, reentrant: bool) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        inputs.requires_grad_()
        output = torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=reentrant)
        F.cross_entropy(output, labels).backward()
        w = report_of(reducer).extra_weights
        twin, _ = make()
        ((1 + w) * F.cross_entropy(twin(inputs), labels, reduction="none")).mean().backward()
        assert w.max() > 0.01
        assert_close(gradients(model), gradients(twin), 1e-12)

    def test_other_hooks_on_the_head(self) -> None:
        """What they make of the output comes after us: the gradient is the linear layer's own."""
        model, optimizer = make()
        model[2].register_forward_hook(lambda _, args, output: 2 * output)
        reducer = primum.attach(model, optimizer, **PRECISE)
        inputs, labels = batch(0, 24)
        F.cross_entropy(model(inputs), labels).backward()
        twin, stepper = make()
        twin[2].register_forward_hook(lambda _, args, output: 2 * output)
        oracle = slow_solution(twin, stepper, inputs, labels)
        torch.testing.assert_close(report_of(reducer).drift_after, oracle.drift_after)

    @pytest.mark.filterwarnings("ignore:.*discarded before an optimizer:RuntimeWarning")
    def test_threads(self) -> None:
        """Several backward passes at once, each with the weights of its own batch."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        errors: list[BaseException] = []

        def work(rows: int) -> None:
            try:
                for number in range(10):
                    inputs, labels = batch(number, rows)
                    grads = torch.autograd.grad(
                        F.cross_entropy(model(inputs), labels), list(model.parameters())
                    )
                    assert all(g.isfinite().all() for g in grads)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(rows,)) for rows in (5, 9, 14)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert report_of(reducer).fallbacks == 0

    def test_copies_that_run_in_its_place_are_said(self) -> None:
        """nn.DataParallel makes them on several devices."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        replica = model[2]._replicate_for_data_parallel()
        replica.weight, replica.bias = model[2].weight * 1, model[2].bias * 1
        inputs, labels = batch(0, 24)
        features = model[1](model[0](inputs))
        with pytest.warns(RuntimeWarning, match="use DistributedDataParallel"):
            output = replica(features)
        F.cross_entropy(output + replica(features), labels).backward()  # and not a second time
        assert reducer.last is None

    def test_tied_weights_are_approximate(self) -> None:
        """The embedding's share of the gradient is not predicted; the weights are applied."""

        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(7, 8)
                self.mix = nn.Linear(8, 8)
                self.lm_head = nn.Linear(8, 7, bias=False)
                self.lm_head.weight = self.embedding.weight

            def forward(self, tokens: Tensor) -> Tensor:
                return self.lm_head(self.mix(self.embedding(tokens)).tanh())

        torch.manual_seed(0)
        model = Tied().double()
        optimizer = optim.AdamW(model.parameters(), **ADAMW)
        reducer = primum.attach(model, optimizer, per="sample")
        for _ in range(3):
            tokens = torch.randint(7, (6, 5))
            twin = copy.deepcopy(model)
            optimizer.zero_grad()
            F.cross_entropy(model(tokens).transpose(1, 2), tokens.roll(1, 1)).backward()
            w = report_of(reducer).extra_weights
            losses = F.cross_entropy(
                twin(tokens).transpose(1, 2), tokens.roll(1, 1), reduction="none"
            )
            ((1 + w) * losses.mean(1)).mean().backward()
            assert_close(gradients(model), gradients(twin), 1e-12)
            optimizer.step()
        assert report_of(reducer).fallbacks == 0

    def test_weight_and_bias_with_different_optimizers(self) -> None:
        model, _ = make()
        one = optim.AdamW([*model[0].parameters(), model[2].weight], **ADAMW)
        two = optim.SGD([model[2].bias], lr=0.1)
        reducer = primum.attach(model, [one, two])
        inputs, labels = batch(0, 24)
        twin, stepper, other = copy.deepcopy((model, one, two))
        losses = F.cross_entropy(twin(inputs), labels, reduction="none") / 24
        rows = []
        for loss in losses:
            grads = torch.autograd.grad(loss, list(twin[2].parameters()), retain_graph=True)
            rows.append(torch.cat([g.flatten() for g in grads]))
        before = torch.cat([p.detach().flatten() for p in twin[2].parameters()])
        losses.sum().backward()
        stepper.step()
        other.step()
        after = torch.cat([p.detach().flatten() for p in twin[2].parameters()])
        F.cross_entropy(model(inputs), labels).backward()
        drift = torch.stack(rows) @ (after - before) / 0.1  # per unit of the larger rate
        torch.testing.assert_close(report_of(reducer).drift, drift, rtol=1e-8, atol=1e-10)
