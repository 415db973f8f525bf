"""Measured in an earlier layer, weighed at the output: gradients are those of weighted losses."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import primum
from adapters import HEADS, LoRA, Residual, frozen, frozen_head, lora_below, net
from compatibility.oracle import check_step, flat, twins
from loops import ADAMW, BOTH, SGD, batch, report_of


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def started(
    model: nn.Module, kind: Any = optim.SGD, options: Any = SGD, **settings: Any
) -> tuple[optim.Optimizer, primum.Reducer]:
    optimizer = kind(trained(model), **options)
    return optimizer, primum.attach(model, optimizer, **settings)


def losses_on(number: int, *shape: int) -> Callable[[nn.Module], Tensor]:
    """Each sample's share of the mean loss; with two dimensions, each token's."""
    inputs, labels = batch(number, *shape)

    def losses_of(model: nn.Module) -> Tensor:
        torch.manual_seed(0)
        dtype = next(model.parameters()).dtype
        logits = model(inputs.to(dtype).requires_grad_())
        each = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        return each / len(each)

    return losses_of


def per_row(losses: Tensor, rows: int) -> Tensor:
    return losses.view(rows, -1).sum(1)


@BOTH
@pytest.mark.parametrize("by_call", [False, True], ids=["hook", "explicit form"])
@pytest.mark.parametrize("name", HEADS)
def test_gradients_are_those_of_weighted_losses(
    name: str, by_call: bool, kind: Any, options: Any
) -> None:
    """And drift and weights are those of the layer that is measured, its optimizer's state seen."""
    torch.manual_seed(0)
    make, layer, output = HEADS[name]
    model = make().double()
    optimizer, reducer = started(model, kind, options)
    assert (reducer.head_name, reducer.output_name) == (layer, output)
    settings: dict[str, Any] = {"head": layer, "lr": options["lr"], "by_call": by_call}
    settings["gain_one"] = kind is optim.SGD
    most = [check_step(model, [optimizer], reducer, losses_on(n, 24), **settings) for n in range(4)]
    assert max(most) > 0.01


@pytest.mark.parametrize("shape", [(12,), (6, 5)], ids=["rows", "sequences"])
def test_other_losses_on_the_input_of_a_frozen_head_stay_plain(shape: tuple[int, ...]) -> None:
    """As with a value head, or a loss on hidden states: the weights are not for them."""
    torch.manual_seed(0)
    head, value = frozen(nn.Linear(8, 4)), nn.Linear(8, 1)
    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    model = nn.ModuleDict({"body": body, "head": head, "value": value}).double()
    inputs, labels = batch(0, *shape)

    def terms() -> tuple[Tensor, Tensor]:
        hidden = body(inputs)
        losses = F.cross_entropy(head(hidden).flatten(0, -2), labels.flatten(), reduction="none")
        return per_row(losses / len(losses), shape[0]), value(hidden).square().mean()

    _, reducer = started(model, head="head", per="sample")
    losses, other = terms()
    (losses.sum() + other).backward()
    found, weights = [p.grad for p in trained(model)], 1 + report_of(reducer).extra_weights
    assert weights.max() > 1.01
    reducer.remove()
    losses, other = terms()
    expected = torch.autograd.grad((weights * losses).sum() + other, trained(model))
    torch.testing.assert_close(flat(found), flat(expected), rtol=1e-10, atol=1e-12)


