"""Stands for a tokenizer whose files are not here, where networks are built without weights: every text has as many
tokens as the encoder reads, and none of them means anything. For counting, never for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

_T5_TOKENS = 512


@dataclass(frozen=True)
class AbsentTokenizer:
    """Called as transformers' tokenizers are by models/text_encoder.py."""

    model_max_length: int
    pad_token_id: int = 0
    bos_token_id: int = 0
    eos_token_id: int = 0

    @classmethod
    def of(cls, encoder: Any) -> AbsentTokenizer:
        """One for texts as long as this encoder reads."""
        return cls(int(getattr(encoder.config, "max_position_embeddings", None) or _T5_TOKENS))

    def __call__(self, texts: Sequence[str], return_tensors: str | None = None, **asked: Any) -> SimpleNamespace:
        """Full windows where tensors are wanted, and nothing but start and end where lists are."""
        if return_tensors is None:
            return SimpleNamespace(input_ids=[[] for _ in texts])
        return SimpleNamespace(input_ids=torch.zeros(len(texts), self.model_max_length, dtype=torch.int64))
