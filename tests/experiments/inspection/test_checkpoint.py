"""Checkpoints: what may be in them, and what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from primum.experiments.inspection import InspectError
from primum.experiments.inspection.checkpoint import Loaded, load_checkpoint


def made(width: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = made()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_model_optimizer_and_step(tmp_path: Path) -> None:
    first, optimizer = trained()
    states = {"model": first.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    torch.save(states, tmp_path / "x.pt")
    model, other = made()
    assert load_checkpoint(tmp_path / "x.pt", model, other) == Loaded(7, with_optimizer=True)
    assert torch.equal(weights(model), weights(first))
    assert len(other.state) == 4


def test_a_bare_state_dict_starts_the_optimizer_anew(tmp_path: Path) -> None:
    first, _ = trained()
    torch.save(first.state_dict(), tmp_path / "x.pt")
    model, other = trained()
    assert load_checkpoint(tmp_path / "x.pt", model, other) == Loaded(None, with_optimizer=False)
    assert torch.equal(weights(model), weights(first))
    assert len(other.state) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (made(4)[0].state_dict(), "does not fit the model: size mismatch"),
        ({"model": {"other.weight": torch.ones(2)}}, "does not fit the model"),
        ({"model": "words"}, "does not fit the model"),
        ([1, 2], "holds a list"),
        ({"model": made()[0].state_dict(), "optimizer": {"state": {}}}, "optimizer does not fit"),
    ],
)
def test_what_does_not_fit_is_told(content: object, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(InspectError, match=message) as caught:
        load_checkpoint(tmp_path / "x.pt", *made())
    assert "x.pt" in str(caught.value)


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(InspectError, match="does not exist"):
        load_checkpoint(tmp_path / "x.pt", *made())
    (tmp_path / "x.pt").write_text("not a checkpoint")
    with pytest.raises(InspectError, match="cannot be read"):
        load_checkpoint(tmp_path / "x.pt", *made())
