"""Tokenizers of CLIP's form: OpenAI's own, one learnt from a list of words, and a stand-in that only counts tokens.

Vocabularies alone are made here; splitting text into tokens is transformers' own. OpenAI's vocabulary (MIT licence,
next to it in assets) is what every Stable Diffusion reads with and no single file holds.

Texts are read by several threads with one tokenizer. transformers keeps the padding and the truncation of the last call
in the tokenizer, where another thread's call would change them meanwhile, and ids be wrong without an error. So no
call asks for either (`read`): windows are cut and filled here.

Shape letters: B texts, K windows, T tokens of a window.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import CLIPTokenizer

from daguerre import documents
from daguerre.errors import UserError

WORD_END = "</w>"
START, END = "<|startoftext|>", "<|endoftext|>"
CLIP_TOKENS = 49408
_CLIP_WINDOW = 77
_CLIP_MERGES = Path(__file__).parents[3] / "assets" / "clip_merges.txt.gz"
Merges = Sequence[tuple[str, str]]
_PLAIN = (
    "a photo of two Cats, 3 dogs & a bird's nest (oil painting)",
    "Café at night: neon-lit streets, 35mm.\nA red circle on a white table",
    "красный круг, 赤い円",
)
"""Captions that every program splits as the tokenizer's own file says."""
_MARK = re.compile(r"<.*>|\[.*\]", re.DOTALL)
"""Words of a vocabulary that stand for something else than their letters; no pairs make them."""
_MOST_WORDS, _UNMADE_SHARE = 2000, 0.05
"""Most words that are tried, and the share of them that published tokenizers stay far below: other pairs of their
letters are joined first."""


def learn(words: Sequence[str], max_tokens: int) -> Any:
    """A CLIPTokenizer in which each of `words` (lower case) is one token; any other text is spelled in pieces.

    The end token also pads, as in CLIP. `max_tokens` is how many an encoded text has at most.
    """
    return _tokenizer(_learnt_merges(words), max_tokens, END)


def clip(pad: str) -> Any:
    """OpenAI's tokenizer, which pads with `pad`: the end token in 1.x, "!" in 2.x and SDXL's second."""
    return _tokenizer(_clip_merges(), _CLIP_WINDOW, pad)


class Tokens(NamedTuple):
    """Texts as numbers."""

    ids_BKT: Tensor
    """int64, special tokens and padding included."""
    counts_BK: Tensor
    """int64: tokens of the text in each window; a window that only pads the batch has -1."""
    ragged: bool = False
    """Whether texts of several lengths are filled up to the longest."""


def opened(load: Callable[[Path], Any], folder: Path) -> Any:
    """The tokenizer of a folder, which no call changes. What `documents.MISREAD` lists, where it cannot be read."""
    with documents.Bare():
        return stateless(load(folder))


def other_ids(tokenizer: Any, own: bytes | None) -> str | None:
    """The problem of a tokenizer that gives captions other ids than its author's, behind "the tokenizer of ...".

    transformers takes words and pairs out of `own` (tokenizer.json, None: it is not there), and how a text is split
    from the class, silently; without pairs it spells every word in letters.
    """
    backend = tokenizer.backend_tokenizer
    try:
        with documents.Bare():
            if words := _unmade(backend):
                return (
                    f"lacks pairs (merges) that make its words: {words[0]!r} is spelled in pieces. Take the whole "
                    "tokenizer.json, or merges.txt with vocab.json, of the model's author"
                )
            written = backend if own is None else Tokenizer.from_str(own.decode("utf-8"))
            # Files often hold the padding and truncation of the last call before they were saved.
            written.no_padding()
            written.no_truncation()
            ids = [[each.encode(text, add_special_tokens=False).ids for text in _PLAIN] for each in (backend, written)]
    except documents.MISREAD as error:
        return f"cannot be read: {error}"
    if ids[0] == ids[1]:
        return None
    return (
        f"has rules in tokenizer.json (normalizer, pre_tokenizer, prefix space) by which captions get other ids than "
        f"by {type(tokenizer).__name__}, with which programs read it: take all of its files from the model's author"
    )


