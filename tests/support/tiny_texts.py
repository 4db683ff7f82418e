"""Tiny text encoders and tokenizers of today's families, in diffusers' folders: hidden states are 32 numbers wide."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_models import enlarged, text_encoder, tiny_tokenizer
from transformers import CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel, T5Tokenizer

from daguerre.models import text_encoder as text_encoders
from daguerre.models.components import ComponentLoader
from daguerre.models.reading import Reading
from daguerre.models.settings import BASE, CaptionedSettings, Component, ComponentSpec
from daguerre.models.text_conditioning import TextConditioning

WIDTH = 32


class Settings(CaptionedSettings):
    """Three text encoders and nothing else."""

    family: str = "texts"
    text_encoder_2: Component = BASE
    tokenizer_2: str = BASE
    text_encoder_3: Component = BASE
    tokenizer_3: str = BASE
    max_sequence_length: int | None = None


def conditioning(folder: Path, readings: Mapping[str, Reading], **values: Any) -> TextConditioning:
    """The text conditioning of a folder with these encoders, by component."""
    names = {name: name.replace("text_encoder", "tokenizer") for name in readings}

    class Own(Settings):
        components = {name: ComponentSpec("text_encoder") for name in names} | {
            name: ComponentSpec("tokenizer") for name in names.values()
        }

    components = ComponentLoader(Own(pretrained_model_name_or_path=str(folder), scheduler=None), 0)
    encoders = [text_encoders.load(components, name, names[name], reading) for name, reading in readings.items()]
    return TextConditioning(tuple(encoders), **values)


def clip(projected: bool = False, layers: int = 3, width: int = WIDTH) -> Any:
    kind = CLIPTextModelWithProjection if projected else CLIPTextModel
    return text_encoder(kind, width, layers, 24, "quick_gelu", projection_dim=width).eval()


def clip_tokenizer() -> Any:
    return tiny_tokenizer()


def t5(width: int = WIDTH) -> Any:
    numbers = {"d_kv": 16, "d_ff": 37, "num_layers": 2, "num_heads": 2, "feed_forward_proj": "gated-gelu"}
    network = T5EncoderModel(T5Config(vocab_size=98, d_model=width, pad_token_id=0, eos_token_id=1, **numbers))
    return enlarged(network, "SelfAttention", 3.0).eval()


def t5_tokenizer() -> Any:
    """Letters, with T5's own padding and end; it does not say how long a text may be."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?'\"()-_/#@&+*%$"
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    return T5Tokenizer(vocab=special + [(letter, -3.0) for letter in letters], extra_ids=0)


def write(folder: Path, parts: Mapping[str, Any]) -> Path:
    """Writes networks and tokenizers as a pipeline's folder has them."""
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    return folder


def seeded(make: Any, seed: int = 0) -> Any:
    """`make()` with weights from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
