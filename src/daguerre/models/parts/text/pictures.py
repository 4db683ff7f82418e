"""Reference images that a language model reads with a caption, as Qwen2.5-VL and Qwen3-VL do.

Each stands in the text, ahead of the caption, as one token of the language model for 2 x 2 patches, in the size that
the model's own image processor gives it. Shape letters: B texts, T tokens, D features, S tokens of one image.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from daguerre import documents
from daguerre.errors import UserError
from daguerre.models import encoders
from daguerre.models.parts.text import tokenizers
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.parts.text.encoder import Features, TextEncoder
from daguerre.models.parts.text.seen import Seen
from daguerre.models.parts.text.tokenizers import AbsentTokenizer, Tokens
from daguerre.types import REFERENCES, Cond

VISION = "<|vision_start|><|image_pad|><|vision_end|>"
"""What stands for an image in a text; the token in the middle is written once for each that the model reads."""
_IMAGE = "<|image_pad|>"
_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, eq=False)
class PicturedText(TextConditioning):
    """A text encoder that reads captions, and reference images with them: `models.family.ReferenceText`."""

    _: KW_ONLY
    written: str
    """What stands ahead of a caption for an image; {} is its number, from 1 on."""
    between: str = ""
    """What stands between two of them."""
    kept: bool = True
    """Whether the features have those of the images' tokens."""
    whole: bool = False
    """Whether an image must be read in the size that it has: the denoiser has a place for each token."""

    @property
    def _encoder(self) -> TextEncoder:
        (encoder,) = self.encoders
        return encoder

    def rules(self) -> dict[str, Any]:
        return super().rules() | {"written": self.written, "between": self.between, "kept": self.kept}

    @cached_property
    def before(self) -> tuple[int, ...]:
        """The tokens of the whole text ahead of each image, but for those of the images before."""
        if self._absent:
            return (self._encoder.reading.dropped,) * len(REFERENCES)
        text = self._encoder.reading.template.partition("{}")[0] + self._ahead(len(REFERENCES))
        (ids,) = tokenizers.read(self._encoder.tokenizer, [text])
        at = [place for place, token in enumerate(ids) if token == self._image_token]
        if len(at) != len(REFERENCES):
            raise UserError(
                f"the tokenizer of model.{self._encoder.name} has no token {_IMAGE} of this model: reference images "
                "cannot be read with it",
                code="conflict",
                setting=f"model.{self._encoder.name}",
            )
        return tuple(place - number for number, place in enumerate(at))

    @cached_property
    def text_before(self) -> tuple[int, ...]:
        """The tokens of the features ahead of each image, but for those of the images before."""
        return tuple(place - self._encoder.reading.dropped for place in self.before)

    def tokens_of(self, texts: Sequence[str], references: Sequence[Tensor]) -> Cond:
        """As `tokens`, with `NAME_image_N` [B, 3, h, w] uint8 of each image, in the size in which it is read, and its
        tokens among the ids. UserError where the longest text that is read has no room for those of all images."""
        if not references:
            return self.tokens(texts)
        name, ahead = self._encoder.name, self._ahead(len(references))
        shown = [self._resized(pixels) for pixels in references]
        cond = {**self.tokens([ahead + (text or self.null) for text in texts])}
        cond["empty"] = torch.tensor([text == "" for text in texts], device="cpu")
        ids, begin, parts = cond[f"{name}_ids"], 0, list[Tensor]()
        marks = 0 if self._absent else 1  # of the image in the text; without a tokenizer there is no text
        for number, pixels in enumerate(shown):
            place, (rows, columns) = self.before[number] + number * marks, self._grid(pixels)
            if marks and not (place < ids.shape[2] and bool((ids[:, :, place] == self._image_token).all())):
                raise UserError(
                    f"max_sequence_length is {self._encoder.max_tokens}, and the text ahead of a caption with "
                    f"{len(references)} reference images has more tokens: raise it",
                    code="conflict",
                    setting="model.max_sequence_length",
                )
            parts += [ids[:, :, begin:place], ids.new_full((*ids.shape[:2], rows * columns), self._image_token)]
            begin = place + marks
            cond[f"{name}_counts"] = cond[f"{name}_counts"] + rows * columns - marks
            cond[f"{name}_image_{number}"] = pixels
        cond[f"{name}_ids"] = torch.cat([*parts, ids[:, :, begin:]], 2)
        return cond

    def _features(self, encoder: TextEncoder, given: Tokens, tokens: Cond) -> Features:
        start = f"{encoder.name}_image_"
        shown = [tokens[f"{start}{number}"] for number in range(sum(name.startswith(start) for name in tokens))]
        if not shown:
            return encoder.features(given)
        with encoders.at_work(encoder.encoder):
            seen = self._seen(encoder.encoder, shown)
            found = encoder.features(given, seen)
        if self.kept:
            return found
        dropped, mask_BT = encoder.reading.dropped, found.mask_BT
        mask_BT = None if mask_BT is None else seen.without(mask_BT, dropped)
        return Features(seen.without(found.hidden_BTD, dropped), None, mask_BT)

    def _seen(self, network: Any, shown: Sequence[Tensor]) -> Seen:
        grids = tuple(self._grid(pixels) for pixels in shown)
        ends = np.cumsum([0, *(rows * columns for rows, columns in grids)]).tolist()
        starts = tuple(at + more for at, more in zip(self.before, ends[:-1], strict=False))
        read = [self._read_by(network, pixels) for pixels in shown]
        deeper = zip(*(more for _, more in read), strict=True)
        return Seen(starts, grids, tuple(own for own, _ in read), tuple(torch.cat(each, 1) for each in deeper))

    def _read_by(self, network: Any, pixels_BCHW: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Embeddings [B, S, D] of an image, and what is added to the outputs of layers, of the same shape."""
        n_texts, (rows, columns) = len(pixels_BCHW), self._grid(pixels_BCHW)
        if pixels_BCHW.is_meta or isinstance(pixels_BCHW, FakeTensor):
            # The library looks into numbers. What the vision part makes and drops is no step's fullest moment: counted
            # by its own pass in bf16 and float32 it is .18 and .35 GB an image in Qwen2.5-VL at 392 x 392 px, .31 and
            # .55 GB in Qwen3-VL at 1024 x 1024 px, ahead of the denoiser, which keeps 2.1 GB or more of such a sample.
            empty = pixels_BCHW.new_empty(n_texts, rows * columns, self.width, dtype=torch.float32)
            return empty, []
        merge = self.processor.merge_size
        grid = torch.tensor([[1, rows * merge, columns * merge]] * n_texts, device=pixels_BCHW.device)
        found = network.get_image_features(self._patches(pixels_BCHW), grid, return_dict=True)
        deeper = getattr(found, "deepstack_features", None) or []
        return torch.stack([*found.pooler_output]), [torch.stack([*each]) for each in deeper]

    def _patches(self, pixels_BCHW: Tensor) -> Tensor:
        """[B patches, features] of uint8 images, as `Qwen2VLImageProcessorPil` gives them, on any device."""
        own, (_, _, height, width) = self.processor, pixels_BCHW.shape
        mean, std = (pixels_BCHW.new_tensor(value, dtype=torch.float32) for value in (own.image_mean, own.image_std))
        x = (pixels_BCHW.float() * own.rescale_factor - mean[:, None, None]) / std[:, None, None]
        merge, patch = own.merge_size, own.patch_size
        x = x.reshape(len(x), 3, height // (merge * patch), merge, patch, width // (merge * patch), merge, patch)
        x = x.permute(0, 2, 5, 3, 6, 1, 4, 7)[:, :, :, :, :, :, None]
        x = x.expand(*x.shape[:6], own.temporal_patch_size, patch, patch)
        return x.reshape(-1, 3 * own.temporal_patch_size * patch**2)

    def _resized(self, pixels_BCHW: Tensor) -> Tensor:
        """Images in the size in which they are read. UserError where they must be read as they are, and are not."""
        own, (_, _, height, width) = self.processor, pixels_BCHW.shape
        limits = (own.size["shortest_edge"], own.size["longest_edge"])
        try:
            wanted = smart_resize(height, width, own.patch_size * own.merge_size, *limits)
        except ValueError as error:
            raise UserError(
                f"a reference image of {height}x{width} px is too narrow for {self._encoder.name}: {error}",
                code="unsupported",
            ) from error
        if wanted == (height, width):
            return pixels_BCHW
        if self.whole:
            raise UserError(
                f"the image processor in the folder of model.tokenizer makes {wanted[0]}x{wanted[1]} px of a reference "
                f"image of {height}x{width} px, and this model needs it as it is: give its own processor's folder",
                code="conflict",
                setting="model.tokenizer",
            )
        side = own.patch_size * own.merge_size
        rows = [own.resize(each.numpy(), own.size, own.resample, side) for each in pixels_BCHW]
        return torch.from_numpy(np.stack(rows))

    def _grid(self, pixels_BCHW: Tensor) -> tuple[int, int]:
        """Rows and columns of tokens of an image in the size in which it is read."""
        side = self.processor.patch_size * self.processor.merge_size
        return pixels_BCHW.shape[2] // side, pixels_BCHW.shape[3] // side

    @cached_property
    def processor(self) -> Any:
        """The image processor, of the files of the tokenizer."""
        files, vision = self._encoder.files, self._encoder.encoder.config.vision_config
        for name in _FILES:
            if name in files:
                try:
                    told = documents.parse(files[name])
                    return Qwen2VLImageProcessorPil.from_dict(told.get("image_processor", told))
                except documents.MISREAD as error:
                    text = f"{name} of model.tokenizer cannot be read ({error}). Copy the whole folder again"
                    raise UserError(text, code="damaged", setting="model.tokenizer") from error
        if self._absent:
            return Qwen2VLImageProcessorPil(patch_size=vision.patch_size, merge_size=vision.spatial_merge_size)
        raise UserError(
            f"the folder of model.tokenizer has no {_FILES[0]}, which says how reference images are read: give "
            "the folder of the model's processor",
            code="missing",
            setting="model.tokenizer",
        )

    @property
    def _absent(self) -> bool:
        return isinstance(self._encoder.tokenizer, AbsentTokenizer)

    @property
    def _image_token(self) -> int:
        return int(self._encoder.encoder.config.image_token_id)

    def _ahead(self, count: int) -> str:
        return self.between.join(self.written.format(number + 1) for number in range(count))
