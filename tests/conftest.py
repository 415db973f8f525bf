"""Problems captured from real training, and what every test shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from predicting import predict_head
from primum.kernel.gram import MatrixFree, choose_form
from primum.kernel.optimizers.predict import Update
from primum.kernel.problem import Problem
from primum.kernel.solver import solve

BATCHES = (32, 128, 512)
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=5e-4),
    "AdamW": lambda params: AdamW(params, lr=2e-3, weight_decay=0.05),
}
MOMENTS = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64)  # steps kept; at 0 nothing is remembered yet


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # small matrices; more threads only wait for each other


@pytest.fixture
def rng() -> torch.Generator:
    """A seeded source of randomness that no other test has drawn from."""
    return torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Moment:
    """What the reducer saw in one step of real training, in float32.

    Shapes: features [B, d], the last column all ones; output_gradients [B, d_out]; step [d_out, d];
    gain a number or [d_out, d]; drift [B].
    """

    optimizer: str
    batch: int
    number: int  # of the step, from 0
    features: Tensor
    output_gradients: Tensor
    step: Tensor
    gain: Tensor | float
    drift: Tensor

    @property
    def gram(self) -> MatrixFree:
        return MatrixFree(self.features, self.output_gradients, self.gain)

    def problem(self, radius: float = 0.2) -> Problem:
        size = Update(self.step, self.gain, 1.0).norm("gain")
        return Problem(choose_form(self.gram, 21), self.drift, radius * size)

    def double(self) -> Moment:
        wide = {k: v.double() for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **wide)


def group_norm_cnn() -> nn.Sequential:
    """8 x 8 images to 64 features."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return [conv, nn.GroupNorm(4, outputs), nn.ReLU()]

    body = [*block(1, 8, 2), *block(8, 16, 1), *block(16, 64, 2)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def train(optimizer: str, batch: int) -> list[Moment]:
    """Train on handwritten digits as `attach` does, but for the hooks; keep some problems."""
    from sklearn.datasets import load_digits  # seconds to import, and few tests need it

    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(digits)
    moments: list[Moment] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        images = images + 0.5 * torch.randn(images.shape)  # clean, they are learned in no time
        body, head = group_norm_cnn(), nn.Linear(64, 10)
        stepper = OPTIMIZERS[optimizer]([*body.parameters(), *head.parameters()])
        owners = {"weight": stepper, "bias": stepper}
        for number in range(max(MOMENTS) + 1):
            rows = torch.randperm(len(labels))[:batch]
            stepper.zero_grad()
            features = body(images[rows])
            logits = head(features)
            loss = nn.functional.cross_entropy(logits, labels[rows])
            (g,) = torch.autograd.grad(loss, logits, retain_graph=True)
            x = nn.functional.pad(features.detach(), (0, 1), value=1.0)
            update = predict_head(head, owners, g.t() @ x)
            drift = MatrixFree(x, g, update.gain).along(update.step)
            moment = Moment(optimizer, batch, number, x, g, update.step, update.gain, drift)
            if number in MOMENTS:
                moments.append(moment)
            logits.backward((1 + solve(moment.problem()).extra_weights).unsqueeze(1) * g)
            stepper.step()
    return moments


@pytest.fixture(scope="session")
def captured() -> list[Moment]:
    """Problems of real training: both optimizers, three batch sizes, early and late steps."""
    return [moment for name in OPTIMIZERS for batch in BATCHES for moment in train(name, batch)]
