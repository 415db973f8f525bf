"""The samples with most extra weight."""

from __future__ import annotations

import base64
import io

import numpy as np
import torch
from PIL import Image
from torch import nn

import primum
from primum.diagnostics import InterferenceMeter
from primum.experiments.images import ImageData
from primum.experiments.inspection.protected import most_protected, png


def shown(text: str) -> torch.Tensor:
    """The image in a base64 PNG; [3, H, W]."""
    image = Image.open(io.BytesIO(base64.b64decode(text)))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_ranked_with_labels_and_counts(data: ImageData) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reducer = primum.attach(model, optimizer)
    meter = InterferenceMeter(num_samples=len(data.train))
    images = data.train.images
    assert isinstance(images, torch.Tensor)
    for _ in range(6):
        ids = torch.randperm(len(data.train))[:16]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[ids] / 255), data.train.labels[ids])
        loss.backward()
        optimizer.step()
        meter.update(reducer.last, ids)
    found = most_protected(meter, data, count=3)
    weights = meter.samples()["extra_weight"]
    assert [row["extra_weight"] for row in found] == [
        round(w, 4) for w in sorted(weights, reverse=True)[:3]
    ]
    first = found[0]
    assert first["label"] == data.class_names[int(data.train.labels[first["id"]])]
    assert 0 < first["harmed"] <= first["seen"] <= 6
    assert torch.equal(shown(first["png"]), images[first["id"]])


def test_nobody_without_weight(data: ImageData) -> None:
    assert most_protected(InterferenceMeter(num_samples=len(data.train)), data) == []


def test_png_keeps_every_byte() -> None:
    pixels = torch.randint(256, (3, 5, 7), dtype=torch.uint8)
    assert torch.equal(shown(png(pixels)), pixels)
