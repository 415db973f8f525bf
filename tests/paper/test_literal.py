"""`recipe="paper"` as a whole: over runs, through `attach`, saved and resumed, in trouble."""

import copy
import io
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import primum
from oracles import ask
from paper.explicit import per_sample_gradients
from paper.test_chambolle_pock import NoSync
from paper.transcribed import PaperByHand
from primum.kernel.gram import MatrixFree
from primum.kernel.optimizers.predict import Update
from primum.paper import Paper, PaperSettings, literal
from primum.paper.low_rank import gram_matrices

LR = {"SGD": 0.1, "AdamW": 2e-3}

# Where the paper gives each of its constants; tol it does not give.
CONSTANTS = {
    "radius": 0.2,  # Sec. 5.1
    "max_extra_weight": 2.0,  # Eq. 10
    "gain_rank": 5,  # App. B.2
    "solver_iters": 50,  # App. D.7
    "warm_up_iters": 10,  # App. D.5
    "tol": 1e-5,
    "safety": 0.5,  # App. D.7
    "relaxation": 0.9,  # App. D.7
    "spike_max_raise": 1.25,  # App. C.1
    "spike_momentum": 0.98,  # App. C.1
    "condition_max_raise": 1.25,  # App. C.2
    "condition_momentum": 0.98,  # App. C.2
    "exact_spectrum_up_to": 256,  # App. C.2
}

OTHER = {
    "radius": 0.02,
    "max_extra_weight": 0.3,
    "gain_rank": 2,
    "solver_iters": 23,
    "warm_up_iters": 4,
    "tol": 1e-2,
    "safety": 0.8,
    "relaxation": 0.5,
    "spike_max_raise": 1.0,
    "spike_momentum": 0.2,
    "condition_max_raise": 1.0,
    "condition_momentum": 0.2,
    "exact_spectrum_up_to": 16,
}


def run_of(captured, optimizer: str, batch: int) -> list[tuple[MatrixFree, Update, torch.Tensor]]:
    """The moments of one training run in float64, as the reducer hands them to a recipe."""
    run = []
    for moment in captured:
        if (moment.optimizer, moment.batch) == (optimizer, batch):
            m = moment.double()
            gram = MatrixFree(m.features, m.output_gradients, m.gain, has_bias=True)
            update = Update(m.step, m.gain, LR[optimizer])
            run.append((gram, update, gram.along(m.step)))
    return run


def test_every_constant_of_the_paper_is_a_setting():
    assert {f.name: f.default for f in fields(PaperSettings)} == CONSTANTS
    assert set(OTHER) == set(CONSTANTS)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"radius": -0.1}, "radius must be >= 0 and finite, got -0.1"),
        ({"tol": float("nan")}, "tol must be >= 0"),
        ({"safety": float("inf")}, "safety must be >= 0 and finite"),
        ({"solver_iters": 2.5}, "solver_iters must be an integer, got 2.5"),
        ({"gain_rank": 0}, "gain_rank must be > 0"),
        ({"max_extra_weight": 0.0}, "max_extra_weight"),
        ({"condition_max_raise": 0.9}, "condition_max_raise must be >= 1, got 0.9"),
        ({"spike_momentum": 1.5}, "spike_momentum must be <= 1, got 1.5"),
    ],
)
def test_bad_settings_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        PaperSettings(**bad)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("batch", [32, 128, 512])
def test_follows_the_paper_over_a_run(captured, optimizer, batch):
    """Eq. 10 and Eq. 14 with guards, spectrum, rank-5 gain and solver; B = 512 is Lanczos.

    Lanczos loses orthogonality once its largest value has converged, and then magnifies rounding,
    in which numpy and torch differ: its smallest value, and so the condition, is not compared.
    """
    ours, by_hand, tolerance = Paper(), PaperByHand(), 1e-4 if batch == 512 else 1e-6
    for gram, update, drift in run_of(captured, optimizer, batch):
        solution = ask(ours, gram, update, drift)
        expected = by_hand.step(gram, update)
        np.testing.assert_allclose(solution.extra_weights.numpy(), expected, atol=tolerance)
    averages = ours.state_dict()["averages"]
    assert averages["spike"].item() == pytest.approx(by_hand.ema_dg, rel=1e-9)
    assert ("condition_2" in averages) == (optimizer == "AdamW")
    if batch < 512:
        assert averages["condition"].item() == pytest.approx(by_hand.kappa_bar, rel=1e-4)
        if optimizer == "AdamW":
            assert averages["condition_2"].item() == pytest.approx(by_hand.kappa_bar_2, rel=1e-4)


