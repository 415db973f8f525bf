"""The oracles: a deep copy of the model trained on `mean((1 + w) * losses)`; a problem made of
explicit per-sample gradients and of a deep copy of the optimizer that really steps."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

import primum
from loops import (
    ADAMW,
    BOTH,
    PRECISE,
    SGD,
    assert_close,
    batch,
    gradients,
    make,
    make_like,
    report_of,
    slow_solution,
    stir,
    train,
)
from primum import Reducer, Solution, StepReport

# A dozen roundings on sums of a few hundred terms.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.03}


class Lion(optim.Optimizer):
    """An optimizer without a rule: the dry run has to do."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                old = self.state[p].setdefault("m", torch.zeros_like(p))
                p.sub_((0.9 * old + 0.1 * p.grad).sign(), alpha=group["lr"])
                old.mul_(0.99).add_(p.grad, alpha=0.01)


# Losses, each as `loss(output, labels, reduction)`; classes are the last dimension of the output.
Loss = Callable[[Tensor, Tensor, str], Tensor]


def _classes_second(output: Tensor) -> Tensor:
    return output.movedim(-1, 1) if output.dim() > 1 else output


def cross_entropy(output: Tensor, labels: Tensor, reduction: str, **options: Any) -> Tensor:
    return F.cross_entropy(_classes_second(output), labels, reduction=reduction, **options)


def soft_labels(output: Tensor, labels: Tensor, reduction: str) -> Tensor:
    targets = (4.0 * F.one_hot(labels, 4) + torch.arange(4)).softmax(-1).to(output.dtype)
    return F.cross_entropy(_classes_second(output), _classes_second(targets), reduction=reduction)


