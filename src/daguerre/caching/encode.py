"""Rows of a cache, made by the encoders of a family."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from daguerre.build.parts import Components
from daguerre.data.cached.rows import Row
from daguerre.data.cached.settings import CacheSettings
from daguerre.errors import Code, UserError

_SHOWN = 60
"""Letters of a caption that a message has."""


@torch.no_grad()
def encode_images(
    parts: Components, settings: CacheSettings, crops: Sequence[Tensor], names: Sequence[str]
) -> list[Row]:
    """Moments of crops [3, H, W] uint8 of one shape, a row each, in the types in which they are kept. UserError with
    the name of the image for a number that is not finite."""
    _, height, width = crops[0].shape
    pixels_BHWC = np.empty((len(crops), height, width, 3), np.uint8)  # as batches are in memory
    for row, crop_CHW in enumerate(crops):
        pixels_BHWC[row] = crop_CHW.numpy().transpose(1, 2, 0)
    pixels_BCHW = torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2).to(parts.device)
    with parts.numerics.frozen(), torch.autocast(parts.device.type, enabled=False):
        moments = parts.family.images.encode(pixels_BCHW)
    return _rows(moments, names, settings, lambda name: name == "logvar")


@torch.no_grad()
def encode_texts(
    parts: Components, settings: CacheSettings, texts: Sequence[str], names: Sequence[str] = ()
) -> list[Row]:
    """Features of texts, made the same way; a text is its own name. One that is read in several windows is encoded
    alone, so that nothing pads it."""
    assert parts.family.text is not None
    with parts.numerics.frozen(), torch.autocast(parts.device.type, enabled=False):
        features = parts.family.text.features(parts.family.text.tokens(texts))
    if len(texts) > 1 and any(name.endswith("_mask") for name in features):
        return [row for text in texts for row in encode_texts(parts, settings, [text])]
    return _rows(features, [f"the caption {_shortened(text)!r}" for text in texts], settings, lambda name: True)


def _rows(
    tensors: Mapping[str, Tensor], names: Sequence[str], settings: CacheSettings, narrow: Callable[[str], bool]
) -> list[Row]:
    """Rows of tensors [B, ...], each of a sample of these names; in float16 those that are `narrow`."""
    kept = {}
    for name, tensor in tensors.items():
        _check_finite(tensor, names, f"gives {name} that is not finite: the encoder's weights are damaged")
        if tensor.is_floating_point() and narrow(name) and settings.dtype == "auto":
            tensor = tensor.half()
            what = f"gives {name} with values above float16's limit: set cache.dtype=float32"
            _check_finite(tensor, names, what, code="conflict", setting="cache.dtype")
        kept[name] = tensor.cpu().numpy()
    return [{name: array[row] for name, array in kept.items()} for row in range(len(names))]


def _check_finite(
    tensor: Tensor, names: Sequence[str], what: str, code: Code = "damaged", setting: str | None = None
) -> None:
    """UserError with the first row [B, ...] that has a number that is not finite."""
    odd = (~tensor.isfinite()).reshape(len(names), -1).any(1).nonzero().flatten().tolist()
    if odd:
        more = f" (and {len(odd) - 1} more of {len(names)} that were encoded with it)" if len(odd) > 1 else ""
        raise UserError(f"{names[odd[0]]}{more} {what}", code=code, setting=setting)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