def _unmade(backend: Tokenizer) -> list[str]:
    """Words of a vocabulary that its pairs do not make, where they are too many."""
    if not isinstance(backend.model, BPE):
        return []
    end = backend.model.end_of_word_suffix or ""
    plain = (word for word in backend.get_vocab(with_added_tokens=False) if word.endswith(end))
    words = [word for word in plain if len(word.removesuffix(end)) > 1 and not _MARK.fullmatch(word)]
    tried = words[:: -(-len(words) // _MOST_WORDS) or 1]
    lost = [word for word in tried if len(backend.model.tokenize(word.removesuffix(end))) != 1]
    return lost if len(lost) > _UNMADE_SHARE * len(tried) else []


def stateless(tokenizer: Any) -> Any:
    """The tokenizer without the padding and truncation that its files may hold, so that no call changes it."""
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    return tokenizer


def read(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text, whole, without start and end. By any number of threads at once."""
    # Quiet: transformers warns of each text that is longer than its limit, which is cut or read in windows here.
    found: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
    return found


def room(tokenizer: Any, length: int | None = None) -> int:
    """Tokens of a text that one window of this many tokens holds; None: of as many as the tokenizer says."""
    return int(length or tokenizer.model_max_length) - sum(map(len, ends(tokenizer)))


def windows(
    tokenizer: Any,
    texts: Sequence[str],
    most: int | None,
    length: int | None = None,
    longest: bool = False,
    kept: int = 0,
    step: int = 1,
) -> Tokens:
    """Texts in windows of as many tokens as are read at once, each with start and end, in as many windows as the
    longest text has, or in the `most` that are allowed: what does not fit is cut off.

    `length` are the tokens of a window, None: as the tokenizer says; `longest`: as many as the longest text fills, up
    to the next multiple of `step`.
    `kept` are the tokens at a text's end that stay where a text of one window is cut.
    """
    start, end = ends(tokenizer)
    if (size := room(tokenizer, length)) < 1:
        own = len(start) + len(end)
        raise UserError(
            f"model.max_sequence_length is {length}, and {own} of a window's tokens are its start and end, so that "
            f"none is left for a text: set {own + 1} or more",
            setting="model.max_sequence_length",
        )
    bodies = read(tokenizer, texts)
    # Cut in the middle: the template's end says that the caption is over, and its features are read, too.
    if kept:
        bodies = [[*body[: size - kept], *body[-kept:]] if len(body) > size else body for body in bodies]
    n_windows = min(max(1, *(-(-len(body) // size) for body in bodies)), most or sys.maxsize)
    around = len(start) + len(end)
    filled = min(size, max(map(len, bodies))) if longest else size
    n_tokens = min(-(-(filled + around) // step) * step, size + around) if longest else size + around
    ids = np.full((len(texts), n_windows, n_tokens), tokenizer.pad_token_id, dtype=np.int64)
    counts = np.full((len(texts), n_windows), -1, dtype=np.int64)
    for row, body in enumerate(bodies):
        for k in range(n_windows):
            part = body[k * size : (k + 1) * size]
            window = [*start, *part, *end]
            ids[row, k, : len(window)] = window
            if part or k == 0:
                counts[row, k] = len(part)
    lengths = {-(-(count + around) // step) for count in counts[:, 0].tolist()}
    return Tokens(torch.from_numpy(ids), torch.from_numpy(counts), longest and len(lengths) > 1)


def truncated(tokenizer: Any, texts: Sequence[str], length: int | None = None) -> dict[int, str]:
    """The texts that are longer than one window: {index: "cut to 77 tokens"}."""
    size = room(tokenizer, length)
    # A token holds a byte at least: only texts of more bytes need a look.
    suspects = [i for i, text in enumerate(texts) if len(text.encode()) > size]
    bodies = read(tokenizer, [texts[i] for i in suspects]) if suspects else []
    long = (i for i, body in zip(suspects, bodies, strict=True) if len(body) > size)
    return dict.fromkeys(long, f"cut to {length or tokenizer.model_max_length} tokens")


def ends(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids before a text and those behind it: CLIP has a start and an end, T5 an end, Gemma a start, Qwen none."""
    # Found by a text: attributes for start and end are set also where a tokenizer does not put them there.
    body = read(tokenizer, ["a"])[0]
    whole: list[int] = tokenizer(["a"]).input_ids[0]
    start = next(k for k in range(len(whole) + 1) if whole[k : k + len(body)] == body)
    return whole[:start], whole[start + len(body) :]


def files(tokenizer: Any) -> dict[str, bytes]:
    """The tokenizer's files by name."""
    # transformers writes and reads tokenizers by folders alone.
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def filled(found: Mapping[str, bytes], size: int) -> dict[str, bytes]:
    """The files of a tokenizer, by name, with words that no text has, until there are `size` of them."""
    whole = json.loads(found["tokenizer.json"])
    words = whole["model"]["vocab"]
    words |= {f"<unused {number}>": number for number in range(len(words), size)}
    return {**found, "tokenizer.json": json.dumps(whole).encode()}


def loaded(kind: Any, found: Mapping[str, bytes]) -> Any:
    """The tokenizer of this class that these files hold."""
    with TemporaryDirectory() as folder:
        for name, content in found.items():
            (Path(folder) / name).write_bytes(content)
        return kind.from_pretrained(folder, local_files_only=True)


def clip_padding(found: Mapping[str, bytes]) -> str | None:
    """The token with which the tokenizer of these files pads, if it is OpenAI's and reads 77 tokens; else None."""
    config = json.loads(found.get("tokenizer_config.json", b"{}"))
    pad = config.get("pad_token")
    pad = pad.get("content") if isinstance(pad, dict) else pad
    is_clip = config.get("model_max_length") == _CLIP_WINDOW and pad in (END, "!")
    return pad if is_clip and _vocabulary_in(found) == _vocabulary(_clip_merges()) else None


def added(found: Mapping[str, bytes]) -> list[str]:
    """The tokens that the tokenizer of these files has in addition to its vocabulary, in the order of their ids."""
    if "tokenizer.json" in found:
        whole = json.loads(found["tokenizer.json"])
        own = {word["content"]: word["id"] for word in whole.get("added_tokens", [])}
        return sorted(own.keys() - whole["model"]["vocab"].keys(), key=own.__getitem__)
    own = json.loads(found.get("added_tokens.json", b"{}"))
    return sorted(own.keys() - json.loads(found.get("vocab.json", b"{}")).keys(), key=own.__getitem__)


def _vocabulary_in(found: Mapping[str, bytes]) -> dict[str, int]:
    if "tokenizer.json" in found:
        whole = json.loads(found["tokenizer.json"])
        return {**whole["model"]["vocab"], **{word["content"]: word["id"] for word in whole.get("added_tokens", [])}}
    return {**json.loads(found.get("vocab.json", b"{}")), **json.loads(found.get("added_tokens.json", b"{}"))}


def _vocabulary(merges: Merges) -> dict[str, int]:
    """256 byte symbols, the same at a word's end, one token a merge, start and end: CLIP's order (Radford et al. 2021).

    Sorted, the symbols are printable Latin-1, which stands for itself, and then the characters from 256 on.
    """
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*symbols, *(symbol + WORD_END for symbol in symbols), *map("".join, merges), START, END]
    return {token: i for i, token in enumerate(tokens)}


def _tokenizer(merges: Any, max_tokens: int, pad: str) -> Any:
    vocabulary = _vocabulary(merges)
    made = CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=max_tokens, pad_token=pad)
    assert len(made) == len(vocabulary), "transformers silently ignores what it does not expect"
    return stateless(made)


@cache
def _clip_merges() -> list[tuple[str, str]]:
    lines = gzip.decompress(_CLIP_MERGES.read_bytes()).decode("utf-8").splitlines()
    return [(left, right) for left, _, right in (line.partition(" ") for line in lines)]


def words(texts: Iterable[str]) -> list[str]:
    """The words of texts as these tokenizers split them, in small letters, each once and in the alphabet's order; a
    number's digits and punctuation are words, too."""
    return sorted({word for text in texts for _, word in _split(text)})


@cache
def _splitter() -> Any:
    return _tokenizer([], _CLIP_WINDOW, END).backend_tokenizer


def _split(text: str) -> list[tuple[str, str]]:
    """The pieces of a text in which tokens are joined, each as the symbols of its bytes and as it reads."""
    plain = _splitter().normalizer.normalize_str(text)
    return [(piece, plain[start:end]) for piece, (start, end) in _splitter().pre_tokenizer.pre_tokenize_str(plain)]


def _learnt_merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs in the order in which they are joined, until each word is one token: the most frequent first, of equals the
    first in the alphabet. The order is the tokens' ids, and a library that breaks ties by its hashes gives others to
    each process: a run that goes on would read with the wrong rows of its embeddings."""
    spelled = [[*piece[:-1], piece[-1] + WORD_END] for text in words for piece, _ in _split(text)]
    counts = Counter(pair for word in spelled for pair in pairwise(word))
    holders: dict[tuple[str, str], set[int]] = defaultdict(set)
    for i, word in enumerate(spelled):
        for pair in pairwise(word):
            holders[pair].add(i)
    waiting = [(-count, pair) for pair, count in counts.items()]
    heapify(waiting)
    merges = []
    while waiting:
        count, joined = heappop(waiting)
        if counts[joined] != -count:
            continue  # a count of before
        merges.append(joined)
        changed = set()
        # Only the words that hold the pair are counted again: twenty thousand words would take hours otherwise.
        for i in list(holders[joined]):
            after = _joined(spelled[i], joined)
            for pairs, step in ((pairwise(spelled[i]), -1), (pairwise(after), 1)):
                for pair in pairs:
                    counts[pair] += step
                    changed.add(pair)
                    if step > 0:
                        holders[pair].add(i)
            spelled[i] = after
        for pair in changed:
            if counts[pair] > 0:
                heappush(waiting, (-counts[pair], pair))
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


@dataclass(frozen=True)
class AbsentTokenizer:
    """Stands for a tokenizer whose files are not here, where networks are built without weights: every text is one
    window, of which no token means anything. For counting, never for training."""

    model_max_length: int
    pad_token_id: int = 0
    bos_token_id: int = 0
    eos_token_id: int = 0

    def __call__(self, texts: Sequence[str], **options: Any) -> SimpleNamespace:
        """Nothing between start and end."""
        return SimpleNamespace(input_ids=[[] for _ in texts])
