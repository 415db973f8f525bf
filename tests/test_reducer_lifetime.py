"""State, removal, memory, copies: what a reducer keeps and what it leaves behind."""

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from loops import SGD, batch, gradients, make, report_of, train
from primum import Primum, Reducer
from primum.guards.summary import RECENT


class TestState:
    @pytest.mark.filterwarnings("ignore:.*discarded before an optimizer:RuntimeWarning")
    def test_pause_and_resume(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        twin, _ = make()
        F.cross_entropy(twin(inputs), labels).backward()

        def step(during_forward: bool, during_backward: bool) -> bool:
            """Whether the gradients were weighed."""
            optimizer.zero_grad()
            reducer._engine.last = None
            reducer.enabled = during_forward
            loss = F.cross_entropy(model(inputs), labels)
            reducer.enabled = during_backward
            loss.backward()
            plain = all(map(torch.equal, gradients(model), gradients(twin)))
            assert plain == (reducer.last is None)
            return not plain

        assert step(True, True)
        assert not step(True, False)
        assert not step(False, False)
        assert step(False, True)
        assert step(True, True)

    def test_round_trip_through_a_file(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        other = optim.SGD(model.parameters(), **SGD)
        held = optimizer.param_groups
        optimizer.param_groups = other.param_groups[:0]
        with pytest.warns(RuntimeWarning, match="no longer holds"):
            train(model, other, 3)
        optimizer.param_groups = held
        file = io.BytesIO()
        torch.save(reducer.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        reducer.remove()
        resumed = primum.attach(model, optimizer)
        resumed.load_state_dict(state)
        train(model, optimizer, 1)  # and no warning: the three are known
        assert report_of(resumed).fallbacks == 3
        assert reducer.state_dict()["fallbacks"] == 3  # a copy was loaded, and is counted on

    def test_loaded_state_is_a_copy(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        state = reducer.state_dict()
        state["fallbacks"] += 5
        assert reducer.state_dict()["fallbacks"] == 0
        reducer.load_state_dict(state)
        state["fallbacks"] += 5
        assert reducer.state_dict()["fallbacks"] == 5

    def test_resuming_is_bit_for_bit(self) -> None:
        one, optimizer = make()
        reducer = primum.attach(one, optimizer)
        train(one, optimizer, 4)
        saved = copy.deepcopy((one.state_dict(), optimizer.state_dict(), reducer.state_dict()))
        train(one, optimizer, 4, first=4)
        two, optimizer = make(seed=1)
        reducer = primum.attach(two, optimizer)
        for each, state in zip((two, optimizer, reducer), saved, strict=True):
            each.load_state_dict(state)
        train(two, optimizer, 4, first=4)
        assert all(map(torch.equal, one.parameters(), two.parameters()))

    def test_mismatch(self) -> None:
        reducer = primum.attach(*make())
        state = reducer.state_dict()
        with pytest.raises(ValueError, match=r"saved with recipe='paper'.*has recipe='primum'"):
            reducer.load_state_dict(state | {"recipe": "paper"})
        del state["fallbacks"]
        with pytest.raises(ValueError, match="fallbacks missing"):
            reducer.load_state_dict(state)


class TestRemove:
    def test_nothing_is_left(self) -> None:
        model, optimizer = make()
        model[2].register_forward_hook(lambda *_: None)
        hooks = dict(model[2]._forward_hooks)
        everything = [dict(vars(m)) for m in model.modules()]
        step_hooks = dict(optimizer._optimizer_step_post_hooks)
        reducer = primum.attach(model, optimizer)
        assert model[2]._forward_hooks != hooks
        train(model, optimizer, 2)
        reducer.remove()
        assert model[2]._forward_hooks == hooks
        assert not model[2]._forward_hooks_with_kwargs
        assert optimizer._optimizer_step_post_hooks == step_hooks
        assert everything == [dict(vars(m)) for m in model.modules()]
        assert reducer.last is None
        reducer.remove()  # again is no error

    def test_context_manager(self) -> None:
        model, optimizer = make()
        with primum.attach(model, optimizer) as reducer:
            train(model, optimizer, 1)
            assert report_of(reducer).applied
        assert not model[2]._forward_hooks
        with pytest.raises(ZeroDivisionError), primum.attach(model, optimizer):
            raise ZeroDivisionError
        assert not model[2]._forward_hooks

    def test_between_forward_and_backward(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        inputs, labels = batch(0, 24)
        loss = F.cross_entropy(model(inputs), labels)
        reducer.remove()
        loss.backward()
        twin, _ = make()
        F.cross_entropy(twin(inputs), labels).backward()
        assert all(map(torch.equal, gradients(model), gradients(twin)))
        assert reducer.last is None

    @pytest.mark.parametrize("removed", [True, False])
    def test_everything_dies_without_the_garbage_collector(self, removed: bool) -> None:
        train(*make(), 1)  # imports
        gc.collect()
        gc.disable()
        try:
            model, optimizer = make()
            reducer = primum.attach(model, optimizer)
            train(model, optimizer, 2)
            refs = [weakref.ref(each) for each in (model, model[2], optimizer, reducer)]
            refs.append(weakref.ref(model[2].weight))
            if removed:
                reducer.remove()
            del model, optimizer, reducer
            assert [ref() for ref in refs] == [None] * 5
        finally:
            gc.enable()

    def test_the_reducer_need_not_be_kept(self) -> None:
        model, optimizer = make()
        primum.attach(model, optimizer)
        gc.collect()
        train(model, optimizer, 3)
        twin, stepper = make()
        train(twin, stepper, 3)
        assert not torch.equal(model[2].weight, twin[2].weight)

    def test_a_thousand_cycles(self) -> None:
        model, optimizer = make()
        inputs, labels = batch(0, 4)

        def cycle() -> None:
            with primum.attach(model, optimizer, recipe=Primum(max_iters=1)):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()

        def size() -> int:
            gc.collect()
            return len(gc.get_objects())

        for _ in range(10):
            cycle()
        before = size()
        for _ in range(1000):
            cycle()
        assert size() - before < 50  # caches of others may grow a little
        assert not model[2]._forward_hooks
        assert not optimizer._optimizer_step_post_hooks


class TestMemory:
    def features_of(self, model: nn.Sequential) -> list[weakref.ref[Tensor]]:
        refs: list[weakref.ref[Tensor]] = []
        model[2].register_forward_pre_hook(lambda _, args: refs.append(weakref.ref(args[0])))
        return refs

    def test_features_go_with_backward_though_the_loss_stays(self) -> None:
        model, optimizer = make()
        primum.attach(model, optimizer)
        refs = self.features_of(model)
        inputs, labels = batch(0, 24)
        loss = F.cross_entropy(model(inputs), labels)
        assert refs[0]() is not None
        loss.backward()
        assert refs[0]() is None
        assert loss.grad_fn is not None

    @pytest.mark.parametrize("explicit", [False, True])
    def test_a_forward_pass_without_backward_leaves_nothing(self, explicit: bool) -> None:
        """Validation in training mode, with gradients: one graph at a time, as without us."""
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        refs = self.features_of(model)
        inputs, labels = batch(0, 24)
        gc.collect()
        gc.disable()
        try:
            losses = F.cross_entropy(model(inputs), labels, reduction="none")
            if explicit:
                reducer(losses)
            del losses
            assert refs[0]() is None
        finally:
            gc.enable()

    @pytest.mark.parametrize("shape", [(96,), (8, 40)])
    @pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
    def test_a_report_keeps_vectors_and_no_matrices(
        self, kind: Any, shape: tuple[int, ...]
    ) -> None:
        """Neither the Gram matrix nor the head's input and gradient stay until the next step."""
        model, optimizer = make(kind, {"lr": 0.01})
        reducer = primum.attach(model, optimizer, recipe=Primum(max_iters=3), per="sample")
        inputs, labels = batch(0, *shape)
        F.cross_entropy(model(inputs).movedim(-1, 1), labels).backward()
        tensors: dict[int, Tensor] = {}
        waiting: list[Any] = [reducer.last]
        while waiting:
            each = waiting.pop()
            if isinstance(each, Tensor):
                tensors[id(each)] = each
            elif isinstance(each, dict | list | tuple):
                waiting.extend(each.values() if isinstance(each, dict) else each)
            elif hasattr(each, "__dict__"):
                waiting.append(vars(each))
        assert len(tensors) >= 4
        assert all(v.grad_fn is None for v in tensors.values())
        points = 3 + 2  # iterations, the start and zero
        assert all(v.untyped_storage().nbytes() <= points * shape[0] * 8 for v in tensors.values())

    def test_steps_leave_no_tensors(self) -> None:
        model, optimizer = make()
        primum.attach(model, optimizer)

        def tensors() -> int:
            gc.collect()
            return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

        full = RECENT + 2  # steps until `summary` has its last reports
        train(model, optimizer, full)
        before = tensors()
        train(model, optimizer, 20, first=full)
        assert tensors() == before


class TestCopies:
    """An EMA copy or a saved model must not carry the optimizer along, nor be weighed."""

    def assert_inert(self, copied: nn.Module, reducer: Reducer, dtype: torch.dtype) -> None:
        report = reducer.last
        inputs, labels = batch(7, 24, dtype=dtype)
        twin, _ = make(dtype=dtype)
        twin.load_state_dict(copied.state_dict())
        for net in (copied, twin):
            net.zero_grad()
            F.cross_entropy(net(inputs), labels).backward()
        assert all(map(torch.equal, gradients(copied), gradients(twin)))
        assert reducer.last is report

    def test_deepcopy(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        train(model, optimizer, 2)
        copied = copy.deepcopy(model)
        self.assert_inert(copied, reducer, torch.float64)
        again = primum.attach(copied, optim.SGD(copied.parameters(), **SGD))
        inputs, labels = batch(0, 24)
        F.cross_entropy(copied(inputs), labels).backward()
        assert report_of(again).applied

    def test_deepcopy_does_not_copy_the_optimizer(self) -> None:
        class Uncopiable(optim.SGD):
            def __deepcopy__(self, memo: Any) -> None:
                raise AssertionError

        model, optimizer = make(Uncopiable)
        model.reducer = primum.attach(model, optimizer)  # a user may keep it there
        train(model, optimizer, 1)
        assert copy.deepcopy(model).reducer is None
        assert pickle.loads(pickle.dumps(model)).reducer is None

    def test_saved_whole(self, tmp_path: Any) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        train(model, optimizer, 2)
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        self.assert_inert(loaded, reducer, torch.float64)
        assert b"primum" not in (tmp_path / "model.pt").read_bytes()  # loads without us

    def test_ema(self) -> None:
        model, optimizer = make()
        reducer = primum.attach(model, optimizer)
        average = optim.swa_utils.AveragedModel(model)
        for number in range(3):
            train(model, optimizer, 1, first=number)
            average.update_parameters(model)
        self.assert_inert(average.module, reducer, torch.float64)
        train(model, optimizer, 1, first=3)
        assert report_of(reducer).fallbacks == 0
