"""Test accuracy from several views of each image, at the end of a run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lab.augment.crops import reflected
from lab.methods import autocast
from lab.trainer import Callback, Trainer

SHIFT = 1  # pixels
# By number of views: corner of the window in the padded image, and weight; each also mirrored.
WINDOWS = {2: ((SHIFT, 1.0),), 6: ((SHIFT, 0.5), (0, 0.25), (2 * SHIFT, 0.25))}


def views_logits(model: nn.Module, images: Tensor, views: int) -> Tensor:
    """Mean logits over two views (the image and its mirror image) or six.

    Six views: also shifted by a pixel up-left and down-right, with half the weight.
    Shapes: [B, 3, H, W] -> [B, classes].
    """
    side = images.shape[-1]
    padded = reflected(images, SHIFT)
    logits = torch.zeros((), device=images.device)
    for corner, share in WINDOWS[views]:
        view = padded[..., corner : corner + side, corner : corner + side].contiguous()
        logits = logits + share * 0.5 * (model(view).float() + model(view.flip(3)).float())
    return logits


class Views(Callback):
    """Accuracy over several views of each test image, after the last epoch."""

    def __init__(self) -> None:
        self.accuracy = math.nan

    @torch.no_grad()
    def after_epoch(self, trainer: Trainer) -> None:
        if not trainer.finished:
            return
        trainer.model.eval()
        right, finite = 0, True
        for batch in trainer.test_batches():
            with autocast(trainer.settings):
                logits = views_logits(trainer.model, batch.inputs, trainer.settings.views)
            finite = finite and bool(logits.isfinite().all())
            right += int((logits.argmax(1) == batch.targets).sum())
        trainer.model.train()
        self.accuracy = right / len(trainer.data.test) if finite else math.nan

    def fields(self, trainer: Trainer) -> dict[str, Any]:
        return {"final": {"views_test_accuracy": self.accuracy}}
