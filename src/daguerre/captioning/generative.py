"""Captioners that write text with a network of transformers: pictures and a prompt in, tokens out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from pydantic import Field

from daguerre import documents
from daguerre.captioning.captioner import NetworkSettings, folder_of
from daguerre.data.images.transparency import on_white
from daguerre.errors import UserError
from daguerre.evaluation.networks import transformers as networks


class GenerativeSettings(NetworkSettings):
    """Base of the `Settings` of captioners that write text."""

    max_new_tokens: int = Field(256, ge=1, le=4096)
    """Most tokens of a caption."""
    num_beams: int = Field(3, ge=1, le=64)
    """Beams of the search for the likeliest caption; 1 takes the likeliest token each time. Nothing is drawn."""


@dataclass(frozen=True, eq=False)
class Generative:
    """A network, what prepares its inputs, and its prompt for each field (None: no prompt)."""

    settings: GenerativeSettings
    model: Any
    processor: Any
    prompts: Mapping[str, str | None]
    device: torch.device
    answers: bool = False
    """True if what is written answers the prompt, and False if it goes on from it, or has none."""

    @torch.inference_mode()
    def captions(self, images: Sequence[Image.Image]) -> list[dict[str, str]]:
        plain = [on_white(image) for image in images]
        found: list[dict[str, str]] = [{} for _ in plain]
        for field, prompt in self.prompts.items():
            texts = {} if prompt is None else {"text": [prompt] * len(plain)}
            inputs = self.processor(images=plain, return_tensors="pt", **texts).to(self.device)
            tokens = self.model.generate(
                **inputs,
                max_new_tokens=self.settings.max_new_tokens,
                num_beams=self.settings.num_beams,
                do_sample=False,
            )
            if self.answers:
                tokens = tokens[:, inputs["input_ids"].shape[1] :]
            each = self.processor.batch_decode(tokens, skip_special_tokens=True)
            for own, text in zip(found, each, strict=True):
                own[field] = " ".join(text.split())
        return found


def _processor(folder: Path) -> Any:
    return transformers.AutoProcessor.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, use_fast=False
    )


def load(
    settings: GenerativeSettings,
    model_class: str,
    kinds: tuple[str, ...],
    prompts: Mapping[str, str | None],
    device: str,
    read: Callable[[Path], Any] = _processor,
    dtype: torch.dtype = torch.float32,
    answers: bool = False,
) -> Generative:
    """A captioner of a class of transformers; `read` reads its processor, and the others are those of `Generative`.
    UserError where its folder is missing, of another kind or damaged, or where torch cannot use the device."""
    try:
        where = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # a word that is no device, or one that this build does not know
        raise UserError(
            f"device={device}: torch cannot use it here: choose cpu, or leave device out (`daguerre doctor` shows what "
            "is there)",
            code="resources",
            setting="device",
        ) from error
    folder = folder_of(settings)
    model = networks.load(folder, model_class, kinds, dtype)
    try:
        with documents.Bare():
            processor = read(folder)
    except (*documents.MISREAD, ImportError) as error:
        raise UserError(f"{folder}: its processor cannot be read: {str(error)[:300]}", code="damaged") from error
    made = Generative(settings, model.to(where), processor, prompts, where, answers)
    _check_room(made)
    return made


def _check_room(made: Generative) -> None:
    """UserError for more tokens than the network has positions for."""
    config, count = made.model.config, made.settings.max_new_tokens
    positions = config.text_config.max_position_embeddings
    # A caption follows its prompt without the end, or begins by itself; nothing is read behind its last token.
    written = [] if config.is_encoder_decoder else [text for text in made.prompts.values() if text is not None]
    image = Image.new("RGB", (32, 32))
    before = (
        max(
            [2, *(made.processor(images=image, text=text, return_tensors="pt").input_ids.shape[-1] for text in written)]
        )
        - 1
    )
    if count > (most := positions - before + 1):
        way = f"so at most {most} behind this prompt" if most > 0 else f"and the prompt has {before}: shorten it"
        raise UserError(
            f"max_new_tokens={count} is more than this network writes: it reads {positions} tokens, {way}",
            code="conflict",
            setting="max_new_tokens",
        )
