"""A compact CNN that learns CIFAR-10 in a few epochs, for speedruns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH = 2  # side of the patches that the first layer whitens
LEAST_VARIANCE = 5e-4  # added to the patches' variances, so that noise is not amplified
SMALLEST = 16  # side of an image; three poolings would leave no pixel of a smaller one


class WhitenedCNN(nn.Module):
    """A frozen whitening convolution, three groups of two convolutions, a scaled linear head.

    Follows airbench (Jordan, 2024): convolutions start as the identity on their first channels,
    BatchNorm has biases but no scales, and logits are scaled down after the head, which is a plain
    `nn.Linear`. Call `whiten` before training. Nothing before the first group is trained, so the
    largest feature map needs no gradient; in channels-last memory and bf16, one core trains on
    about 1,300 images per second.
    """

    scale = 1 / 9  # of the logits

    def __init__(self, classes: int, *, widths: tuple[int, ...] = (32, 64, 64)) -> None:
        super().__init__()
        inputs = 2 * 3 * PATCH**2
        self.first = nn.Conv2d(3, inputs, PATCH, bias=False)
        self.first.weight.requires_grad_(False)
        self.groups = nn.Sequential(
            *(_group(i, o) for i, o in zip((inputs, *widths), widths, strict=False))
        )
        self.head = nn.Linear(widths[-1], classes, bias=False)
        # Of the weights; the features follow.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def whiten(self, images: Tensor) -> None:
        """Set the first layer to the whitening filters of the images' patches and their negatives.

        Shapes: normalised images [N, 3, H, W].
        """
        with torch.no_grad():
            self.first.weight.copy_(whitening_filters(images))

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W], sides at least 16 -> logits [B, classes]."""
        features = self.groups(F.gelu(self.first(images)))
        features = F.max_pool2d(features, features.shape[-2:]).flatten(1)
        logits: Tensor = self.scale * self.head(features)
        return logits


def whitening_filters(images: Tensor) -> Tensor:
    """Eigenvectors of the patches' covariance, divided by their deviations, and their negatives.

    Convolved with the images they give uncorrelated channels of about unit variance.
    Shapes: [N, 3, H, W] -> [24, 3, 2, 2].
    """
    patches = images.unfold(2, PATCH, 1).unfold(3, PATCH, 1)  # a view: [N, 3, H', W', 2, 2]
    rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3 * PATCH**2).double()
    values, vectors = torch.linalg.eigh(rows.T.cov())
    filters = (vectors / (values + LEAST_VARIANCE).sqrt()).T.reshape(-1, 3, PATCH, PATCH)
    return torch.cat([filters, -filters]).to(images.dtype)


def _group(inputs: int, outputs: int) -> nn.Sequential:
    # Pooling comes before the norm, which then has a quarter of the work.
    return nn.Sequential(
        *(_conv(inputs, outputs), nn.MaxPool2d(2), _norm(outputs), nn.GELU()),
        *(_conv(outputs, outputs), _norm(outputs), nn.GELU()),
    )


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
    nn.init.dirac_(conv.weight.data[:inputs])
    return conv


def _norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm
