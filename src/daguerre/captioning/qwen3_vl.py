"""The captioner `qwen3_vl`: a description by a language model that sees (Bai et al. 2025, arXiv 2511.21631)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import transformers
from PIL import Image
from pydantic import Field
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from daguerre import documents
from daguerre.captioning import generative
from daguerre.captioning.generative import Generative, GenerativeSettings
from daguerre.errors import UserError

_IMAGE = "<|image_pad|>"
"""The token in the place of a part of an image."""
_TEMPLATE = "chat_template.json"


class Settings(GenerativeSettings):
    """An answer to a prompt about the picture."""

    published: ClassVar[str] = "Qwen/Qwen3-VL-4B-Instruct"
    files: ClassVar[tuple[str, ...]] = (*GenerativeSettings.files, "*.jinja")

    name: Literal["qwen3_vl"] = "qwen3_vl"
    """An answer to a prompt about the picture."""
    prompt: str = Field("Describe this image in one paragraph.", min_length=1)
    """What is asked about each picture."""
    max_new_tokens: int = 512
    """Most tokens of a caption."""
    num_beams: int = 1
    """Beams of the search for the likeliest caption; 1 takes the likeliest token each time. Nothing is drawn."""
    max_pixels: int = Field(1 << 20, ge=1 << 16)
    """A larger picture is read at so many pixels: each 1,024 are a token of Qwen3-VL."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights and of the computation."""


class Reader:
    """Makes of pictures and a prompt what the network reads, as `Qwen3VLProcessor` of transformers does.

    That class cannot be made without torchvision, which decodes its videos.
    """

    def __init__(self, folder: Path, max_pixels: int) -> None:
        images: Any = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        images.size = replace(images.size, longest_edge=max_pixels)
        self.images = images
        self.words: Any = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        if self.words.chat_template is None:  # older folders have it in the processor's own file
            self.words.chat_template = documents.read_object(folder / _TEMPLATE)["chat_template"]

    def __call__(
        self, images: Image.Image | Sequence[Image.Image], text: str | Sequence[str], return_tensors: str
    ) -> transformers.BatchFeature:
        """Tokens [B, L], padded on the left, the patches of all images [patches, features], and their grids [B, 3]."""
        seen = self.images(images=images, return_tensors=return_tensors)
        texts = [self._asked(one) for one in ([text] if isinstance(text, str) else text)]
        counts = seen["image_grid_thw"].prod(-1) // self.images.merge_size**2
        whole = [one.replace(_IMAGE, _IMAGE * int(count)) for one, count in zip(texts, counts, strict=True)]
        read = self.words(
            whole, padding=True, padding_side="left", add_special_tokens=False, return_tensors=return_tensors
        )
        is_image = (read["input_ids"] == self.words.convert_tokens_to_ids(_IMAGE)).int()
        ids = {"input_ids": read["input_ids"], "attention_mask": read["attention_mask"], "mm_token_type_ids": is_image}
        return transformers.BatchFeature({**ids, **seen})

    def batch_decode(self, tokens: torch.Tensor, skip_special_tokens: bool) -> list[str]:
        """Texts of token ids [B, L]."""
        found: list[str] = self.words.batch_decode(tokens, skip_special_tokens=skip_special_tokens)
        return found

    def _asked(self, prompt: str) -> str:
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        found: str = self.words.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return found


def load(settings: Settings, device: str) -> Generative:
    """Qwen3-VL in the form of transformers."""
    if _IMAGE in settings.prompt:
        raise UserError(
            f"prompt has {_IMAGE}, which stands for the picture: leave it out, the picture comes first",
            code="conflict",
            setting="prompt",
        )
    read, dtype = partial(Reader, max_pixels=settings.max_pixels), getattr(torch, settings.dtype)
    prompts: dict[str, str | None] = {settings.name: settings.prompt}
    kind = "Qwen3VLForConditionalGeneration"
    return generative.load(settings, kind, ("qwen3_vl",), prompts, device, read, dtype, answers=True)
