"""Rows of a cache, made by the encoders of a family."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from daguerre.build.parts import Components
from daguerre.data.cached.rows import Row
from daguerre.data.cached.settings import CacheSettings
from daguerre.errors import UserError


@torch.no_grad()
def encode_images(parts: Components, settings: CacheSettings, crops: Sequence[Tensor]) -> list[Row]:
    """Moments of crops [3, H, W] uint8 of one shape, a row each, in the types in which they are kept."""
    _, height, width = crops[0].shape
    pixels_BHWC = np.empty((len(crops), height, width, 3), np.uint8)  # as batches are in memory
    for row, crop_CHW in enumerate(crops):
        pixels_BHWC[row] = crop_CHW.numpy().transpose(1, 2, 0)
    pixels_BCHW = torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2).to(parts.device)
    with parts.numerics.frozen(), torch.autocast(parts.device.type, enabled=False):
        moments = parts.family.images.encode(pixels_BCHW)
    return _rows(moments, len(crops), settings, lambda name: name == "logvar")


@torch.no_grad()
def encode_texts(parts: Components, settings: CacheSettings, texts: Sequence[str]) -> list[Row]:
    """Features of texts, likewise. One that is read in several windows is encoded alone, so that nothing pads it."""
    assert parts.family.text is not None
    with parts.numerics.frozen(), torch.autocast(parts.device.type, enabled=False):
        features = parts.family.text.features(parts.family.text.tokens(texts))
    if len(texts) > 1 and any(name.endswith("_mask") for name in features):
        return [row for text in texts for row in encode_texts(parts, settings, [text])]
    return _rows(features, len(texts), settings, lambda name: True)


def _rows(
    tensors: Mapping[str, Tensor], count: int, settings: CacheSettings, narrow: Callable[[str], bool]
) -> list[Row]:
    """Rows of tensors [count, ...]; in float16 those that are `narrow`. UserError for a number that is not finite."""
    kept = {}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"an encoder gave {name} that is not finite: its weights are damaged", code="damaged")
        if tensor.is_floating_point() and narrow(name) and settings.dtype == "auto":
            tensor = tensor.half()
            if not tensor.isfinite().all():
                what = f"{name} has values above float16's limit: set cache.dtype=float32"
                raise UserError(what, code="conflict", setting="cache.dtype")
        kept[name] = tensor.cpu().numpy()
    return [{name: array[row] for name, array in kept.items()} for row in range(count)]
