"""CLIP's own tokenizer, which every Stable Diffusion reads with and no single-file checkpoint holds.

The vocabulary is OpenAI's (MIT licence, beside it in assets): 256 bytes, the same at a word's end, one token a merge,
start and end. What differs between models is the token that pads.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from transformers import CLIPTokenizer

from daguerre.models.tokenizers import bpe

TOKENS = 49408
MAX_TOKENS = 77
_MERGES = Path(__file__).parents[2] / "assets" / "clip_merges.txt.gz"


@cache
def _words() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary in CLIP's order, and the merges."""
    lines = gzip.decompress(_MERGES.read_bytes()).decode("utf-8").splitlines()
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    # Printable Latin-1 stands for itself and comes first; the other bytes are written as the characters from 256 on.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    symbols = [chr(code) for code in (*printable, *range(256, 512 - len(printable)))]
    words = [*symbols, *(symbol + bpe.WORD_END for symbol in symbols), *("".join(pair) for pair in merges)]
    vocabulary = {word: i for i, word in enumerate([*words, bpe.START, bpe.END])}
    assert len(vocabulary) == TOKENS
    return vocabulary, merges


def tokenizer(pad: str) -> Any:
    """A CLIPTokenizer of CLIP's words that pads with `pad`: the end token in 1.x, "!" in 2.x and SDXL's second."""
    vocabulary, merges = _words()
    pairs: Any = merges
    made = CLIPTokenizer(vocab=vocabulary, merges=pairs, model_max_length=MAX_TOKENS, pad_token=pad)
    assert len(made) == TOKENS, "transformers ignores in silence what it does not expect"
    return made


def files(pad: str) -> dict[str, bytes]:
    """The tokenizer's files by name."""
    return bpe.files(tokenizer(pad))


def padding_of_standard(found: Mapping[str, bytes]) -> str | None:
    """With which token a tokenizer of these files pads, if its words are CLIP's own and it reads 77; else None."""
    config = json.loads(found.get("tokenizer_config.json", b"{}"))
    pad = config.get("pad_token")
    pad = pad.get("content") if isinstance(pad, dict) else pad
    if config.get("model_max_length") != MAX_TOKENS or pad not in (bpe.END, "!") or _vocabulary(found) != _words()[0]:
        return None
    return str(pad)


def _vocabulary(found: Mapping[str, bytes]) -> dict[str, int] | None:
    if "tokenizer.json" in found:
        whole = json.loads(found["tokenizer.json"])
        added = {word["content"]: word["id"] for word in whole.get("added_tokens", [])}
        return {**whole["model"]["vocab"], **added}
    if "vocab.json" in found:
        added = json.loads(found.get("added_tokens.json", b"{}"))
        return {**json.loads(found["vocab.json"]), **added}
    return None