def eventful_run() -> list[tuple[MatrixFree, Update, torch.Tensor]]:
    """Made up so that every setting matters: well conditioned, with a spike and with duplicates."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    run = []
    for i in range(8):
        features, gradients = normal(30, 120), 0.02 * normal(30, 6) * normal(30, 1).exp()
        features[:, -1] = 1.0
        if i == 5:
            features[1], gradients[1] = features[0], gradients[0]
        gain = normal(6, 120).exp()
        gram = MatrixFree(features, gradients, gain, has_bias=True)
        step = normal(6, 120) - gain * (gradients.t() @ features)
        run.append((gram, Update(step, gain, 1.5 if i == 3 else 0.5), gram.along(step)))
    return run


@pytest.mark.parametrize("name", CONSTANTS)
def test_every_setting_does_what_it_says(name):
    """Each alone moved away from the paper's value."""
    settings = PaperSettings(**{name: OTHER[name]})
    ours, by_hand, default, differs = Paper(settings), PaperByHand(settings), Paper(), 0.0
    for gram, update, drift in eventful_run():
        found = ask(ours, gram, update, drift).extra_weights
        # Lanczos magnifies rounding, see above.
        tolerance = 1e-5 if name == "exact_spectrum_up_to" else 1e-9
        np.testing.assert_allclose(found.numpy(), by_hand.step(gram, update), atol=tolerance)
        differs += (found - ask(default, gram, update, drift).extra_weights).abs().sum().item()
    assert differs > 1e-3


def test_the_report_is_on_the_problem_before_the_guards():
    recipe = Paper()
    for gram, update, drift in eventful_run():
        solution = ask(recipe, gram, update, drift)
        matrix, _ = gram_matrices(gram, 5)
        after = drift - matrix @ solution.extra_weights
        torch.testing.assert_close(solution.drift_after, after, rtol=1e-9, atol=1e-12)
        assert solution.objective.item() == pytest.approx(after.clamp_min(0).sum().item())
        assert solution.lower_bound.isnan()  # the method has no certificate


def test_the_spectral_norm_is_reused(captured, monkeypatch):
    """One spectrum for SGD, two for AdamW, and the first one's largest value goes to the solver."""
    sizes, norms, solver = [], [], literal.chambolle_pock
    eigvalsh = torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda m: sizes.append(len(m)) or eigvalsh(m))
    monkeypatch.setattr(
        literal, "chambolle_pock", lambda p, n, **k: norms.append((p, n)) or solver(p, n, **k)
    )
    for optimizer, expected in (("SGD", [32]), ("AdamW", [32, 32])):
        sizes.clear()
        ask(Paper(), *run_of(captured, optimizer, 32)[5])
        assert sizes == expected
        problem, norm = norms[-1]
        assert norm.item() == pytest.approx(np.linalg.norm(problem.gram.numpy(), 2), rel=1e-10)


def small_model() -> nn.Sequential:
    rng = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).double()
    for param in model.parameters():
        nn.init.normal_(param, std=0.5, generator=rng)
    return model


def batches(count: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 6, generator=rng, dtype=torch.float64),
            torch.randint(4, (size,), generator=rng),
        )
        for _ in range(count)
    ]


