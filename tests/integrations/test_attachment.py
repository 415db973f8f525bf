"""A Reducer made late: what waits for it, what stays when it is gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import primum
from integrations.plain import FIGURES, network, train
from primum.integrations.attachment import Attachment


def begun(attachment: Attachment) -> tuple[nn.Sequential, SGD]:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    attachment.begin(model, optimizer)
    return model, optimizer


def trained(**settings: Any) -> Attachment:
    attachment = Attachment(settings)
    train(*begun(attachment))
    return attachment


def test_empty_before_it_begins() -> None:
    attachment = Attachment({})
    assert attachment.reducer is None
    assert attachment.last is None
    assert attachment.state_dict() == {}
    assert attachment.figures() == {}
    attachment.end()  # and nothing happens


def test_report_and_state_stay_after_the_end() -> None:
    attachment = trained(recipe="paper")
    last, calls = attachment.last, attachment.state_dict()["recipe_state"]["calls"]
    attachment.end()
    assert attachment.reducer is None
    assert attachment.last is last is not None
    assert attachment.state_dict()["recipe_state"]["calls"] == calls == 10


def test_state_waits_for_the_reducer_or_goes_to_it() -> None:
    state = trained(recipe="paper").state_dict()
    early, late = Attachment({"recipe": "paper"}), Attachment({"recipe": "paper"})
    early.load_state_dict(state)
    alive = begun(early), begun(late)
    late.load_state_dict(state)
    for each in (early, late):
        assert each.state_dict()["recipe_state"]["calls"] == 10
    alive = begun(early), alive[1]  # what waited is used up
    assert early.state_dict()["recipe_state"]["calls"] == 0


def test_forgotten_state() -> None:
    attachment = Attachment({"recipe": "paper"})
    attachment.load_state_dict(trained(recipe="paper").state_dict())
    attachment.forget()
    begun(attachment)
    assert attachment.state_dict()["recipe_state"]["calls"] == 0


def test_beginning_again_removes_the_first() -> None:
    attachment = Attachment({})
    model, optimizer = begun(attachment)
    first = attachment.reducer
    attachment.begin(model, optimizer)  # would raise, were the first still there
    assert attachment.reducer is not first
    attachment.end()
    assert not model[2]._forward_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_each_report_is_logged_once() -> None:
    attachment = trained()
    assert attachment.figures().keys() == FIGURES
    assert attachment.figures() == {"primum/applied": 0.0}  # no pass since
    attachment.end()
    assert attachment.figures() == {}


def test_steps_that_bypass_the_head_are_logged() -> None:
    attachment = Attachment({})
    model, optimizer = begun(attachment)
    assert attachment.figures() == {"primum/applied": 0.0}
    train(model, optimizer)
    assert attachment.figures()["primum/applied"] == 1


def test_the_headline_names_the_layer() -> None:
    attachment = Attachment({})
    begun(attachment)
    assert attachment.headline == "primum: sample weights are applied at the output of 2"


def test_scaler_reaches_attach_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    found, given = torch.amp.GradScaler("cpu", init_scale=4.0), torch.amp.GradScaler("cpu")
    seen: list[Any] = []
    made = [Attachment({}), Attachment({"scaler": given})]
    monkeypatch.setattr(primum, "attach", lambda *_, scaler: seen.append(scaler))
    for attachment in made:
        attachment.begin(network(), None, found)
    assert seen == [found, given]


def test_settings_are_checked_at_once_but_for_the_head() -> None:
    Attachment({"head": "net.fc"})
    with pytest.raises(ValueError, match="recipe must be"):
        Attachment({"recipe": "papre"})