def smoothed(output: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return cross_entropy(output, labels, reduction, label_smoothing=0.1)


def mixup(output: Tensor, labels: Tensor, reduction: str) -> Tensor:
    other = labels.flip(0)
    return 0.7 * cross_entropy(output, labels, reduction) + 0.3 * cross_entropy(
        output, other, reduction
    )


def bce(output: Tensor, labels: Tensor, reduction: str) -> Tensor:
    targets = F.one_hot(labels, 4).to(output.dtype)
    return F.binary_cross_entropy_with_logits(output, targets, reduction=reduction)


def mse(output: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return F.mse_loss(output, F.one_hot(labels, 4).to(output.dtype), reduction=reduction)


def focal(output: Tensor, labels: Tensor, reduction: str) -> Tensor:
    losses = cross_entropy(output, labels, "none")
    losses = (1 - (-losses).exp()) ** 2 * losses
    return losses if reduction == "none" else getattr(losses, reduction)()


def in_place(output: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return cross_entropy(output.mul_(0.5), labels, reduction)


LOSSES: dict[str, Loss] = {
    each.__name__: each
    for each in (cross_entropy, soft_labels, smoothed, mixup, bce, mse, focal, in_place)
}


def per_sample(losses: Tensor, reduction: str) -> Tensor:
    """Losses of any shape [B, ...] as one per sample, so that their mean or sum is the loss."""
    rows = losses.flatten(1) if losses.dim() > 1 else losses.unsqueeze(1)
    return rows.mean(1) if reduction == "mean" else rows.sum(1)


def check_weighted_gradients(
    model: nn.Module,
    optimizer: optim.Optimizer,
    loss: Loss,
    shape: tuple[int, ...] = (24,),
    reduction: str = "mean",
    steps: int = 4,
) -> None:
    """Each step's gradients are those of the weighted loss on a copy, and the weights matter."""
    dtype = next(model.parameters()).dtype
    reducer = primum.attach(model, optimizer, per="sample")
    most = 0.0
    for number in range(steps):
        inputs, labels = batch(number, *shape, dtype=dtype)
        stir(optimizer)
        twin = copy.deepcopy(model)
        optimizer.zero_grad()
        value = loss(model(inputs), labels, reduction)
        value.backward()
        w = report_of(reducer).extra_weights
        losses = per_sample(loss(twin(inputs), labels, "none"), reduction)
        torch.testing.assert_close(value, getattr(losses, reduction)())
        getattr((1 + w) * losses, reduction)().backward()
        assert_close(gradients(model), gradients(twin), TOLERANCE[dtype])
        assert w.shape == (shape[0],)
        assert ((w >= 0) & (w <= 2)).all()
        most = max(most, float(w.max()))
        optimizer.step()
    assert most > 0.01
    assert report_of(reducer).fallbacks == 0


class TestWeightedGradients:
    @BOTH
    @pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
    def test_losses(self, kind: Any, options: Any, loss: Loss) -> None:
        check_weighted_gradients(*make(kind, options), loss)

    @BOTH
    @pytest.mark.parametrize("loss", [cross_entropy, mse])
    def test_sum(self, kind: Any, options: Any, loss: Loss) -> None:
        check_weighted_gradients(*make(kind, options), loss, reduction="sum")

    @BOTH
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("shape", [(24,), (6, 5), (5, 3, 2), (4, 2, 2, 2), (2, 7)])
    def test_shapes(self, kind: Any, options: Any, bias: bool, shape: tuple[int, ...]) -> None:
        check_weighted_gradients(*make(kind, options, bias=bias), cross_entropy, shape)

    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            (optim.SGD, {"lr": 0.1}),
            (optim.SGD, SGD | {"nesterov": True}),
            (optim.Adam, {"lr": 0.01}),
            (optim.AdamW, ADAMW | {"amsgrad": True}),
            (optim.NAdam, {"lr": 0.01}),
            (optim.RAdam, {"lr": 0.01}),
            (optim.Adamax, {"lr": 0.01}),
            (optim.RMSprop, {"lr": 0.01, "momentum": 0.9}),
            (optim.Adagrad, {"lr": 0.1}),
            (optim.Adadelta, {"lr": 1.0}),
            (Lion, {}),
        ],
    )
    def test_optimizers(self, kind: Any, options: Any) -> None:
        check_weighted_gradients(*make(kind, options), cross_entropy, steps=6)

    @BOTH
    def test_float32(self, kind: Any, options: Any) -> None:
        check_weighted_gradients(*make(kind, options, dtype=torch.float32), cross_entropy)

    def test_maximised_objective(self) -> None:
        """Maximising minus the loss is the same training, seen in a mirror."""
        plain, mirrored = make(), make(optim.SGD, SGD | {"maximize": True})
        reducers = [primum.attach(*plain), primum.attach(*mirrored)]
        for number in range(4):
            inputs, labels = batch(number, 24)
            for (model, optimizer), sign in ((plain, 1), (mirrored, -1)):
                optimizer.zero_grad()
                (sign * F.cross_entropy(model(inputs), labels)).backward()
                optimizer.step()
            one, other = map(report_of, reducers)
            assert one.extra_weights.max() > 0.01
            torch.testing.assert_close(one.extra_weights, other.extra_weights)
            torch.testing.assert_close(one.drift, other.drift)

    @pytest.mark.parametrize("shape", [(1,), (1, 7), ()])
    def test_one_sample_stays_plain(self, shape: tuple[int, ...]) -> None:
        """Also without a batch dimension. Nothing to trade off: no warning, and not counted."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer, per="sample")
        for number in range(4):
            inputs, labels = batch(number, *shape)
            stir(optimizer)
            twin = copy.deepcopy(model)
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels, "mean")
            loss.backward()
            cross_entropy(twin(inputs), labels, "mean").backward()
            assert all(map(torch.equal, gradients(model), gradients(twin)))
            report = report_of(reducer)
            assert not report.applied
            assert "one sample" in report.reason
            assert torch.equal(report.extra_weights, torch.zeros(1))
            assert report.fallbacks == 0
            optimizer.step()
        train(model, optimizer, 1)
        assert report_of(reducer).applied
        assert report_of(reducer).extra_weights.max() > 0.01

    def test_changing_batch_size(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        for number, rows in enumerate((24, 7, 2, 24, 90)):
            train(model, optimizer, 1, first=number, rows=rows)
            assert report_of(reducer).extra_weights.shape == (rows,)
            assert report_of(reducer).applied
        train(model, optimizer, 1, rows=1)
        train(model, optimizer, 1)
        assert report_of(reducer).applied
        assert report_of(reducer).fallbacks == 0

    @pytest.mark.parametrize("rows", [50, 200])  # the head has 36 parameters
    def test_more_samples_than_parameters(self, rows: int) -> None:
        check_weighted_gradients(*make(), cross_entropy, (rows,))

    def test_duplicates_get_what_both_deserve(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 12)
        F.cross_entropy(model(inputs.repeat(2, 1)), labels.repeat(2)).backward()
        w = report_of(reducer).extra_weights
        assert w.max() > 0.01
        torch.testing.assert_close(w[:12], w[12:])

    def test_the_backbone_may_be_frozen(self) -> None:
        model, _ = make()
        model[0].requires_grad_(False)
        optimizer = optim.SGD(model[2].parameters(), **SGD)
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        F.cross_entropy(model(inputs), labels).backward()
        w = report_of(reducer).extra_weights
        twin, _ = make()
        ((1 + w) * F.cross_entropy(twin(inputs), labels, reduction="none")).mean().backward()
        assert w.max() > 0.01
        torch.testing.assert_close(model[2].weight.grad, twin[2].weight.grad)

    def test_head_called_with_a_keyword(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        F.cross_entropy(model[2](input=model[1](model[0](inputs))), labels).backward()
        assert report_of(reducer).extra_weights.max() > 0.01

    @pytest.mark.parametrize("later", [True, False])
    def test_frozen_bias_is_a_constant(self, later: bool) -> None:
        model, optimizer = make()
        model[2].bias.requires_grad_(later)
        reducer = primum.attach(model, optimizer, **PRECISE)
        model[2].bias.requires_grad_(False)
        inputs, labels = batch(0, 24)
        oracle = slow_solution(*make_like(model, optimizer), inputs, labels)
        F.cross_entropy(model(inputs), labels).backward()
        check_against_oracle(report_of(reducer), oracle)
        assert report_of(reducer).extra_weights.max() > 0.01


def check_against_oracle(report: StepReport, oracle: Solution) -> None:
    # The oracle reads the step off parameters of order 1 that move by about 1e-3: twelve digits,
    # of which twenty iterations with divisions by small diagonals leave fewer.
    tight = {"rtol": 1e-6, "atol": 1e-8}
    torch.testing.assert_close(report.extra_weights, oracle.extra_weights, **tight)
    torch.testing.assert_close(report.drift_after, oracle.drift_after, **tight)
    torch.testing.assert_close(report.harm_after, oracle.drift_after.clamp_min(0).sum(), **tight)
    torch.testing.assert_close(report.objective, oracle.objective, **tight)
    torch.testing.assert_close(report.lower_bound, oracle.lower_bound, **tight)


class TestOracle:
    @BOTH
    @pytest.mark.parametrize("bias", [True, False])
    def test_weights(self, kind: Any, options: Any, bias: bool) -> None:
        model, optimizer = make(kind, options, bias=bias)
        reducer = primum.attach(model, optimizer, **PRECISE)
        for number in range(6):
            inputs, labels = batch(number, 24)
            optimizer.zero_grad()
            oracle = slow_solution(*make_like(model, optimizer), inputs, labels)
            F.cross_entropy(model(inputs), labels).backward()
            check_against_oracle(report_of(reducer), oracle)
            assert report_of(reducer).extra_weights.max() > 0.01
            optimizer.step()

    @BOTH
    def test_sequences(self, kind: Any, options: Any) -> None:
        """A sample is a row of the first dimension; its gradient is a sum over positions."""
        model, optimizer = make(kind, options)
        reducer = primum.attach(model, optimizer, per="sample")
        for number in range(4):
            inputs, labels = batch(number, 6, 5)
            optimizer.zero_grad()
            twin, stepper = make_like(model, optimizer)
            params = list(twin[2].parameters())
            losses = F.cross_entropy(twin(inputs).transpose(1, 2), labels, reduction="none").mean(1)
            rows = [torch.autograd.grad(x / 6, params, retain_graph=True) for x in losses]
            g = torch.stack([torch.cat([each.flatten() for each in row]) for row in rows])
            before = torch.cat([p.detach().flatten() for p in params])
            losses.mean().backward()
            stepper.step()
            after = torch.cat([p.detach().flatten() for p in params])
            F.cross_entropy(model(inputs).transpose(1, 2), labels).backward()
            drift = g @ ((after - before) / options["lr"])
            torch.testing.assert_close(report_of(reducer).drift, drift, rtol=1e-8, atol=1e-10)
            optimizer.step()

    @BOTH
    def test_accumulated_gradients_count(self, kind: Any, options: Any) -> None:
        model, optimizer = make(kind, options)
        reducer = primum.attach(model, optimizer, **PRECISE)
        for number in range(4):
            optimizer.zero_grad()
            for half in range(2):
                inputs, labels = batch(2 * number + half, 12)
                oracle = slow_solution(*make_like(model, optimizer), inputs, labels, scale=0.5)
                (F.cross_entropy(model(inputs), labels) / 2).backward()
                check_against_oracle(report_of(reducer), oracle)
            optimizer.step()

    def test_losses_change_as_reported(self) -> None:
        """A small real step changes the losses by lr * drift_after, as far as the head goes."""
        model, optimizer = make(optim.SGD, SGD | {"lr": 1e-6})
        model[0].requires_grad_(False)
        reducer = primum.attach(model, optimizer)
        for number in range(3):
            change = self.real_change(model, optimizer, number)
            report = report_of(reducer)
            # Second order in a step of 1e-6, and losses of order 1 that cancel to 1e-7.
            torch.testing.assert_close(change, report.drift_after, rtol=1e-4, atol=1e-6)
            assert report.harm_after < report.harm_before

    def test_real_harm_is_less_under_adamw_too(self) -> None:
        """There the weights also move the denominators, which the problem takes as fixed."""
        harm = []
        for attach in (primum.observe, primum.attach):
            model, optimizer = make(optim.AdamW, ADAMW)
            model[0].requires_grad_(False)
            train(model, optimizer, 20)
            attach(model, optimizer)
            optimizer.param_groups[0]["lr"] = 1e-6
            harm.append(self.real_change(model, optimizer, 20).clamp_min(0).sum())
        assert harm[1] < 0.9 * harm[0]

    def real_change(self, model: nn.Module, optimizer: optim.Optimizer, number: int) -> Tensor:
        inputs, labels = batch(number, 24)
        optimizer.zero_grad()
        before = F.cross_entropy(model(inputs), labels, reduction="none")
        before.mean().backward()
        optimizer.step()
        after = F.cross_entropy(model(inputs), labels, reduction="none")
        return (after - before).detach() / len(labels) / optimizer.param_groups[0]["lr"]


def run(
    steps: int,
    attach: Callable[..., Reducer] | None,
    kind: Any,
    options: Any,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> tuple[list[Tensor], list[Any], Tensor]:
    """Parameters, optimizer state and random state after some steps with dropout."""
    model, optimizer = make(kind, options, dtype=dtype)
    model.insert(2, nn.Dropout(0.1))
    if attach is not None:
        reducer = attach(model, optimizer, head="3", **settings)
    train(model, optimizer, steps)
    if attach is not None:
        assert report_of(reducer).harm_before > 0
    state = [v for each in optimizer.state.values() for v in each.values()]
    return list(model.parameters()), state, torch.get_rng_state()


class TestPlainTraining:
    @BOTH
    @pytest.mark.parametrize(
        ("attach", "settings"), [(primum.observe, {}), (primum.attach, {"radius": 0})]
    )
    def test_bit_for_bit(self, attach: Any, settings: Any, kind: Any, options: Any) -> None:
        plain = run(50, None, kind, options)
        ours = run(50, attach, kind, options, **settings)
        for one, other in zip(plain[0] + plain[1], ours[0] + ours[1], strict=True):
            assert torch.equal(one, other)
        assert torch.equal(plain[2], ours[2])

    @pytest.mark.parametrize("over", [0, 1])
    def test_bit_for_bit_with_gradients_that_are_expanded(self, over: int) -> None:
        """The sum of a bias's gradient depends on the strides of what arrives at the output."""
        found = []
        for radius in (None, 0):
            torch.manual_seed(0)
            model = nn.Linear(33, 5)
            if radius is not None:
                primum.attach(model, optim.SGD(model.parameters(), lr=0.1), radius=radius)
            model(torch.randn(37, 33)).sum(over).square().mean().backward()
            found.append(gradients(model))
        assert all(map(torch.equal, *found))

    @BOTH
    def test_attach_changes_it_and_draws_no_random_numbers(self, kind: Any, options: Any) -> None:
        plain, ours = run(5, None, kind, options), run(5, primum.attach, kind, options)
        assert not torch.equal(plain[0][0], ours[0][0])
        assert torch.equal(plain[2], ours[2])

    def test_observe_reports_what_attach_would_do(self) -> None:
        one, other = make(), make()
        attached, watcher = primum.attach(*one), primum.observe(*other)
        for model, _ in (one, other):
            inputs, labels = batch(0, 24)
            F.cross_entropy(model(inputs), labels).backward()
        report, observed = report_of(attached), report_of(watcher)
        assert torch.equal(report.extra_weights, observed.extra_weights)
        assert (report.applied, report.reason) == (True, "")
        assert (observed.applied, observed.reason) == (False, "observe")


class TestPrecision:
    """The problem is in float32 whatever the model is in, and in float64 for float64."""

    @BOTH
    def test_autocast(self, kind: Any, options: Any) -> None:
        model, optimizer = make(kind, options, dtype=torch.float32)
        reducer = primum.attach(model, optimizer)
        for number in range(3):
            inputs, labels = batch(number, 24, dtype=torch.float32)
            twin = copy.deepcopy(model)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            w = report_of(reducer).extra_weights
            assert w.dtype == torch.float32
            assert w.max() > 0.01
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses = F.cross_entropy(twin(inputs), labels, reduction="none")
            ((1 + w) * losses).mean().backward()
            assert_close(gradients(model), gradients(twin), TOLERANCE[torch.bfloat16])
            optimizer.step()
        assert report_of(reducer).fallbacks == 0

    @pytest.mark.parametrize(
        ("kind", "options", "dtype"),
        [  # AdamW's second moments underflow in float16, with us and without
            (optim.SGD, SGD, torch.float16),
            (optim.SGD, SGD, torch.bfloat16),
            (optim.AdamW, ADAMW, torch.bfloat16),
        ],
    )
    def test_half_precision_model(self, kind: Any, options: Any, dtype: torch.dtype) -> None:
        model, optimizer = make(kind, options, dtype=dtype)
        reducer = primum.attach(model, optimizer)
        for number in range(3):
            inputs, labels = batch(number, 24, dtype=dtype)
            twin = copy.deepcopy(model)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            report = report_of(reducer)
            w = report.extra_weights
            assert {w.dtype, report.drift.dtype, report.objective.dtype} == {torch.float32}
            assert w.max() > 0.01
            losses = F.cross_entropy(twin(inputs).float(), labels, reduction="none")
            ((1 + w) * losses).mean().backward()
            assert_close(gradients(model), gradients(twin), TOLERANCE[torch.bfloat16])
            assert all(p.grad.dtype == dtype for p in model.parameters())
            optimizer.step()
        assert report_of(reducer).fallbacks == 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_dtype_of_the_report(self, dtype: torch.dtype) -> None:
        model, optimizer = make(dtype=dtype)
        reducer = primum.attach(model, optimizer)
        train(model, optimizer, 1)
        assert report_of(reducer).drift.dtype == dtype


class Count(TorchDispatchMode):
    """The names of the operations that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class TestCost:
    def operations(self, kind: Any, options: Any, bias: bool, max_iters: int | None) -> list[str]:
        """What forward and backward dispatch in the third step."""
        model, optimizer = make(kind, options, bias=bias, dtype=torch.float32)
        if max_iters is not None:  # a radius at which no configuration is solved in that many
            recipe = primum.Primum(radius=0.5, max_iters=max_iters, tolerance=0)
            reducer = primum.attach(model, optimizer, recipe=recipe)
        train(model, optimizer, 2)
        inputs, labels = batch(3, 24, dtype=torch.float32)
        optimizer.zero_grad()
        with Count() as count:
            F.cross_entropy(model(inputs), labels).backward()
        if max_iters is not None:
            assert report_of(reducer).solution.iterations == max_iters
        return count.names

    @BOTH
    @pytest.mark.parametrize("bias", [True, False])
    def test_operations(self, kind: Any, options: Any, bias: bool) -> None:
        options = options | {"foreach": False}
        plain = len(self.operations(kind, options, bias, None))
        three = len(self.operations(kind, options, bias, 3))
        thirteen = self.operations(kind, options, bias, 13)
        per_iteration = (len(thirteen) - three) / 10
        assert per_iteration <= 16
        assert len(thirteen) - plain - 13 * per_iteration <= 80
        assert "aten._local_scalar_dense.default" not in thirteen

    def test_features_are_kept_by_reference(self) -> None:
        """A forward pass through the head dispatches nothing of ours."""
        model, optimizer = make()
        inputs, _ = batch(0, 24)
        with Count() as plain:
            model(inputs)
        primum.attach(model, optimizer)
        with Count() as hooked:
            model(inputs)
        assert hooked.names == plain.names


# Scales of whole samples; duplicates and zeros come with them.
SCALES = st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 1.0, 1.0, 1e3, 1e6])


@pytest.mark.filterwarnings("ignore:.*by more than its own length")
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 9), SCALES, SCALES), min_size=2, max_size=60),
    adaptive=st.booleans(),
    bias=st.booleans(),
    radius=st.sampled_from([0, 1e-3, 0.2, 10]),
    most=st.sampled_from([0.1, 2, 50]),
    stirred=st.booleans(),
)
def test_ugly_batches(
    rows: list[tuple[int, float, float]],
    adaptive: bool,
    bias: bool,
    radius: float,
    most: float,
    stirred: bool,
) -> None:
    """Few samples, duplicates, zero gradients, scales of 1e-6 and 1e6: finite, within bounds."""
    kind, options = (optim.AdamW, ADAMW) if adaptive else (optim.SGD, SGD)
    model, optimizer = make(kind, options, bias=bias, dtype=torch.float32)
    recipe = primum.Primum(max_extra_weight=most, radius=radius)
    reducer = primum.attach(model, optimizer, recipe=recipe)
    pool = torch.randn(10, 6)
    targets = torch.randn(10, 4)
    which = [each[0] for each in rows]
    inputs, aims = pool[which], targets[which]
    feature_scale = torch.tensor([[each[1]] for each in rows])
    gradient_scale = torch.tensor([[each[2]] for each in rows])
    for _ in range(2):
        optimizer.zero_grad()
        features = model[1](model[0](inputs)) * feature_scale
        (model[2](features) * aims * gradient_scale).sum(1).mean().backward()
        report = report_of(reducer)
        w = report.extra_weights
        assert w.shape == (len(rows),)
        assert ((w >= 0) & (w <= most * (1 + 1e-6))).all()
        assert all(g.isfinite().all() for g in gradients(model))
        assert report.fallbacks == 0
        assert report.gap >= 0
        # Never worse than plain, but for rounding.
        assert report.harm_after <= report.harm_before * (1 + 1e-4) + 1e-30
        if radius == 0:
            assert not w.any()
        optimizer.step()
        if stirred:
            stir(optimizer)
