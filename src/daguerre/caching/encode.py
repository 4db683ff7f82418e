"""Rows of a cache, made by the encoders of a family."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from daguerre.assembly.parts import Components
from daguerre.data.cached.rows import BFLOAT16, Row
from daguerre.data.cached.settings import CacheSettings
from daguerre.errors import Code, UserError
from daguerre.models.family import ReferenceText, TextConditioner
from daguerre.types import Cond

_MASK = "_mask"
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
    return _rows(moments, names, torch.float32 if settings.dtype == "float32" else torch.float16, {"logvar"})


class Caption(NamedTuple):
    """A text, and the reference images [3, h, w] uint8 that are read with it."""

    text: str
    pictures: tuple[Tensor, ...] = ()

    @property
    def shape(self) -> tuple[torch.Size, ...]:
        """Captions of equal ones are encoded together."""
        return tuple(picture.shape for picture in self.pictures)


@torch.no_grad()
def encode_texts(
    parts: Components, settings: CacheSettings, captions: Sequence[Caption], names: Sequence[str] = ()
) -> list[Row]:
    """Features of captions of one shape, made the same way; a text is its own name. What only pads a batch is not kept:
    a text that is read in several windows is encoded alone, and one that is filled up to the longest is cut."""
    conditioner = parts.family.text
    assert conditioner is not None
    with parts.numerics.frozen(), torch.autocast(parts.device.type, enabled=False):
        features = {**conditioner.features(_tokens(conditioner, captions))}
    readings = [encoder.reading for encoder in conditioner.encoders]
    masks = {name.removesuffix(_MASK) for name in features if name.endswith(_MASK)}
    if len(captions) > 1 and masks - {reading.text for reading in readings if not reading.long}:
        return [row for caption in captions for row in encode_texts(parts, settings, [caption])]
    filled = masks & {reading.text for reading in readings if reading.padding == "longest"}
    lengths = {name: features.pop(f"{name}{_MASK}").sum(1).tolist() for name in filled}
    known = [f"the caption {_shortened(caption.text)!r}" for caption in captions]
    made = _rows(features, known, dtype_of_texts(settings, conditioner), {*features})
    return [
        {name: array[: lengths[name][row]] if name in lengths else array for name, array in own.items()}
        for row, own in enumerate(made)
    ]


def _tokens(conditioner: TextConditioner, captions: Sequence[Caption]) -> Cond:
    texts = [caption.text for caption in captions]
    if not isinstance(conditioner, ReferenceText):
        return conditioner.tokens(texts)
    pictures = zip(*(caption.pictures for caption in captions), strict=True)
    return conditioner.tokens_of(texts, [torch.stack(each) for each in pictures])


def dtype_of_texts(settings: CacheSettings, conditioner: TextConditioner) -> torch.dtype:
    """The type in which features of texts are kept."""
    if settings.dtype == "auto":
        return torch.bfloat16 if any(encoder.kind.wide for encoder in conditioner.encoders) else torch.float16
    return torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32


def _rows(
    tensors: Mapping[str, Tensor], names: Sequence[str], dtype: torch.dtype, narrow: Collection[str]
) -> list[Row]:
    """Rows of tensors [B, ...], each of a sample of these names; those in `narrow` are kept in `dtype`."""
    kept = {}
    for name, tensor in tensors.items():
        _check_finite(
            tensor, names, f"gives {name} that is not finite: the encoder's weights are damaged (docs/trouble.md#nan)"
        )
        if tensor.is_floating_point() and name in narrow and tensor.dtype != dtype:
            tensor = tensor.to(dtype)
            what = f"gives {name} with values above float16's limit: set cache.dtype=float32, or bfloat16 for captions"
            _check_finite(tensor, names, what, code="conflict", setting="cache.dtype")
        kept[name] = _array(tensor.cpu())
    return [{name: array[row] for name, array in kept.items()} for row in range(len(names))]


def _array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


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
