"""Accelerate with the one added line. Run: python examples/accelerate_digits.py"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import primum
from primum.integrations.logging import log_to

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 8 - 1
images += 0.7 * torch.randn(images.shape)  # clean, they are learned in no time
labels = torch.tensor(digits.target)
train, test = slice(600), slice(600, None)

accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=50, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
reducer = primum.attach(model, optimizer, scaler=accelerator.scaler)  # <- the one added line

# With trackers: lambda figures: accelerator.log(figures, step=figures["primum/step"])
figures: list[dict[str, float]] = []
log_to(reducer, figures.append, every=10)

for _ in range(10):
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

model.eval()
with torch.no_grad():
    guesses = model(images[test].to(accelerator.device)).argmax(1).cpu()
for each in figures:
    harmed = f"{each['primum/harmed_before']:.0%} -> {each['primum/harmed_after']:.0%}"
    accelerator.print(f"step {each['primum/step']:3d}  harmed {harmed}")
accelerator.print(f"test accuracy {(guesses == labels[test]).float().mean():.1%}")

# Weights were really applied, in every step.
assert reducer.last is not None
assert reducer.last.applied
assert reducer.last.fallbacks == 0
assert max(each["primum/mean_extra_weight"] for each in figures) > 0
