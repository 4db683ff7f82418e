"""A frozen CLIP text encoder with its tokenizer: captions to features, for every family that reads with one.

Texts that are longer than the encoder can read are cut, and counted. Shape letters: B texts, T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from daguerre.errors import UserError
from daguerre.families import pretrained

FILES = ["config.json", "model.safetensors"]
TOKENIZER_FILES = ["tokenizer_config.json"]


@dataclass
class Truncation:
    """Texts that were longer than the text encoder can read."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def note(self, texts: Sequence[str]) -> None:
        """Counts these texts, and keeps the first three ever seen."""
        self.count += len(texts)
        self.examples += texts[: 3 - len(self.examples)]


@dataclass(frozen=True, eq=False)
class TextReader:
    """A text encoder and the tokenizer that it was trained with."""

    encoder: Any
    """CLIPTextModel, frozen."""
    tokenizer: Any
    """CLIPTokenizer."""
    files: Mapping[str, bytes]
    """The tokenizer's, as they were loaded; saving one that was used writes its last padding and truncation, too."""
    cut: dict[str, Truncation] = field(default_factory=dict)
    """What was cut, by kind of text."""

    @property
    def width(self) -> int:
        """Features of a token."""
        return int(self.encoder.config.hidden_size)

    def read(self, texts: Sequence[str], kind: str) -> Tensor:
        """The last hidden state [B, T, D] of all T tokens, as diffusers' pipelines take it (no attention mask)."""
        rows = self.tokenizer(
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=self.tokenizer.model_max_length,
            return_overflowing_tokens=True,
        )
        text_of_row = rows["overflow_to_sample_mapping"]
        first_rows = [text_of_row.index(i) for i in range(len(texts))]
        self.cut.setdefault(kind, Truncation()).note([t for i, t in enumerate(texts) if text_of_row.count(i) > 1])
        ids_BT = torch.tensor([rows["input_ids"][row] for row in first_rows], device=self.encoder.device)
        return self.encoder(ids_BT).last_hidden_state

    def report(self) -> dict[str, dict[str, object]]:
        """What was cut: {"captions cut to 77 tokens": {"count": ..., "examples": [...]}}."""
        limit = self.tokenizer.model_max_length
        return {
            f"{kind} cut to {limit} tokens": {"count": cut.count, "examples": list(cut.examples)}
            for kind, cut in self.cut.items()
            if cut.count
        }


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
