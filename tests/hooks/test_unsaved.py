"""A hook that is on a module, and on no copy, pickle or script of it."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from primum.hooks.unsaved import Hook, hooked


@pytest.fixture
def head() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 4)


def double(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return 2 * output


class Stateful(nn.Linear):
    """Copies itself by a method of its own."""

    restored = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "restored": True}


def test_is_called_and_its_result_counts(head: nn.Linear) -> None:
    inputs = torch.randn(3, 6)
    expected = 2 * head(inputs)
    Hook(head, double)
    assert torch.equal(head(inputs), expected)
    assert torch.equal(head(input=inputs), expected)


def test_on_another_module_without_keywords(head: nn.Linear) -> None:
    """As `torch.ao.quantization.prepare_qat(model, inplace=True)` moves hooks to new modules."""
    Hook(head, double)
    other = copy.deepcopy(head)
    expected = 2 * head.forward(inputs := torch.randn(3, 6))
    for each in head._forward_hooks.values():
        other.register_forward_hook(each)
    assert torch.equal(other(inputs), expected)


@pytest.mark.parametrize("prepend", [True, False])
def test_before_or_after_other_hooks(head: nn.Linear, prepend: bool) -> None:
    seen: list[Tensor] = []
    head.register_forward_hook(double, with_kwargs=True)
    Hook(head, lambda module, args, kwargs, output: seen.append(output), prepend=prepend)
    inputs = torch.randn(3, 6)
    output = head(inputs)
    assert torch.equal(seen[0], output / 2 if prepend else output)


def test_is_found_on_its_module(head: nn.Linear) -> None:
    head.register_forward_hook(lambda *_: None)
    assert hooked(head) == []
    Hook(head, double)
    assert hooked(head) == [double]


def test_removed_one_by_one(head: nn.Linear) -> None:
    state, inputs = dict(vars(head)), torch.randn(3, 6)
    plain = head(inputs)
    one, two = Hook(head, double), Hook(head, double)
    one.remove()
    assert torch.equal(head(inputs), 2 * plain)
    assert not copy.deepcopy(head)._forward_hooks  # the other one is left out still
    two.remove()
    assert dict(vars(head)) == state
    assert torch.equal(head(inputs), plain)
    two.remove()  # again is no error


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda each: pickle.loads(pickle.dumps(each))]
)
def test_copies_have_none(head: nn.Linear, copied: Any) -> None:
    inputs = torch.randn(3, 6)
    plain = head(inputs)
    Hook(head, double)
    other = copied(head)
    assert not other._forward_hooks
    assert not other._forward_hooks_with_kwargs
    assert "__getstate__" not in vars(other)
    assert torch.equal(other(inputs), plain)
    Hook(other, double)  # one of its own
    assert torch.equal(other(inputs), 2 * plain)
    assert torch.equal(head(inputs), 2 * plain)
    assert b"primum" not in pickle.dumps(head)  # loads without us


def test_copies_keep_the_hooks_of_others(head: nn.Linear) -> None:
    inputs = torch.randn(3, 6)
    plain = head(inputs)
    head.register_forward_hook(double, with_kwargs=True)
    Hook(head, double)
    assert torch.equal(head(inputs), 4 * plain)
    assert torch.equal(copy.deepcopy(head)(inputs), 2 * plain)


def test_copies_of_a_class_with_its_own_state() -> None:
    head, inputs = Stateful(6, 4), torch.randn(3, 6)
    plain = head(inputs)
    Hook(head, double)
    copied = copy.deepcopy(head)
    assert copied.restored
    assert torch.equal(copied(inputs), plain)


def test_scripts_do_without_it(head: nn.Linear) -> None:
    inputs = torch.randn(3, 6)
    plain = head(inputs)
    Hook(head, double)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about torch.jit
        scripted = torch.jit.script(head)
    assert torch.equal(scripted(inputs), plain)
