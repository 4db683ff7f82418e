"""A frozen CLIP text encoder with its tokenizer: captions to features, for every family that reads with one.

Texts that are longer than the encoder can read are cut; `cut` says which. Shape letters: B texts, T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from daguerre.errors import UserError
from daguerre.families import pretrained

FILES = ["config.json", "model.safetensors"]
TOKENIZER_FILES = ["tokenizer_config.json"]


@dataclass(frozen=True, eq=False)
class TextReader:
    """A text encoder and the tokenizer that it was trained with."""

    encoder: Any
    """CLIPTextModel, frozen."""
    tokenizer: Any
    """CLIPTokenizer."""
    files: Mapping[str, bytes]
    """The tokenizer's, as they were loaded; saving one that was used writes its last padding and truncation, too."""

    @property
    def width(self) -> int:
        """Features of a token."""
        return int(self.encoder.config.hidden_size)

    def read(self, texts: Sequence[str]) -> Tensor:
        """The last hidden state [B, T, D] of all T tokens, as diffusers' pipelines take it (no attention mask)."""
        rows = self.tokenizer(
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=self.tokenizer.model_max_length,
            return_tensors="pt",
        )
        return self.encoder(rows.input_ids.to(self.encoder.device)).last_hidden_state

    def cut(self, texts: Sequence[str]) -> dict[int, str]:
        """Which texts are longer than the encoder reads, and what is done to them."""
        return cut(self.tokenizer, texts)


def cut(tokenizer: Any, texts: Sequence[str]) -> dict[int, str]:
    """Which texts a CLIP tokenizer cuts: {index: "cut to 77 tokens"}."""
    limit = tokenizer.model_max_length
    # A token holds a byte at least, and start and end take two: only texts of more bytes need a look.
    suspects = [i for i, text in enumerate(texts) if len(text.encode()) + 2 > limit]
    if not suspects:
        return {}
    asked = {"truncation": True, "max_length": limit, "return_overflowing_tokens": True}
    owners = list(tokenizer([texts[i] for i in suspects], **asked)["overflow_to_sample_mapping"])
    return {i: f"cut to {limit} tokens" for n, i in enumerate(suspects) if owners.count(n) > 1}


def load(encoder_folder: Path, tokenizer_folder: Path) -> TextReader:
    """Encoder and tokenizer, which must be a pair.

    transformers 5 builds a tokenizer of 2 tokens, in silence, when the files are not what it expects.
    """
    encoder = pretrained.load_frozen(CLIPTextModel, encoder_folder)
    tokenizer = CLIPTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    config = encoder.config
    if len(tokenizer) != config.vocab_size:
        raise UserError(
            f"{tokenizer_folder} has {len(tokenizer)} tokens, but the text encoder knows {config.vocab_size}: they are "
            "not a pair, or the tokenizer's files are incomplete (tokenizer.json, or vocab.json with merges.txt)"
        )
    if tokenizer.model_max_length > config.max_position_embeddings:
        raise UserError(
            f"{tokenizer_folder} sets model_max_length to {tokenizer.model_max_length}, but the text encoder reads "
            f"{config.max_position_embeddings} tokens: correct model_max_length in tokenizer_config.json"
        )
    files = {path.name: path.read_bytes() for path in sorted(tokenizer_folder.iterdir()) if path.is_file()}
    return TextReader(encoder, tokenizer, files)
