"""Counted, warned about once."""

import warnings

import pytest
import torch
from primum.trouble import Trouble


def test_counts_and_warns_once_by_kind() -> None:
    trouble = Trouble(torch.device("cpu"))
    with pytest.warns(RuntimeWarning, match="primum: plain gradients in a step: the first"):
        trouble.step("one", "the first")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trouble.step("one", "another of that kind")
        trouble.maybe(torch.tensor(False))
    with pytest.warns(RuntimeWarning, match="values were not finite"):
        trouble.maybe(torch.tensor(True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trouble.maybe(torch.tensor(True))
    assert trouble.count == 4


def test_loaded_counts_are_known() -> None:
    trouble = Trouble(torch.device("cpu"))
    kept = torch.tensor(3)
    trouble.load(kept)
    trouble.maybe(torch.tensor(False))  # a warning would be an error here
    assert trouble.count == 3
    assert trouble.count is not kept
