"""Byte-pair encoding in CLIP's form, learnt from a list of words: a tokenizer that transformers' CLIPTokenizer reads.

Only the vocabulary is made here; splitting text and adding the start and end tokens are transformers' own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer

WORD_END = "</w>"
START, END = "<|startoftext|>", "<|endoftext|>"


def learn(words: Sequence[str], max_tokens: int) -> Any:
    """A CLIPTokenizer in which each of `words` (lower case) is one token; any other text is spelled in pieces.

    256 byte symbols, the same at a word's end, one token a merge, start and end: CLIP's order (Radford et al. 2021).
    The end token also pads, as in CLIP. `max_tokens` is how many an encoded text has at most.
    """
    pairs: Any = _merges(words)
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*symbols, *(symbol + WORD_END for symbol in symbols), *("".join(pair) for pair in pairs), START, END]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=pairs, model_max_length=max_tokens, pad_token=END)
    assert len(tokenizer) == len(tokens), "transformers ignores in silence what it does not expect"
    return tokenizer


def files(tokenizer: Any) -> dict[str, bytes]:
    """The tokenizer's files by name. Save one that was not used yet: use leaves its padding and truncation behind."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def _merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs in the order in which they are joined, until each word is one token: the most frequent first, of equals the
    first in the alphabet. The order is the tokens' ids, and a library that breaks ties by its hashes gives others to
    each process: a run that goes on would read with the wrong rows of its embeddings."""
    spelled = [[*word[:-1], word[-1] + WORD_END] for text in words for word in text.lower().split()]
    merges = []
    while counts := Counter(pair for word in spelled for pair in pairwise(word)):
        joined = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(joined)
        spelled = [_joined(word, joined) for word in spelled]
    return merges


def _joined(symbols: Sequence[str], pair: tuple[str, str]) -> list[str]:
    """The symbols of a word with each occurrence of the pair as one, from the left."""
    found: list[str] = []
    for symbol in symbols:
        if found and (found[-1], symbol) == pair:
            found[-1] += symbol
        else:
            found.append(symbol)
    return found
