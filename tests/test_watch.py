"""Training that goes past us is noticed, and nothing else is."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from primum.watch import Watch
from torch import Tensor, nn, optim

import primum
from loops import SGD, batch, make, report_of, train

SILENT = pytest.warns(RuntimeWarning, match=r"nothing is weighed.*torch\.compiler\.reset.*call the")


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
    with SILENT:
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


def test_steps_without_the_head() -> None:
    """Another part is trained first: no gradient of the head, nothing to say."""
    model, optimizer = make()
    reducer = primum.attach(model, optimizer)
    inputs, _ = batch(0, 24)
    for _ in range(5):
        optimizer.zero_grad()
        model[0](inputs).square().mean().backward()
        optimizer.step()
    assert reducer.last is None


def test_paused_reducers_and_watchers_are_heard_all_the_same() -> None:
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


def test_steps_of_a_head_that_has_changed_or_gone() -> None:
    model, optimizer = make()
    primum.attach(model, optimizer)
    nn.utils.parametrizations.weight_norm(model[2])
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(3):
        optimizer.step()  # and does not ask a computed weight for its gradient
    watch = Watch(optimizer, nn.Linear(3, 2), lambda *_: None)
    optimizer.step()
    watch.remove()


def test_removed() -> None:
    model = Uncalled().double()
    optimizer = optim.SGD(model.parameters(), **SGD)
    primum.attach(model, optimizer).remove()
    train(model, optimizer, 4)


def test_overtaken_only_time_after_time() -> None:
    head = nn.Linear(3, 2)
    optimizer = optim.SGD(head.parameters(), lr=0.1)
    watch = Watch(optimizer, head, lambda *_: None)

    def ours() -> None:
        head(torch.randn(4, 3)).sum().backward()
        watch.hear()
        optimizer.step()

    def theirs() -> None:
        with torch.no_grad():
            head.weight.add_(1)

    assert not watch.overtaken(head)
    theirs()  # a checkpoint is loaded
    assert not watch.overtaken(head)
    ours()
    assert not watch.overtaken(head)
    assert not watch.overtaken(head)  # gradients are accumulated: nobody moves
    theirs()
    assert not watch.overtaken(head)
    theirs()
    assert watch.overtaken(head)
    assert watch.overtaken(head)
    ours()
    assert not watch.overtaken(head)
    ours()
    theirs()  # weights are clipped after each step
    assert not watch.overtaken(head)


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
    """Its copies and pickles know nothing of us; it does not keep us alive."""
    model, optimizer = make()
    watch = Watch(optimizer, model[2], lambda *_: None)
    assert len(optimizer._optimizer_step_post_hooks) == 1
    assert not copy.deepcopy(optimizer)._optimizer_step_post_hooks
    assert b"primum" not in pickle.dumps(optimizer)
    ref = weakref.ref(watch)
    del watch
    assert ref() is None
    optimizer.step()  # a hook that has nothing to call
    gc.collect()
