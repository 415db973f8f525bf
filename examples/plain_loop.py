"""A plain training loop with the one added line. Run: python examples/plain_loop.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import primum

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
labels = torch.tensor(digits.target)
order = torch.randperm(len(images))
train, test = order[:600], order[600:]

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.GroupNorm(4, 32), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
reducer = primum.attach(model, optimizer)  # <- the one added line

for epoch in range(15):
    model.train()
    for batch in train[torch.randperm(len(train))].split(64):
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    step = reducer.last.as_dict()
    print(
        f"epoch {epoch + 1:2d}  loss {loss:.3f}  test accuracy {accuracy:.1%}  "
        f"harmed {step['harmed_before']:.0%} -> {step['harmed_after']:.0%}"
    )
