"""Whether `primum.diagnose` is right on settings that its thresholds have not seen.

    python -m lab.diagnose_check

Generated textures and scikit-learn's digits, small networks with and without normalisation. The
diagnosis is taken after the first epoch of plain training with the first seed, as for the settings
behind the thresholds. Learning rates are not tuned.

What counts as a hit was fixed before the first run: above two thirds, at least one point; between,
more than none; below half, less than one point. Added after it: a setting whose plain training ends
below 20% is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import primum
from lab.text_tables import markdown_table
from primum.diagnostics.diagnose import HIGH, LOW, Diagnosis

TRAIN, BATCH, EPOCHS, SEEDS = 512, 32, 8, 2
Data = tuple[Tensor, Tensor]


def textures(size: int = 12, count: int = 2512) -> Data:
    """Noisy gratings of eight directions with random phases and widths."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(8, (count,), generator=generator)
    phase, width = torch.rand(2, count, 1, 1, generator=generator)
    angle = labels.view(-1, 1, 1) * torch.pi / 8
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    wave = (x * angle.cos() + y * angle.sin()) * (0.8 + 0.8 * width) + 2 * torch.pi * phase
    noise = torch.randn(count, size, size, generator=generator)
    return (wave.sin() + 1.2 * noise).unsqueeze(1), labels


def digits(size: int) -> Data:
    """Scikit-learn's digits with noise, at another size."""
    from sklearn.datasets import load_digits

    pixels, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(2)
    order = torch.randperm(len(labels), generator=generator)
    images = (pixels[order].float().view(-1, 1, 8, 8) - 4.9) / 6.0
    images = F.interpolate(images, size=(size, size), mode="bilinear")
    return images + 0.6 * torch.randn(images.shape, generator=generator), labels[order].long()


def cnn(norm: Callable[[int], nn.Module], width: int, classes: int) -> nn.Sequential:
    """Two convolutions with a normalisation, the mean over places, a head."""
    body: list[nn.Module] = []
    for inputs, outputs in ((1, width), (width, 2 * width)):
        body += [nn.Conv2d(inputs, outputs, 3, padding=1), norm(outputs), nn.ReLU()]
    body += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(2 * width, classes))


def mlp(norm: Callable[[int], nn.Module], width: int, inputs: int, classes: int) -> nn.Sequential:
    """Two hidden layers and a head."""
    body: list[nn.Module] = [nn.Flatten()]
    for size in (inputs, width):
        body += [nn.Linear(size, width), norm(width), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(width, classes))


def groups(width: int) -> nn.Module:
    """Group norm of four groups."""
    return nn.GroupNorm(4, width)


def nothing(width: int) -> nn.Module:
    """No normalisation."""
    return nn.Identity()


SETTINGS: dict[str, tuple[Callable[[], Data], Callable[[], nn.Module], str]] = {
    "textures, CNN, group norm, SGD": (textures, lambda: cnn(groups, 12, 8), "sgd"),
    "textures, CNN, batch norm, SGD": (textures, lambda: cnn(nn.BatchNorm2d, 12, 8), "sgd"),
    "textures, CNN, group norm, AdamW": (textures, lambda: cnn(groups, 24, 8), "adamw"),
    "digits 8x8, MLP, layer norm, SGD": (
        lambda: digits(8),
        lambda: mlp(nn.LayerNorm, 48, 64, 10),
        "sgd",
    ),
    "digits 8x8, MLP, no norm, AdamW": (
        lambda: digits(8),
        lambda: mlp(nothing, 48, 64, 10),
        "adamw",
    ),
    "digits 12x12, CNN, no norm, SGD": (lambda: digits(12), lambda: cnn(nothing, 12, 10), "sgd"),
}


def losses(model: nn.Module, batch: Data) -> Tensor:
    """One per sample."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def run(name: str, seed: int, arm: str) -> tuple[float, Diagnosis | None]:
    """Test accuracy in percent, and the diagnosis after the first epoch of plain training."""
    make_data, make, kind = SETTINGS[name]
    (images, labels), found = make_data(), None
    torch.manual_seed(seed)
    model = make()
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if kind == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=3e-3)
    )
    if arm == "primum":
        primum.attach(model, optimizer)
    schedule = CosineAnnealingLR(optimizer, EPOCHS * (TRAIN // BATCH))
    for epoch in range(EPOCHS):
        drawn = torch.randperm(TRAIN).view(-1, BATCH)
        if epoch == 1 and seed == 0 and arm == "plain":
            batches = [(images[rows], labels[rows]) for rows in drawn]
            found = primum.diagnose(model, optimizer, batches, losses)
        for rows in drawn:
            optimizer.zero_grad()
            torch.autograd.backward(losses(model, (images[rows], labels[rows])).mean())
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        right = model.eval()(images[TRAIN:]).argmax(1) == labels[TRAIN:]
    return 100 * float(right.float().mean()), found


def hit(share: float, gain: float) -> bool:
    """Whether the gain is what the verdict for this share says."""
    return gain >= 1 if share > HIGH else gain > 0 if share >= LOW else gain < 1


def main() -> None:
    """Run all settings and print the table."""
    rows, hits, counted = [], 0, 0
    for name in SETTINGS:
        plain = [run(name, seed, "plain") for seed in range(SEEDS)]
        own = [run(name, seed, "primum")[0] for seed in range(SEEDS)]
        found = plain[0][1]
        assert found is not None
        differences = [mine - base for mine, (base, _) in zip(own, plain, strict=True)]
        gain, share = fmean(differences), found.common_shift.mean
        learned = fmean(value for value, _ in plain) >= 20
        right = hit(share, gain)
        hits, counted = hits + (right and learned), counted + learned
        each = ", ".join(f"{value:+.1f}" for value in differences)
        base = f"{fmean(value for value, _ in plain):.1f}"
        said = found.verdict.partition(":")[0]
        rows.append([name, f"{100 * share:.0f}", said, base, f"{gain:+.1f} ({each})",
                     ("yes" if right else "no") if learned else "not counted"])  # fmt: skip
    heads = ["setting", "common shift, %", "verdict", "plain, %", "gain (each seed)", "right"]
    print(markdown_table(heads, rows))
    print(f"\nRight in {hits} of {counted} settings that learn.")


if __name__ == "__main__":
    main()
