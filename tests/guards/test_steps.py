"""Training that bypasses primum is noticed, counted and warned about once, and nothing else."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim.optimizer import _global_optimizer_post_hooks

import primum
from loops import SGD, batch, make, report_of, train
from primum.guards.steps import Steps
from primum.guards.watchers import Stopwatch
from primum.kernel.head import Plain

BYPASSED = pytest.warns(RuntimeWarning, match=r"bypassed.*torch\.compiler\.reset.*call the head")


class Uncalled(nn.Module):
    """Uses its head's weight without calling the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(x), self.head.weight, self.head.bias)


def test_a_head_that_is_not_called() -> None:
    model = Uncalled().double()
    optimizer = optim.SGD(model.parameters(), **SGD)
    reducer = primum.attach(model, optimizer)
    train(model, optimizer, 1)  # once may be chance
    with BYPASSED:
        train(model, optimizer, 1)
    train(model, optimizer, 5)
    assert reducer.last is None


def test_a_step_that_only_makes_the_state() -> None:
    """As done to load sharded checkpoints: zero gradients, a step, and then real training."""
    model, optimizer = make()
    primum.attach(model, optimizer)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    train(model, optimizer, 3)


def test_paused_and_observing_reducers_are_not_bypassed() -> None:
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    reducer.enabled = False
    train(model, optimizer, 4)
    reducer.remove()
    primum.observe(model, optimizer)
    train(model, optimizer, 4)


def test_an_optimizer_without_hooks() -> None:
    """One that skips `Optimizer.__init__`: it cannot be watched, and works all the same."""

    class Bare(optim.Optimizer):
        def __init__(self, params: list[Tensor], lr: float) -> None:
            self.param_groups = [{"params": params, "lr": lr}]
            self.state: dict[Tensor, dict[str, Tensor]] = {}
            self.defaults = {"lr": lr}

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])

    model, _ = make()
    optimizer = Bare(list(model.parameters()), 0.1)
    with primum.attach(model, optimizer) as reducer:
        for number in range(4):
            inputs, labels = batch(number, 24)
            model.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        assert report_of(reducer).fallbacks == 0
        assert report_of(reducer).extra_weights.max() > 0.01


def test_steps_of_a_head_that_has_changed() -> None:
    model, optimizer = make()
    primum.attach(model, optimizer)
    nn.utils.parametrizations.weight_norm(model[2])
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(2):
        optimizer.step()  # and does not ask a computed weight for its gradient
    with pytest.warns(RuntimeWarning, match="its weight is now computed from other parameters"):
        optimizer.step()


def test_removed() -> None:
    model = Uncalled().double()
    optimizer = optim.SGD(model.parameters(), **SGD)
    primum.attach(model, optimizer).remove()
    train(model, optimizer, 4)


def test_overtaken_only_time_after_time() -> None:
    head = nn.Linear(3, 2)
    optimizer = optim.SGD(head.parameters(), lr=0.1)
    reducer = primum.attach(head, optimizer)

    def overtaken() -> bool:
        try:
            reducer._watch.before_solving(False)
        except Plain:
            return True
        return False

    def ours() -> None:
        reducer._engine.passes += 1
        optimizer.step()

    with reducer.paused():
        head(torch.randn(4, 3)).sum().backward()

    def theirs() -> None:
        with torch.no_grad():
            head.weight.add_(1)

    assert not overtaken()
    theirs()  # a checkpoint is loaded
    assert not overtaken()
    ours()
    assert not overtaken()
    assert not overtaken()  # gradients are accumulated: nobody moves
    theirs()
    assert not overtaken()
    theirs()
    assert overtaken()
    assert overtaken()
    ours()
    assert not overtaken()
    ours()
    theirs()  # weights are clipped after each step
    assert not overtaken()


