"""New tokens of a text encoder, and tokens of its vocabulary that are trained: rows of their own next to its
embeddings.

All other rows stay as they are, to the bit: they are no part of what is trained. The tokenizer learns the names as
diffusers' `load_textual_inversion` teaches them to its own: a token of n vectors is `NAME NAME_1 ... NAME_{n-1}`, and
is found in any case and wherever it stands. Shape letters: N rows, D width of the embeddings.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTokenizer

from daguerre.errors import UserError
from daguerre.models.parts.text import tokenizers
from daguerre.models.parts.text.encoder import TextEncoder
from daguerre.models.parts.text.tokenizers import WORD_END, AbsentTokenizer

ROWS = "rows"
"""Name of the parameter."""
_LEGACY_EOS = 2
"""With this number in its config CLIP pools at the highest id, which that of a new token is."""


class ExtendedEmbedding(nn.Module):
    """The embeddings of a vocabulary with rows of their own for some ids, in the vocabulary or above it."""

    weight: nn.Parameter
    ids: Tensor
    """int64 [N], of the rows."""
    embed_scale: Tensor | None
    """Factor of all embeddings; None: 1."""

    def __init__(self, table: Any, ids: Sequence[int], rows_ND: Tensor) -> None:
        """`table` are the embeddings of the vocabulary, an nn.Embedding."""
        super().__init__()
        self.weight = table.weight
        self.rows = nn.Parameter(rows_ND)
        self.register_buffer("ids", torch.tensor(ids, device=table.weight.device), persistent=False)
        self.register_buffer("embed_scale", getattr(table, "embed_scale", None), persistent=False)  # Gemma's
        self._table = (table,)  # in a tuple: its weight is registered here

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings [..., D] of ids [...], in the type of the vocabulary's."""
        # Compared rather than looked up: the rows are few, and indexing by a mask would make the host wait.
        same = ids[..., None] == self.ids
        own = same.any(-1)
        # Ids of new tokens are above the table: any valid row stands for them until `where` drops it.
        of_vocabulary = F.embedding(ids.masked_fill(own, 0), self.weight)
        of_rows = F.embedding(same.to(torch.int8).argmax(-1), self.rows)  # argmax takes no bool
        found = torch.where(own[..., None], of_rows.to(of_vocabulary.dtype), of_vocabulary)
        return found if self.embed_scale is None else found * self.embed_scale.to(found.dtype)

    def plain(self) -> nn.Embedding:
        """The embeddings of the vocabulary alone, of their library's class, with the same weight."""
        # The library's own class, as an export is opened by it: Gemma's scales its embeddings.
        made = copy.copy(self._table[0])
        made._parameters = {"weight": self.weight}
        made._buffers = {} if self.embed_scale is None else {"embed_scale": self.embed_scale}
        made.num_embeddings = len(self.weight)
        return made

    @torch.no_grad()
    def merge(self) -> None:
        """Puts the rows into the weight, which grows if it must."""
        most = max(len(self.weight), int(self.ids.max()) + 1)
        merged = self.weight.new_zeros(most, self.weight.shape[1])
        merged[: len(self.weight)] = self.weight
        merged[self.ids] = self.rows.to(merged.dtype)
        self.weight = nn.Parameter(merged, requires_grad=False)


def table(reader: TextEncoder) -> Tensor:
    """Embeddings [vocabulary, D] of a text encoder."""
    weight: Tensor = reader.encoder.get_input_embeddings().weight
    return weight.detach()


def names(reader: TextEncoder) -> list[str]:
    """The new tokens that a text encoder's tokenizer knows; of several vectors the first one's name."""
    if isinstance(reader.tokenizer, AbsentTokenizer):
        return []
    # Language models come with added tokens of their vendor's, such as <think>, which nobody here has trained.
    known = tokenizers.added(reader.files) if reader.kind.has_added_words else []
    added = [token.content for token in reader.tokenizer.added_tokens_decoder.values() if not token.special]
    found = [name for name in added if name not in known]
    return [name for name in found if name.rpartition("_")[0] not in found]


def as_read(reader: TextEncoder, name: str) -> str:
    """A name as the tokenizer reads it: CLIP's knows small letters alone."""
    return name.lower() if isinstance(reader.tokenizer, CLIPTokenizer) else name


def check_names(reader: TextEncoder, names: Sequence[str]) -> None:
    """UserError for names by which a tokenizer would find something else as well."""
    if isinstance(reader.tokenizer, AbsentTokenizer):
        return
    vocabulary = {word.removesuffix(WORD_END).lower() for word in _words(reader)}
    for number, name in enumerate(names):
        if not name or any(letter.isspace() for letter in name):
            raise UserError(f"{name!r} cannot be the name of a token: it is empty or has a space in it")
        lower = name.lower()
        if name != as_read(reader, name):
            raise UserError(
                f"the new token {name!r} has capital letters, which {reader.name} reads as small ones and diffusers "
                f"does not find: call it {lower!r}; prompts can have it in any case"
            )
        # A tokenizer finds added tokens before all others, also inside words.
        if words := sorted((word for word in vocabulary if lower in word), key=len):
            what = "is a token already" if lower in vocabulary else f"is a part of the token {words[0]!r}"
            raise UserError(
                f"{name!r} {what}, so prompts with it would change their meaning: choose another name, such as "
                f"{f'<{name}>'!r}",
                code="conflict",
            )
        if other := next((other for n, other in enumerate(names) if n != number and other.lower() in lower), None):
            raise UserError(
                f"the new token {name!r} has the name of another one, {other!r}, in it: choose names that do not "
                "contain each other",
                code="conflict",
            )


