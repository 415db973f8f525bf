"""Lightning's toggled optimizers say whose pass it is: the generator's is left alone, silently."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from primum.integrations.lightning import PrimumCallback

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers",  # a few hundred rows in memory
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated",  # Lightning on a newer torch
)

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Adversaries(pl.LightningModule):
    """Generator and discriminator with an optimizer each, toggled by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
        self.judge = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.automatic_optimization = False
        self.plain = True  # whether each gradient of the generator was plain

    def configure_optimizers(self) -> list[optim.Optimizer]:
        return [optim.Adam(net.parameters(), lr=1e-2) for net in (self.generator, self.judge)]

    def training_step(self, batch: list[Tensor], _: int) -> None:
        (real,) = batch
        noise = torch.randn(len(real), 4)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        first, second = self.optimizers()

        self.toggle_optimizer(first)
        fake = self.generator(noise)
        loss = F.binary_cross_entropy_with_logits(self.judge(fake), ones)
        first.zero_grad()
        self.manual_backward(loss)
        self.plain &= torch.equal(self.generator[2].weight.grad, self._plain_gradient(noise, ones))
        first.step()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        judged = self.judge(torch.cat([real, fake.detach()]))
        loss = F.binary_cross_entropy_with_logits(judged, torch.cat([ones, zeros]))
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)

    def _plain_gradient(self, noise: Tensor, ones: Tensor) -> Tensor:
        """By a functional call of the judge, of which primum sees nothing."""
        values = {name: value.detach() for name, value in self.judge.state_dict().items()}
        output = torch.func.functional_call(self.judge, values, (self.generator(noise),))
        loss = F.binary_cross_entropy_with_logits(output, ones)
        (gradient,) = torch.autograd.grad(loss, [self.generator[2].weight])
        return gradient


def test_a_toggled_pass_is_neither_weighed_nor_a_fallback() -> None:
    """No warning, and no advice to unfreeze: warnings are errors here."""
    data = TensorDataset(torch.randn(240, 6, generator=torch.Generator().manual_seed(0)))
    callback = PrimumCallback(head="judge.2")
    module = Adversaries()
    pl.Trainer(callbacks=[callback], **QUIET).fit(module, DataLoader(data, batch_size=24))
    assert module.plain
    assert callback.last is not None
    assert callback.last.applied
    assert callback.last.fallbacks == 0
    assert callback.last.discarded == 0