@pytest.mark.parametrize("foreach", [True, False])
def test_accumulation_schedulers_and_checkpoints_are_no_trouble(foreach: bool) -> None:
    model, optimizer = make(optim.AdamW, {"lr": 0.01, "foreach": foreach})
    reducer = primum.attach(model, optimizer)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for number in range(8):
        optimizer.zero_grad()
        for half in range(2):
            inputs, labels = batch(2 * number + half, 12)
            (F.cross_entropy(model(inputs), labels) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if number == 4:
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert report_of(reducer).fallbacks == 0


def test_the_optimizer_is_left_as_it_was() -> None:
    """It has no hook of ours, in copies and pickles neither; it does not keep us alive."""
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    assert not optimizer._optimizer_step_post_hooks
    assert not copy.deepcopy(optimizer)._optimizer_step_post_hooks
    assert b"primum" not in pickle.dumps(optimizer)
    train(model, optimizer, 1)
    ref = weakref.ref(reducer)
    del model, reducer
    assert ref() is None
    optimizer.step()  # a hook that has nothing to call


def test_one_hook_for_the_process_however_many_there_are() -> None:
    """Models that die without `.remove()` leave nothing that grows; the last one takes the hook."""
    gc.collect()
    for each in list(Steps._all):  # of other tests
        each.remove()
    everyone = len(_global_optimizer_post_hooks)
    for _ in range(5):
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        train(model, optimizer, 1)
    assert len(_global_optimizer_post_hooks) == everyone + 1
    assert len(Steps._all) == 1
    reducer.remove()
    assert len(_global_optimizer_post_hooks) == everyone
    assert not Steps._all


class TestIdle:
    """Steps are made, but nothing is weighed: the reason is looked for, and said once."""

    def test_a_head_that_was_replaced(self) -> None:
        model, optimizer = make()
        primum.attach(model, optimizer)
        model[2] = nn.Linear(8, 4).double()
        other = optim.SGD(model.parameters(), lr=0.1)
        train(model, other, 2)
        with pytest.warns(RuntimeWarning, match="no longer part of the model; attach again"):
            train(model, other, 1)
        train(model, other, 3)

    def test_a_head_that_is_frozen(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        model[2].requires_grad_(False)
        train(model, optimizer, 2)
        with pytest.warns(RuntimeWarning, match=r"frozen \(requires_grad=False\); unfreeze it"):
            train(model, optimizer, 1)
        train(model, optimizer, 3)
        model[2].requires_grad_(True)
        train(model, optimizer, 1)
        assert report_of(reducer).applied
        assert report_of(reducer).fallbacks == 0

    def test_a_head_that_no_loss_depends_on(self) -> None:
        model, optimizer = make()
        primum.attach(model, optimizer)
        inputs, _ = batch(0, 24)

        def step() -> None:
            optimizer.zero_grad()
            model[0](inputs).square().mean().backward()
            optimizer.step()

        step()
        step()
        with pytest.warns(RuntimeWarning, match="no backward pass went .*pass it as head="):
            step()
        step()

    def test_optimizers_of_other_models_do_not_count(self) -> None:
        model, optimizer = make()
        primum.attach(model, optimizer)
        train(*make(seed=1), 5)

    def test_a_step_of_the_head_now_and_then_is_enough(self) -> None:
        """Other parts may have optimizers of their own, that step more often."""
        model, _ = make()
        below = optim.SGD(model[0].parameters(), lr=0.1)
        top = optim.SGD(model[2].parameters(), lr=0.1)
        primum.attach(model, top)
        for number in range(4):
            for _ in range(2):
                below.step()
            train(model, top, 1, first=number)


class TestDiscarded:
    """Weighed gradients that no step used: of a pass that trained something else."""

    def test_cleared_without_a_step(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        train(model, optimizer, 2)
        assert report_of(reducer).discarded == 0
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.zero_grad()
        with pytest.warns(RuntimeWarning, match=r"discarded before an opt.*reducer\.paused\(\)"):
            F.cross_entropy(model(inputs), labels).backward()
        assert report_of(reducer).discarded == 1
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(inputs), labels).backward()
        assert report_of(reducer).discarded == 2
        optimizer.step()
        train(model, optimizer, 2)
        assert report_of(reducer).discarded == 2

    def test_accumulated_gradients_are_kept(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        for number in range(6):
            inputs, labels = batch(number, 24)
            F.cross_entropy(model(inputs), labels).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        assert report_of(reducer).discarded == 0

    def test_paused_passes_are_not_weighed(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        for number in range(3):
            with reducer.paused():
                F.cross_entropy(model(inputs), labels).backward()
            train(model, optimizer, 1, first=number)
        assert report_of(reducer).discarded == 0
        assert report_of(reducer).applied


class TestTime:
    def steps(self, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        train(model, optimizer, 1)
        now, stopwatch = 0.0, Stopwatch(reducer._engine)
        monkeypatch.setattr("primum.guards.watchers.time.perf_counter", lambda: now)
        for _ in range(110):
            stopwatch.on_arrival(torch.ones(1), False)
            now += share  # of a second between steps
            stopwatch.on_solution(report_of(reducer))
            now += 1 - share
            stopwatch.after_step(True)

    def test_a_share_above_a_fifth_is_said_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.warns(UserWarning, match="takes 30% of the step time") as caught:
            self.steps(monkeypatch, 0.3)
        assert len(caught) == 1

    def test_a_small_share_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps(monkeypatch, 0.15)