OPTIMIZERS = {
    "SGD": lambda params: SGD(params, lr=0.5, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda params: AdamW(params, lr=0.02, weight_decay=0.1),
}


def gain_of_the_paper(optimizer, params, gradients) -> torch.Tensor | float:
    """kappa of Eq. 12, from the optimizer's state before the step."""
    if isinstance(optimizer, SGD):
        return 1.0
    columns = []
    for param, g in zip(params, gradients, strict=True):
        state, group = optimizer.state.get(param, {}), optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        t = int(state.get("step", 0)) + 1
        v = beta2 * state.get("exp_avg_sq", torch.zeros_like(g)) + (1 - beta2) * g**2
        kappa = (1 - beta1) / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
        columns.append(kappa.reshape(len(kappa), -1))
    return torch.cat(columns, 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("batch", [16, 270])
def test_attached_it_is_algorithm_1(name, batch):
    """The oracle takes the real step of a copy, explicit gradients and the formula of kappa."""
    model, by_hand = small_model(), PaperByHand()
    optimizer = OPTIMIZERS[name](model.parameters())
    reducer = primum.attach(model, optimizer, recipe="paper")
    weighted = 0
    for inputs, labels in batches(12 if batch == 16 else 4, batch):
        optimizer.zero_grad()
        plain, stepper = copy.deepcopy((model, optimizer))  # without the hook
        nn.functional.cross_entropy(plain(inputs), labels).backward()
        gradients = [p.grad.clone() for p in plain[-1].parameters()]
        gain = gain_of_the_paper(stepper, list(plain[-1].parameters()), gradients)
        rows = per_sample_gradients(plain, list(plain.parameters()), inputs, labels)
        before = [p.detach().clone() for p in plain[-1].parameters()]
        stepper.step()
        moved = [p.detach() - b for p, b in zip(plain[-1].parameters(), before, strict=True)]
        step = torch.cat([moved[0], moved[1].unsqueeze(1)], 1) / stepper.param_groups[0]["lr"]

        losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        losses.mean().backward()
        found = reducer.last.extra_weights

        with torch.no_grad():
            outputs = model(inputs)
        outputs.requires_grad_()
        nn.functional.cross_entropy(outputs, labels).backward()
        features = nn.functional.pad(model[:-1](inputs).detach(), (0, 1), value=1.0)
        gram = MatrixFree(features, outputs.grad, gain, has_bias=True)
        expected = by_hand.step(gram, Update(step, gain, stepper.param_groups[0]["lr"]))
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
        weighted += (found > 1e-3).sum().item()

        total = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(total, rows.t() @ (1 + found), rtol=1e-9, atol=1e-12)
        optimizer.step()
    assert weighted > batch / 8


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_drift_is_the_first_order_change_of_each_loss(name):
    """Eq. 1, by really stepping: L_i changes by B * lr * drift_i, up to the square of lr."""
    model = nn.Linear(6, 4).double()
    optimizer = OPTIMIZERS[name](model.parameters())
    optimizer.param_groups[0]["lr"] = lr = 1e-6
    with primum.observe(model, optimizer, recipe="paper") as reducer:
        for inputs, labels in batches(4, 16):
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
            losses.mean().backward()
            optimizer.step()
            with torch.no_grad():
                after = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
            expected = 16 * reducer.last.drift
            torch.testing.assert_close((after - losses) / lr, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_radius_zero_is_plain_training_bit_for_bit(name):
    ends = []
    for attached in (False, True):
        model = small_model()
        optimizer = OPTIMIZERS[name](model.parameters())
        if attached:
            primum.attach(model, optimizer, recipe="paper", radius=0.0)
        for inputs, labels in batches(5, 16):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("batch", [16, 270])
def test_a_resumed_run_continues_bit_for_bit(name, batch):
    """270 samples: Lanczos draws its start from a generator that is seeded by the step."""

    def train(model, optimizer, reducer, data):
        for inputs, labels in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        return [*(p.detach() for p in model.parameters()), reducer.last.extra_weights]

    def fresh():
        model = small_model()
        optimizer = OPTIMIZERS[name](model.parameters())
        return model, optimizer, primum.attach(model, optimizer, recipe="paper")

    data, whole, first, second = batches(6, batch), fresh(), fresh(), fresh()
    straight = train(*whole, data)
    train(*first, data[:3])
    saved = io.BytesIO()
    torch.save([each.state_dict() for each in first], saved)
    saved.seek(0)
    for each, state in zip(second, torch.load(saved, weights_only=True), strict=True):
        each.load_state_dict(state)
    resumed = train(*second, data[3:])
    assert all(torch.equal(one, other) for one, other in zip(straight, resumed, strict=True))


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_lr_of_zero_gives_no_extra_weights(captured, optimizer):
    """As at the start of a warm-up; the run goes on from there."""
    (gram, update, drift), *_ = run_of(captured, optimizer, 32)
    recipe, later = Paper(), Paper()
    still = ask(recipe, gram, replace(update, lr=0.0), drift)
    assert torch.equal(still.extra_weights, torch.zeros_like(drift))
    assert torch.equal(still.drift_after, drift)
    assert still.objective.isfinite()
    moving = ask(recipe, gram, update, drift).extra_weights
    torch.testing.assert_close(moving, ask(later, gram, update, drift).extra_weights)
    assert moving.max() > 0


@pytest.mark.parametrize("lr", [torch.tensor(0.1), torch.tensor([0.1], dtype=torch.float64)])
def test_lr_may_be_a_tensor(captured, lr):
    gram, update, drift = run_of(captured, "SGD", 32)[3]
    expected = ask(Paper(), gram, replace(update, lr=0.1), drift).extra_weights
    found = ask(Paper(), gram, replace(update, lr=lr), drift).extra_weights
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)  # 0.1 in float32


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_step_that_is_not_finite_leaves_no_trace(captured, optimizer, value):
    """First, in the middle: as if it had not happened, but for its report."""
    steps = run_of(captured, optimizer, 32)
    expected, found = Paper(), Paper()
    gram, update, _ = steps[0]
    features = gram.features.clone()
    features[3, 2] = value
    broken = MatrixFree(features, gram.output_gradients, gram.gain, has_bias=True)
    for i, step in enumerate(steps[:3]):
        if i in (0, 2):
            trouble = ask(found, broken, update, broken.along(update.step))
            assert trouble.objective.isposinf()
            assert torch.equal(trouble.extra_weights, torch.zeros(32, dtype=torch.float64))
        again, usual = ask(found, *step), ask(expected, *step)
        assert torch.equal(again.extra_weights, usual.extra_weights)
    assert found.state_dict()["averages"] == expected.state_dict()["averages"]


def test_a_drift_that_is_infinite_is_trouble_too(captured):
    gram, update, drift = run_of(captured, "SGD", 32)[0]
    drift[5] = torch.inf
    trouble = ask(Paper(), gram, update, drift)
    assert trouble.objective.isposinf()
    assert torch.equal(trouble.extra_weights, torch.zeros_like(drift))


def test_without_a_radius_nothing_is_solved_or_remembered(captured):
    recipe = Paper(PaperSettings(radius=0.0))
    gram, update, drift = run_of(captured, "SGD", 32)[0]
    solution = ask(recipe, gram, update, drift)
    assert solution.iterations == 0
    assert torch.equal(solution.drift_after, drift)
    assert recipe.state_dict() == {"calls": 0, "averages": {}}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_poisoned_batch_falls_back_to_plain_gradients(name):
    model = small_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    reducer = primum.attach(model, optimizer, recipe="paper")
    inputs, labels = batches(1, 16)[0]
    inputs[0] = torch.nan
    with pytest.warns(RuntimeWarning, match="not finite"):
        nn.functional.cross_entropy(model(inputs), labels).backward()
    assert reducer.last.fallbacks == 1
    assert torch.equal(reducer.last.extra_weights, torch.zeros(16, dtype=torch.float64))


@pytest.mark.parametrize("gain", [1.0, torch.ones(3, 5)])
def test_gradients_of_zero_are_no_trouble(gain, rng):
    """No weights, and no condition number that could enter the average."""
    features, gradients = torch.ones(4, 5), torch.randn(4, 3, generator=rng)
    usual = MatrixFree(features * torch.rand(4, 5, generator=rng), gradients, gain, has_bias=True)
    nothing = MatrixFree(features, torch.zeros(4, 3), gain, has_bias=True)
    recipe = Paper()
    ask(recipe, usual, Update(torch.ones(3, 5), gain, 0.1), usual.along(torch.ones(3, 5)))
    before = recipe.state_dict()["averages"]
    solution = ask(recipe, nothing, Update(torch.zeros(3, 5), gain, 0.1), torch.zeros(4))
    assert torch.equal(solution.extra_weights, torch.zeros(4))
    assert solution.objective == 0
    after = recipe.state_dict()["averages"]
    assert after["condition"] == before["condition"]
    assert after["spike"] < before["spike"]  # a step of length 0 does count


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("batch", [32, 512])
def test_leaves_the_global_generator_alone_and_waits_for_nothing(captured, optimizer, batch):
    """On the CPU; on a device eigvalsh and svd themselves report to the host."""
    steps, recipe = run_of(captured, optimizer, batch)[:2], Paper()
    before = torch.get_rng_state()
    for step in steps:
        with NoSync():
            ask(recipe, *step)
    assert torch.equal(before, torch.get_rng_state())


def test_observe_leaves_the_gradients_alone():
    model, (inputs, labels) = small_model(), batches(1, 16)[0]
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    plain = copy.deepcopy(model)
    primum.observe(model, optimizer, recipe="paper")
    for each in (plain, model):
        nn.functional.cross_entropy(each(inputs), labels).backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


def test_attach_passes_its_radius_on():
    model = small_model()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    reducer = primum.attach(model, optimizer, recipe="paper", radius=0.3)
    assert reducer._engine.recipe.settings == PaperSettings(radius=0.3)
