"""The samples that got most extra weight over a run, with their pictures."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image
from torch import Tensor

from primum.diagnostics import InterferenceMeter
from primum.experiments.images import ImageData, LazyImages

COUNT = 24


def most_protected(
    meter: InterferenceMeter, data: ImageData, count: int = COUNT
) -> list[dict[str, Any]]:
    """Rows of the meter's samples with the largest sums of extra weights, the largest first."""
    samples = meter.samples()
    weights = samples["extra_weight"]
    ranked = sorted(range(len(weights)), key=lambda i: (-weights[i], i))[:count]
    return [
        {
            "id": place,
            "label": data.class_names[int(data.train.labels[place])],
            "seen": samples["seen"][place],
            "harmed": samples["harmed_before"][place],
            "extra_weight": round(weights[place], 4),
            "png": png(_pixels(data, place)),
        }
        for place in ranked
        if weights[place] > 0
    ]


def png(pixels: Tensor) -> str:
    """Bytes [3, H, W] as base64 of a PNG."""
    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _pixels(data: ImageData, place: int) -> Tensor:
    images = data.train.images
    return images.read(place) if isinstance(images, LazyImages) else images[place]