def test_old_weight_norm() -> None:
    """Which cannot be copied once it has run."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(net(nn.Linear(8, 4)).double())
        with pytest.warns(FutureWarning, match="weight_norm.* is deprecated"):
            nn.utils.weight_norm(models[-1][2])
    model, twin = models
    _, reducer = started(model)
    assert (reducer.head_name, reducer.output_name) == ("0", "2")
    losses_on(0, 24)(model).sum().backward()
    ((1 + report_of(reducer).extra_weights) * losses_on(0, 24)(twin)).sum().backward()
    found, wanted = (flat([p.grad for p in each.parameters()]) for each in models)
    assert (found - wanted).norm() <= 1e-10 * wanted.norm()


class Blocks(nn.Module):
    """Adapted blocks with attention between positions, each of them checkpointed or not."""

    def __init__(self, how: str | None = None) -> None:
        super().__init__()
        self.embed = LoRA(nn.Linear(6, 8))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = frozen(nn.LayerNorm(8)), frozen_head()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if self.how is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = LoRA(nn.Linear(8, 8))
        self.drop = nn.Dropout(0.1)
        self.feed = frozen(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(x, x, self.value(x), is_causal=True)
        x = x + self.drop(mixed)
        return x + self.feed(x).tanh()


@pytest.mark.parametrize("how", [None, "not reentrant"])
@pytest.mark.parametrize("by_call", [False, True], ids=["hook", "explicit form"])
def test_sequences(how: str | None, by_call: bool) -> None:
    """Weights per sample where attention mixes positions; with activation checkpointing too."""
    torch.manual_seed(0)
    model = Blocks(how).double()
    optimizer, reducer = started(model)
    assert reducer.head_name == "blocks.1.value.lora_b"
    settings: dict[str, Any] = {"head": reducer.head_name, "lr": SGD["lr"], "by_call": by_call}
    most = []
    for number in range(4):
        losses_of = losses_on(number, 12, 5)
        rows: Callable[[nn.Module], Tensor] = lambda m, f=losses_of: per_row(f(m), 12)  # noqa: E731
        most.append(check_step(model, [optimizer], reducer, rows, gain_one=True, **settings))
    assert max(most) > 0.01


def test_reentrant_checkpoints_hide_the_layer() -> None:
    model = Blocks("reentrant")
    optimizer, reducer = started(model)
    plain = copy.deepcopy(model)
    losses_on(0, 12, 5)(model).sum().backward()
    losses_on(0, 12, 5)(plain).sum().backward()
    assert torch.equal(*(flat([p.grad for p in trained(net)]) for net in (model, plain)))
    optimizer.step()
    losses_on(0, 12, 5)(model).sum().backward()
    with pytest.warns(RuntimeWarning, match=r"bypassed primum's hook.*pass use_reentrant=False"):
        optimizer.step()
    assert reducer.last is None


@pytest.mark.parametrize("how", [None, "not reentrant"])
def test_bfloat16(how: str | None) -> None:
    """Under autocast: equal to weighted losses as closely as bfloat16 is to itself."""
    torch.manual_seed(0)
    model = Blocks(how)
    for block in model.blocks:
        block.drop.p = 0.0
    optimizer, reducer = started(model, optim.AdamW, ADAMW)
    for number in range(4):
        twin, _ = twins(model, [optimizer])
        optimizer.zero_grad()
        twin.zero_grad()
        losses_of = losses_on(number, 12, 5)
        with torch.autocast("cpu", torch.bfloat16):
            loss, other = losses_of(model), losses_of(twin)
        loss.sum().backward()
        report = report_of(reducer)
        assert report.applied, report.reason
        ((1 + report.extra_weights) * per_row(other, 12)).sum().backward()
        found, wanted = (flat([p.grad for p in trained(net)]) for net in (model, twin))
        assert (found - wanted).norm() < 0.03 * wanted.norm()  # three digits, a few products
        optimizer.step()
    assert report.fallbacks == 0


class TestTokens:
    def test_positions_of_their_own(self) -> None:
        """A norm and a frozen head alone follow the layer: tokens are weighed, exactly."""
        torch.manual_seed(0)
        model = lora_below().double()
        optimizer, reducer = started(model, per="token", radius=0.4)
        settings: dict[str, Any] = {"head": "2.mix.lora_b", "lr": SGD["lr"], "gain_one": True}
        most = [
            check_step(model, [optimizer], reducer, losses_on(n, 6, 4), **settings)
            for n in range(4)
        ]
        assert max(most) > 0.01
        assert len(report_of(reducer).extra_weights) == 24

    def test_positions_that_are_mixed(self) -> None:
        model = Blocks()
        _, reducer = started(model, per="token")
        plain = copy.deepcopy(model)
        with pytest.warns(RuntimeWarning, match=r'positions affect .* pass per="sample"'):
            losses_on(0, 12, 5)(model).sum().backward()
        losses_on(0, 12, 5)(plain).sum().backward()
        assert torch.equal(*(flat([p.grad for p in trained(net)]) for net in (model, plain)))
        losses_on(1, 12, 5)(model).sum().backward()
        assert report_of(reducer).fallbacks == 2

    def test_positions_that_are_mixed_in_the_explicit_form(self) -> None:
        model = Blocks()
        _, reducer = started(model, per="token")
        with pytest.raises(ValueError, match=r'positions affect .* pass per="sample"'):
            reducer(60 * losses_on(0, 12, 5)(model))

    def test_positions_of_their_own_in_the_explicit_form(self) -> None:
        torch.manual_seed(0)
        model = lora_below().double()
        optimizer, reducer = started(model, per="token")
        settings: dict[str, Any] = {"head": "2.mix.lora_b", "lr": SGD["lr"], "by_call": True}
        for number in range(2):
            check_step(model, [optimizer], reducer, losses_on(number, 6, 4), **settings)


def test_samples_that_are_coupled_are_warned_of_once() -> None:
    model = net(frozen_head(), nn.BatchNorm1d(8))
    _, reducer = started(model)
    with pytest.warns(RuntimeWarning, match="samples affect each other between the measured"):
        losses_on(0, 12)(model).sum().backward()
    losses_on(1, 12)(model).sum().backward()
    assert report_of(reducer).applied


def test_values_that_are_not_finite_say_nothing_of_samples() -> None:
    model = lora_below()
    _, reducer = started(model)
    with pytest.warns(RuntimeWarning, match="step's values were not finite") as caught:
        model(torch.full((12, 6), torch.nan)).sum().backward()
    assert len(caught) == 1
    model.zero_grad()
    losses_on(0, 12)(model).sum().backward()
    assert report_of(reducer).applied


def test_an_empty_batch_says_nothing_of_samples() -> None:
    model = lora_below()
    _, reducer = started(model)
    with pytest.warns(RuntimeWarning, match="nothing to trade off"):
        model(torch.zeros(0, 6)).sum().backward()
    losses_on(0, 12)(model).sum().backward()
    assert (report_of(reducer).applied, int(report_of(reducer).fallbacks)) == (True, 0)


def test_rows_that_are_not_samples() -> None:
    class Windows(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            features = self[0](x.reshape(-1, 3))
            logits: Tensor = self[1](features.reshape(len(x), -1))
            return logits

    model = Windows(nn.Linear(3, 4), frozen_head())
    _, reducer = started(model)
    with pytest.warns(RuntimeWarning, match="saw 24 samples, but the output has 12; pass head="):
        losses_on(0, 12)(model).sum().backward()
    assert report_of(reducer).fallbacks == 1


@pytest.mark.parametrize(("per", "shape"), [("token", (6, 4)), ("sample", (5, 5))])
def test_rows_in_another_order(per: str, shape: tuple[int, int]) -> None:
    """A decoder that computes time first, as fairseq's do: as many tokens, but other ones."""

    class TimeFirst(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self[1](self[0](x.transpose(0, 1)).transpose(0, 1))
            return logits

    model = TimeFirst(nn.Linear(6, 8), frozen_head())
    plain = copy.deepcopy(model)
    _, reducer = started(model, per=per)
    with pytest.warns(RuntimeWarning, match=f"{per}s of the measured layer are in another order"):
        losses_on(0, *shape)(model).sum().backward()
    losses_on(0, *shape)(plain).sum().backward()
    assert torch.equal(*(flat([p.grad for p in trained(net)]) for net in (model, plain)))
    losses_on(1, *shape)(model).sum().backward()
    assert report_of(reducer).fallbacks == 2


class TestSecondPass:
    def test_computes_no_parameters_gradient(self) -> None:
        """Nothing is accumulated twice: hooks on accumulation run once per parameter."""
        model = Blocks()
        started(model)
        counts: dict[int, int] = {}
        for p in trained(model):
            p.register_post_accumulate_grad_hook(
                lambda q: counts.__setitem__(id(q), counts.get(id(q), 0) + 1)
            )
        losses_on(0, 12, 5)(model).sum().backward()
        assert len(counts) == len(trained(model))
        assert set(counts.values()) == {1}

    def test_stops_at_the_layer_and_starts_below_a_frozen_head(self) -> None:
        """Gradients at the head's output and below the layer are computed once, between twice."""
        model = Blocks()
        started(model)
        losses_on(0, 12, 5)(model).sum().backward()  # a third time, the first step checks more
        seen = {"head": 0, "feed": 0, "first block": 0}

        def count(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                def arrived(gradient: Tensor) -> None:
                    seen[name] += 1

                output.register_hook(arrived)

            return hook

        model.head.register_forward_hook(count("head"))
        model.blocks[1].feed.register_forward_hook(count("feed"))
        model.blocks[0].register_forward_hook(count("first block"))
        losses_on(1, 12, 5)(model).sum().backward()
        assert seen == {"head": 1, "feed": 2, "first block": 1}

    def test_an_error_in_it_leaves_the_step_plain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: Any) -> None:
            raise KeyError("broken")

        monkeypatch.setattr("primum.outlet.Outlet.carry", broken)
        model = lora_below()
        _, reducer = started(model)
        plain = copy.deepcopy(model)
        with pytest.warns(RuntimeWarning, match="fell back to plain gradients: KeyError: 'broken'"):
            losses_on(0, 12)(model).sum().backward()
        losses_on(0, 12)(plain).sum().backward()
        assert torch.equal(*(flat([p.grad for p in trained(net)]) for net in (model, plain)))
        report = report_of(reducer)
        assert (report.applied, int(report.fallbacks)) == (False, 1)
        assert len(report.extra_weights) == 12

    def test_torch_that_does_not_say_which_node_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("primum.outlet.current_node", lambda: None)
        model = HEADS["weight norm"][0]()
        started(model)
        with pytest.warns(RuntimeWarning, match="does not expose the current"):
            losses_on(0, 12)(model).sum().backward()


@pytest.mark.parametrize("name", HEADS)
def test_radius_0_and_observe_are_plain_training(name: str) -> None:
    results = []
    for how in ("plain", "radius 0", "observe"):
        torch.manual_seed(0)
        model = HEADS[name][0]()
        optimizer = optim.AdamW(trained(model), **ADAMW)
        if how == "radius 0":
            primum.attach(model, optimizer, radius=0)
        elif how == "observe":
            primum.observe(model, optimizer)
        for number in range(3):
            optimizer.zero_grad()
            losses_on(number, 12)(model).sum().backward()
            optimizer.step()
        results.append(flat(trained(model)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_checkpointed_batch_norm_counts_as_without() -> None:
    """The second pass runs a checkpointed part again, and its batches do not count."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 8)
            self.norm = nn.BatchNorm1d(8)
            self.head = nn.Linear(8, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            after = nn.Sequential(self.norm, nn.Tanh(), self.head)
            return checkpoint(after, self.body(x), use_reentrant=False)

    torch.manual_seed(0)
    model = Checkpointed()
    plain = copy.deepcopy(model)
    reducer = primum.attach(model, optim.SGD(trained(model), lr=0.1))
    buffers = list(model.buffers())
    inputs = torch.ones(12, 6).cumsum(0)
    with pytest.warns(RuntimeWarning, match="batch norm"):
        model(inputs).square().sum().backward()
    for each in (plain, model, plain, model, plain):
        each(inputs).square().sum().backward()
    assert report_of(reducer).applied
    assert all(one is other for one, other in zip(model.buffers(), buffers, strict=True))
    for found, expected in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, expected)


class TestLoops:
    """What the loop does around the backward pass."""

    def test_accumulation_clipping_and_a_scaler(self) -> None:
        """Each half has weights of its own, and the clipping of the last step is expected."""
        torch.manual_seed(0)
        model = lora_below().double()
        optimizer = optim.SGD(trained(model), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        reducer = primum.attach(model, optimizer, scaler=scaler)
        layer, most = model[2].mix.lora_b, 0.0
        for number in range(6):
            twin, _ = twins(model, [optimizer])
            for half in range(2):
                losses_of = losses_on(10 * number + half, 12)
                scaler.scale(losses_of(model).sum() / 2).backward()
                w = report_of(reducer).extra_weights
                most = max(most, float(w.max()))
                ((1 + w) * losses_of(twin)).sum().div(2).backward()
            scaler.unscale_(optimizer)
            found, wanted = (flat([p.grad for p in trained(each)]) for each in (model, twin))
            assert (found - wanted).norm() <= 1e-10 * wanted.norm()
            length = nn.utils.clip_grad_norm_(trained(model), 0.05)
            before = layer.weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert (layer.weight - before).norm() > 0
            measured = reducer.state_dict()["factor"]
            torch.testing.assert_close(measured.item(), (0.05 / length).item(), rtol=1e-4, atol=0)
        assert most > 0.01
        assert report_of(reducer).fallbacks == 0

    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
    def test_second_order(self) -> None:
        """`create_graph=True`: the weights go in, and a second gradient can be taken."""
        torch.manual_seed(0)
        model = lora_below().double()
        _, reducer = started(model)
        twin = copy.deepcopy(model)
        losses_on(0, 12)(model).sum().backward(create_graph=True)
        w = report_of(reducer).extra_weights
        ((1 + w) * losses_on(0, 12)(twin)).sum().backward()
        found, wanted = (flat([p.grad for p in trained(net)]) for net in (model, twin))
        assert (found - wanted).norm() <= 1e-10 * wanted.norm()
        assert trained(model)[0].grad.requires_grad
        model.zero_grad()

    def test_two_losses_on_one_graph(self) -> None:
        """Each backward pass has weights of its own."""
        torch.manual_seed(0)
        model = lora_below().double()
        _, reducer = started(model)
        twin = copy.deepcopy(model)
        inputs, labels = batch(0, 12)
        logits, others = model(inputs), twin(inputs)
        total = torch.zeros(12, dtype=torch.float64)
        for part in range(2):
            for own in (logits, others):
                losses = F.cross_entropy(own, (labels + part) % 4, reduction="none") / 12
                if own is logits:
                    losses.sum().backward(retain_graph=part == 0)
                else:
                    total = total + (1 + report_of(reducer).extra_weights) * losses
        total.sum().backward()
        assert report_of(reducer).fallbacks == 0
        found, wanted = (flat([p.grad for p in trained(each)]) for each in (model, twin))
        assert (found - wanted).norm() <= 1e-10 * wanted.norm()

    def test_gradients_returned_and_not_accumulated(self) -> None:
        torch.manual_seed(0)
        model = lora_below().double()
        _, reducer = started(model)
        twin = copy.deepcopy(model)
        found = flat(torch.autograd.grad(losses_on(0, 12)(model).sum(), trained(model)))
        w = report_of(reducer).extra_weights
        wanted = flat(torch.autograd.grad(((1 + w) * losses_on(0, 12)(twin)).sum(), trained(twin)))
        assert (found - wanted).norm() <= 1e-10 * wanted.norm()

    def test_gradients_for_other_purposes_stay_plain(self) -> None:
        model = lora_below()
        _, reducer = started(model)
        plain = copy.deepcopy(model)
        inputs = batch(0, 12)[0].float().requires_grad_()
        found, wanted = (
            torch.autograd.grad(each(inputs).square().sum(), inputs)[0] for each in (model, plain)
        )
        assert torch.equal(found, wanted)
        assert reducer.last is None

    def test_paused(self) -> None:
        model = lora_below()
        _, reducer = started(model)
        plain = copy.deepcopy(model)
        with reducer.paused():
            losses_on(0, 12)(model).sum().backward()
        losses_on(0, 12)(plain).sum().backward()
        assert torch.equal(*(flat([p.grad for p in trained(net)]) for net in (model, plain)))
        assert reducer.last is None

    def test_the_layer_frozen_for_a_pass(self) -> None:
        model = lora_below()
        _, reducer = started(model)
        model[2].mix.lora_b.requires_grad_(False)
        losses_on(0, 12)(model).sum().backward()
        assert reducer.last is None

    def test_a_head_that_is_unfrozen_later(self) -> None:
        """It is weighed at its output from then on, so its own gradient is weighted as well."""
        torch.manual_seed(0)
        model = lora_below().double()
        optimizer, reducer = started(model)
        model[4].requires_grad_(True)
        settings: dict[str, Any] = {"head": "2.mix.lora_b", "lr": SGD["lr"]}
        check_step(model, [optimizer], reducer, losses_on(0, 24), **settings)
        assert model[4].weight.grad is not None

    @pytest.mark.parametrize(("shape", "per"), [((24,), "sample"), ((6, 4), "token")])
    def test_the_layer_called_twice(self, shape: tuple[int, ...], per: str) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body, self.head = Residual(6), frozen(nn.Linear(6, 4))

            def forward(self, x: Tensor) -> Tensor:
                logits: Tensor = self.head(self.body(self.body(x)))
                return logits

        torch.manual_seed(0)
        model = Twice().double()
        optimizer, reducer = started(model, per=per, radius=0.4)
        settings: dict[str, Any] = {"head": "body.mix.lora_b", "lr": SGD["lr"], "gain_one": True}
        for number in range(3):
            check_step(model, [optimizer], reducer, losses_on(number, *shape), **settings)


def two_steps(model: nn.Module, optimizer: optim.Optimizer) -> None:
    for number in range(2):
        optimizer.zero_grad()
        losses_on(number, 12)(model).sum().backward()
        optimizer.step()


class TestCompile:
    @pytest.mark.parametrize("whole", [True, False], ids=["model", "block"])
    def test_stays_plain_and_says_so(self, whole: bool) -> None:
        torch.compiler.reset()
        model = lora_below()
        plain = copy.deepcopy(model)
        optimizer = optim.SGD(trained(model), lr=0.1)
        compiled: Any = model
        if whole:
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        else:
            model[2].compile(backend="aot_eager", fullgraph=True)
        reducer = primum.attach(compiled, optimizer)
        with pytest.warns(RuntimeWarning, match="torch.compile hides it.* do not compile anyth"):
            two_steps(compiled, optimizer)
        two_steps(plain, optim.SGD(trained(plain), lr=0.1))
        torch.testing.assert_close(flat(trained(model)), flat(trained(plain)))
        assert reducer.last is None or not reducer.last.applied


class TestLifetime:
    def test_removed_without_a_trace(self) -> None:
        model = lora_below()
        before = [(dict(vars(each)), len(each._forward_hooks)) for each in model.modules()]
        saved = pickle.dumps(model)
        for leave in ("remove", "detach"):
            _, reducer = started(model)
            assert len(model[4]._forward_hooks) == 1
            assert pickle.dumps(model) == saved
            losses_on(0, 12)(model).sum().backward()
            model.zero_grad()
            reducer.remove() if leave == "remove" else primum.detach(model)
            after = [(dict(vars(each)), len(each._forward_hooks)) for each in model.modules()]
            assert after == before

    def test_attaching_again_replaces_what_was_there(self) -> None:
        model = lora_below()
        optimizer, first = started(model)
        second = primum.attach(model, optimizer, head="1.mix.lora_b")  # the same output
        assert "removed" in repr(first)
        assert len(model[4]._forward_hooks) == 1
        losses_on(0, 12)(model).sum().backward()
        assert report_of(second).applied

    @pytest.mark.parametrize("backward", [True, False])
    def test_graphs_are_freed(self, backward: bool) -> None:
        model = lora_below()
        started(model)
        gc.disable()
        try:
            inputs = batch(0, 12)[0].float()
            features = model[:2](inputs)
            kept = weakref.ref(features)
            logits = model[2:](features)
            if backward:
                logits.sum().backward()
            del features, logits
            assert kept() is None
        finally:
            gc.enable()

    def test_the_reducer_need_not_be_kept_and_dies_with_the_model(self) -> None:
        model = lora_below()
        optimizer = optim.SGD(trained(model), lr=0.1)
        found = weakref.ref(primum.attach(model, optimizer))
        assert found() is not None
        losses_on(0, 12)(model).sum().backward()
        del model
        gc.collect()
        assert found() is None

    def test_says_what_is_measured_where(self, caplog: pytest.LogCaptureFixture) -> None:
        model = lora_below()
        with caplog.at_level("INFO", logger="primum"):
            _, reducer = started(model)
        assert "measured in '2.mix.lora_b'; weights are applied at the output of '4'" in caplog.text
        assert "head='2.mix.lora_b' (2 -> 8), weights at '4'" in repr(reducer)
        assert reducer.head_name in reducer.summary_text()


def test_an_output_that_bypasses_the_head_is_warned_of() -> None:
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Residual(6), frozen(nn.Linear(6, 4))
            self.bias = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.body(x)) + self.bias
            return logits

    model = TwoOutputs()
    started(model)
    with pytest.warns(RuntimeWarning, match="the output of 'head' is only part of the model's"):
        losses_on(0, 12)(model)
