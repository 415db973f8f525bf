"""Trouble in a step: plain gradients bit for bit, counted, warned about once; training goes on."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import BOTH, SGD, batch, gradients, make, report_of, train


class Broken(RuntimeError):
    pass


class TestTrouble:
    """Plain gradients bit for bit, counted, warned about once; and training goes on."""

    def plain(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
        twin = copy.deepcopy(model)
        twin.zero_grad()
        loss(twin).backward()
        return gradients(twin)

    def assert_equal(self, found: list[Tensor], expected: list[Tensor]) -> None:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)

    @BOTH
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("where", ["gradient", "features"])
    def test_values_that_are_not_finite(
        self, kind: Any, options: Any, value: float, where: str
    ) -> None:
        model, optimizer = make(kind, options, dtype=torch.float32)
        reducer = primum.attach(model, optimizer)
        inputs, targets = batch(0, 24, dtype=torch.float32)[0], torch.randn(24, 4)

        def loss(net: nn.Module) -> Tensor:
            features = net[1](net[0](inputs))
            scale = torch.ones(24, 1)
            scale[5] = value
            if where == "features":
                return (net[2](features * scale) * targets).mean()
            return (net[2](features) * targets * scale).mean()

        expected = self.plain(model, loss)
        with pytest.warns(RuntimeWarning, match="to plain gradients: the step's values") as caught:
            loss(model).backward()
        assert len(caught) == 1
        self.assert_equal(gradients(model), expected)
        report = report_of(reducer)
        assert report.fallbacks == 1
        assert not report.applied
        assert "not finite" in report.reason
        assert torch.equal(report.extra_weights, torch.zeros(24))
        optimizer.zero_grad()
        loss(model).backward()  # a second warning would be an error here
        assert report_of(reducer).fallbacks == 2
        optimizer.zero_grad()
        train(model, optimizer, 2)
        assert report_of(reducer).fallbacks == 2
        assert report_of(reducer).extra_weights.max() > 0.01

    @BOTH
    def test_values_whose_squares_are_not_finite(self, kind: Any, options: Any) -> None:
        """Counted or not, the weights stay within bounds."""
        model, optimizer = make(kind, options, dtype=torch.float32)
        reducer = primum.attach(model, optimizer)
        inputs, targets = batch(0, 24, dtype=torch.float32)[0], torch.randn(24, 4)
        targets[5] *= 1e35
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            (model(inputs) * targets).mean().backward()
        w = report_of(reducer).extra_weights
        assert ((w >= 0) & (w <= 2)).all()
        assert all(g.isfinite().all() for g in gradients(model))

    def test_an_error_of_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)

        def broken(*_: Any) -> None:
            raise Broken("no luck today")

        inputs, labels = batch(0, 24)
        expected = self.plain(model, lambda net: F.cross_entropy(net(inputs), labels))
        with monkeypatch.context() as patch:
            patch.setattr("primum.kernel.recipe.solve", broken)
            with pytest.warns(RuntimeWarning, match="Broken: no luck today") as caught:
                F.cross_entropy(model(inputs), labels).backward()
            assert len(caught) == 1
            self.assert_equal(gradients(model), expected)
            report = report_of(reducer)
            assert (report.fallbacks, report.applied) == (1, False)
            assert report.reason == "Broken: no luck today"
            assert torch.equal(report.extra_weights, torch.zeros(24))
            assert report.harm_before.isnan()
            train(model, optimizer, 2)
            losses = F.cross_entropy(model(inputs), labels, reduction="none")
            assert torch.equal(reducer(losses), losses.mean())
        assert report_of(reducer).fallbacks == 4
        train(model, optimizer, 1)  # goes on, and without a word
        report = report_of(reducer)
        assert report.applied
        assert report.extra_weights.max() > 0.01
        assert report.fallbacks == 4

    def test_different_troubles_are_warned_about_separately(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, optimizer = make()
        primum.attach(model, optimizer)
        monkeypatch.setattr("primum.kernel.recipe.solve", None)
        with pytest.warns(RuntimeWarning, match="TypeError"):
            train(model, optimizer, 2)
        monkeypatch.undo()
        inputs, labels = batch(0, 24)
        with pytest.warns(RuntimeWarning, match="not finite"):
            F.cross_entropy(model(inputs * float("nan")), labels).backward()

    def test_all_zero_gradient(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, _ = batch(0, 24)
        (0 * model(inputs)).sum().backward()
        report = report_of(reducer)
        assert torch.equal(report.extra_weights, torch.zeros(24, dtype=torch.float64))
        assert report.as_dict()["gap"] == 0
        assert report.fallbacks == 0

    @BOTH
    @pytest.mark.parametrize("rows", [24, 2])
    def test_learning_rate_zero(self, kind: Any, options: Any, rows: int) -> None:
        model, optimizer = make(kind, options | {"lr": 0.0})
        reducer = primum.attach(model, optimizer)
        train(model, optimizer, 3, rows=rows)
        report = report_of(reducer)
        assert report.fallbacks == 0
        assert report.extra_weights.isfinite().all()
        assert (report.extra_weights.max() > 0.01) == (rows == 24)

    def test_empty_batch(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # may or may not count as trouble
            model(torch.zeros(0, 6, dtype=torch.float64)).sum().backward()
        assert report_of(reducer).extra_weights.shape == (0,)
        assert not report_of(reducer).finite
        assert "no weights were computed" in reducer.summary_text()
        assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients(model))

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
    @pytest.mark.parametrize("per", ["auto", "token"])
    def test_nested_tensors(self, layout: torch.layout, per: str) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
        optimizer = optim.SGD(model.parameters(), **SGD)
        sequences = [batch(number, 3 + 2 * number)[0] for number in range(2)]

        def loss(net: nn.Module) -> Tensor:
            nested = torch.nested.nested_tensor(sequences, layout=layout)
            return torch.cat([each.flatten() for each in net(nested).unbind()]).square().mean()

        expected = self.plain(model, loss)
        reducer = primum.attach(model, optimizer, per=per)
        with pytest.warns(RuntimeWarning, match="ran on a nested tensor.*; pad it"):
            loss(model).backward()
        self.assert_equal(gradients(model), expected)
        optimizer.step()
        with reducer.paused():
            loss(model).backward()
        assert report_of(reducer).fallbacks == 1

    def test_no_grad_is_not_our_business(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, _ = batch(0, 24)
        with torch.no_grad():
            output = model(inputs)
        with torch.inference_mode():
            model(inputs)
        assert reducer.last is None
        assert not output.requires_grad
        train(model, optimizer, 1)
        assert report_of(reducer).fallbacks == 0

    def test_head_frozen_for_a_pass_is_skipped(self) -> None:
        """That pass trains something else; if none ever trains the head, see test_steps.py."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        train(model, optimizer, 2)
        report = reducer.last
        model[2].requires_grad_(False)
        inputs, labels = batch(0, 24)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        assert reducer.last is report
        twin, _ = make()
        twin.load_state_dict(model.state_dict())
        F.cross_entropy(twin(inputs), labels).backward()
        assert torch.equal(model[0].weight.grad, twin[0].weight.grad)
        optimizer.step()
        model[2].requires_grad_(True)
        train(model, optimizer, 1)
        assert report_of(reducer).applied
        assert report_of(reducer).fallbacks == 0

    def test_head_frozen_between_forward_and_backward(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        loss = F.cross_entropy(model(inputs), labels)
        expected = self.plain(model, lambda net: F.cross_entropy(net(inputs), labels))
        model[2].weight.requires_grad_(False)
        with pytest.warns(RuntimeWarning, match="now frozen; unfreeze it or call"):
            loss.backward()
        self.assert_equal(gradients(model[0]), expected[:2])
        assert report_of(reducer).fallbacks == 1

    def test_parameter_groups_changed_later(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        train(model, optimizer, 1)
        group = optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if p is not model[2].weight]
        inputs, labels = batch(0, 24)
        model.zero_grad()
        expected = self.plain(model, lambda net: F.cross_entropy(net(inputs), labels))
        with pytest.warns(RuntimeWarning, match="the optimizer no longer holds"):
            F.cross_entropy(model(inputs), labels).backward()
        self.assert_equal(gradients(model)[2:3], expected[2:3])
        train(model, optimizer, 2)
        assert report_of(reducer).fallbacks == 3

    def test_head_moved_to_another_group(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        train(model, optimizer, 1)
        optimizer.param_groups[0]["params"] = list(model[0].parameters())
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
        train(model, optimizer, 1)
        assert report_of(reducer).fallbacks == 0

    @BOTH
    def test_weight_replaced(self, kind: Any, options: Any) -> None:
        model, optimizer = make(kind, options)
        reducer = primum.attach(model, optimizer)
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
        with pytest.warns(RuntimeWarning, match="the optimizer no longer holds"):
            train(model, optimizer, 2)
        assert report_of(reducer).fallbacks == 2

    def test_weight_norm_put_on_later(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        nn.utils.parametrizations.weight_norm(model[2])
        optimizer.add_param_group({"params": list(model[2].parametrizations.parameters())})
        inputs, labels = batch(0, 24)
        with pytest.warns(RuntimeWarning, match=r"from other parameters; call \.remove\(\)"):
            F.cross_entropy(model(inputs), labels).backward()
        assert report_of(reducer).fallbacks == 1
        train(model, optimizer, 3)
        assert report_of(reducer).fallbacks == 4

    def test_optimizer_rebuilt(self) -> None:
        """The old one still holds the head, but its state is stale."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        train(model, optimizer, 3)
        rebuilt = optim.SGD(model.parameters(), **SGD)
        train(model, rebuilt, 2)  # twice, to be sure
        inputs, labels = batch(0, 24)
        rebuilt.zero_grad()
        expected = self.plain(model, lambda net: F.cross_entropy(net(inputs), labels))
        with pytest.warns(RuntimeWarning, match=r"not updated by the optimizer .*rebuilt"):
            F.cross_entropy(model(inputs), labels).backward()
        self.assert_equal(gradients(model), expected)
        assert report_of(reducer).fallbacks == 1
        rebuilt.step()
        train(model, rebuilt, 2)
        assert report_of(reducer).fallbacks == 3
        reducer.remove()
        reducer = primum.attach(model, rebuilt)
        train(model, rebuilt, 3)
        assert report_of(reducer).fallbacks == 0

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_rebuilt_whatever_zero_grad_leaves(self, set_to_none: bool) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        rebuilt = optim.SGD(model.parameters(), **SGD)
        inputs, labels = batch(0, 24)
        for _ in range(2):
            F.cross_entropy(model(inputs), labels).backward()
            rebuilt.step()
            rebuilt.zero_grad(set_to_none=set_to_none)
        assert report_of(reducer).fallbacks == 0
        with pytest.warns(RuntimeWarning, match=r"not updated by the optimizer .*rebuilt"):
            F.cross_entropy(model(inputs), labels).backward()

    def test_a_weight_that_is_normalised_while_gradients_accumulate(self) -> None:
        """In place in each iteration, as SwAV does to its prototypes: no other optimizer."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        for number in range(12):
            with torch.no_grad():
                model[2].weight.copy_(F.normalize(model[2].weight))
            inputs, labels = batch(number, 24)
            (F.cross_entropy(model(inputs), labels) / 4).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        assert report_of(reducer).fallbacks == 0