def matching(reader: TextEncoder, pattern: str) -> list[str]:
    """The tokens of the vocabulary in which a regular expression is found (as in Stable Cascade, `^dog</w>` is the
    whole word), by id. UserError without such a token."""
    if isinstance(reader.tokenizer, AbsentTokenizer):
        return [pattern]
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise UserError(f"{pattern!r} is not a regular expression: {error}") from None
    tokens = [word for word in _words(reader) if found.search(word)]
    if not tokens:
        raise UserError(
            f"no token of the vocabulary of {reader.name} fits {pattern!r}: a token at the end of a word ends with "
            f"{WORD_END}, so that ^dog{WORD_END} is the word dog",
            code="empty",
        )
    return tokens


def _words(reader: TextEncoder) -> list[str]:
    """The tokens of the vocabulary by id, without start, end and padding of a text."""
    ids: dict[str, int] = reader.tokenizer.get_vocab()
    special = {*reader.tokenizer.all_special_tokens} - {"!"}  # a token that 2.x also pads with
    return [word for word in sorted(ids, key=ids.__getitem__) if word not in special]


def ids_of(reader: TextEncoder, tokens: Sequence[str]) -> list[int]:
    """Ids of tokens of the vocabulary."""
    if isinstance(reader.tokenizer, AbsentTokenizer):
        return list(range(len(tokens)))
    found: list[int] = reader.tokenizer.convert_tokens_to_ids(list(tokens))
    return found


def ids_of_text(reader: TextEncoder, text: str) -> list[int]:
    """Ids of the tokens of a text. UserError if it has none."""
    if isinstance(reader.tokenizer, AbsentTokenizer):
        return [0]
    found = tokenizers.read(reader.tokenizer, [text])[0]
    if not found:
        raise UserError(f"{text!r} has no tokens: give a word that the text encoder knows", code="empty")
    return found


def attach(reader: TextEncoder, new: Mapping[str, Tensor], existing: Mapping[str, Tensor]) -> ExtendedEmbedding:
    """Gives a text encoder rows, in place: of each new token [n, D], after `check_names`, and of tokens of the
    vocabulary [1, D]. UserError for a token of more vectors than a text may have tokens."""
    room = tokenizers.room(reader.tokenizer, reader.max_tokens)
    for name, rows in new.items():
        if len(rows) > room:
            raise UserError(
                f"{name} has {len(rows)} vectors, but {reader.name} reads texts of {room} tokens: give it fewer",
                code="conflict",
            )
    ids = ids_of(reader, [*existing]) + _learn(reader, {name: len(rows) for name, rows in new.items()})
    before = reader.encoder.get_input_embeddings().weight
    owner, slot = _places(reader.encoder, before)[-1]  # a T5 has two tables, and reads the second
    # float32, whatever the table has: updates of a few rows would be lost in 16 bits.
    parts = [rows.to(before.device, torch.float32) for rows in (*existing.values(), *new.values())]
    there = getattr(owner, slot)
    if isinstance(there, ExtendedEmbedding):  # what comes first counts
        ids, parts, there = ids + there.ids.tolist(), [*parts, there.rows.detach()], there.plain()
    extended = ExtendedEmbedding(there, ids, torch.cat(parts))
    setattr(owner, slot, extended)
    for module in reader.encoder.modules():
        if getattr(module, "eos_token_id", None) == _LEGACY_EOS:
            module.eos_token_id = reader.tokenizer.eos_token_id
    return extended


def replace(reader: TextEncoder, old: nn.Module, new: nn.Module) -> None:
    """Puts one module in the place of another."""
    for owner in reader.encoder.modules():
        for slot, module in [*owner.named_children()]:
            if module is old:
                setattr(owner, slot, new)


def merge(reader: TextEncoder, extended: ExtendedEmbedding, names: Mapping[str, int]) -> None:
    """Puts the rows into the embeddings of a text encoder, and the names (with their numbers of vectors) into the files
    of its tokenizer."""
    before = extended.weight
    extended.merge()
    for owner, slot in _places(reader.encoder, before):
        setattr(owner, slot, extended.plain())
    head = reader.encoder.get_output_embeddings()
    if head is not None and head.weight is before:  # a language model's, which writes with the table that it reads with
        head.weight = extended.weight
    config = reader.encoder.config
    config.get_text_config().vocab_size = len(extended.weight)
    if getattr(config, "eos_token_id", None) == _LEGACY_EOS:
        config.eos_token_id = reader.tokenizer.eos_token_id
    fresh = tokenizers.loaded(type(reader.tokenizer), reader.files)
    fresh.add_tokens([token for name, count in names.items() for token in tokens_of(name, count)])
    reader.files.clear()
    reader.files.update(tokenizers.files(fresh))


def tokens_of(name: str, count: int) -> list[str]:
    """The tokens by which diffusers knows a token of several vectors."""
    return [name, *(f"{name}_{number}" for number in range(1, count))]


def _learn(reader: TextEncoder, counts: Mapping[str, int]) -> list[int]:
    """Ids of new tokens, which the tokenizer knows from now on."""
    tokens = [token for name, count in counts.items() for token in tokens_of(name, count)]
    if isinstance(reader.tokenizer, AbsentTokenizer):
        return list(range(len(table(reader)), len(table(reader)) + len(tokens)))
    added = reader.tokenizer.add_tokens(tokens)
    assert added == len(tokens), "a name is a token already"
    reader.spellings.update({name: " ".join(tokens_of(name, count)) for name, count in counts.items() if count > 1})
    return ids_of(reader, tokens)


def _places(encoder: nn.Module, weight: nn.Parameter) -> list[tuple[Any, str]]:
    """The modules that have the table of embeddings with this weight, and its name there."""
    return [
        (owner, slot)
        for owner in encoder.modules()
        for slot, module in owner.named_children()
        if isinstance(module, nn.Embedding | ExtendedEmbedding) and module.weight is weight
    ]
