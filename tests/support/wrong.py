"""What belongs to other models, for tests of what a family refuses: each is written where it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import data_sets
import tiny_texts
import torch
from safetensors.torch import save_file
from tiny_models import tiny_qwen_image_vae, write_sd
from transformers import Gemma2Model, Qwen3Model

Writer = Callable[[Path], Path]
"""Writes something into a place that is not there yet, and returns it."""


class Wrong(NamedTuple):
    """One way to get a family wrong."""

    words: str
    """Settings of `daguerre train`, or behind "generate " of `daguerre generate`; {NAME} stands for what is written by
    that name, by `OTHERS` or by the family's own."""
    said: str
    """A part of the message."""


def _texts(**parts: Callable[[], Any]) -> Writer:
    return lambda place: tiny_texts.write(place, {name: make() for name, make in parts.items()})


def _lora_of_sd(place: Path) -> Path:
    name, path = (
        "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q",
        place.with_suffix(".safetensors"),
    )
    save_file({f"{name}.lora_down.weight": torch.ones(2, 64), f"{name}.lora_up.weight": torch.ones(64, 2)}, path)
    return path


def _no_network(place: Path) -> Path:
    path = place.with_suffix(".safetensors")
    save_file({"x.weight": torch.ones(2)}, path)
    return path


def _qwen_vae(place: Path) -> Path:
    tiny_qwen_image_vae().save_pretrained(place / "vae")
    return place


OTHERS: dict[str, Writer] = {
    "sd": write_sd,
    "qwen3": _texts(text_encoder=lambda: tiny_texts.qwen3(Qwen3Model), tokenizer=tiny_texts.qwen_tokenizer),
    "qwen3_vl": _texts(text_encoder=tiny_texts.qwen3_vl, tokenizer=tiny_texts.qwen_tokenizer),
    "qwen25_vl": _texts(text_encoder=tiny_texts.qwen25_vl, tokenizer=tiny_texts.qwen_tokenizer),
    "gemma": _texts(text_encoder=lambda: tiny_texts.language_model(Gemma2Model)),
    "words_of_clip": _texts(tokenizer=tiny_texts.clip_tokenizer),
    "words_of_t5": _texts(tokenizer=tiny_texts.t5_tokenizer),
    "qwen_vae": _qwen_vae,
    "lora_of_sd": _lora_of_sd,
    "no_network": _no_network,
    "images": lambda place: data_sets.folder(place, 4),
}


class Others(Mapping[str, Path]):
    """Places of what is written into a folder, each thing once; strings are formatted by it."""

    def __init__(self, folder: Path, writers: Mapping[str, Writer], beside: Mapping[str, Path] | None = None) -> None:
        self._folder, self._writers, self._written = folder, writers, dict[str, Path]()
        self._beside: Mapping[str, Path] = {} if beside is None else beside

    def __getitem__(self, name: str) -> Path:
        if name not in self._writers:
            return self._beside[name]
        if name not in self._written:
            self._written[name] = self._writers[name](self._folder / name)
        return self._written[name]

    def __iter__(self) -> Iterator[str]:
        return iter({*self._writers, *self._beside})

    def __len__(self) -> int:
        return len({*self._writers, *self._beside})
