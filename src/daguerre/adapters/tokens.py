"""New tokens (textual inversion, Gal et al. 2022, arXiv 2208.01618): words whose embeddings are trained, alone or
with a LoRA (pivotal tuning, Roich et al. 2021, arXiv 2106.05744; for text to image cloneofsimo/lora, 2022).

A token has n vectors in each text encoder, which are the only weights that are trained: they are parameters of their
own (models/parts/text/new_tokens.py), so that all other rows of the vocabulary stay as they are, to the bit. Tokens of
the vocabulary can be trained in the same way. The export is what diffusers, A1111 and ComfyUI read
(models/parts/text/token_files.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from daguerre import keys
from daguerre.adapters.adapter import Trainable, in_none
from daguerre.adapters.settings import AdapterSettings, Part
from daguerre.checkpoint.export import replaced
from daguerre.errors import UserError
from daguerre.models.export.about import About
from daguerre.models.frozen import keep_evaluating
from daguerre.models.parts.text import new_tokens, token_files
from daguerre.models.parts.text.encoder import TextEncoder
from daguerre.models.parts.text.new_tokens import ExtendedEmbedding
from daguerre.settings import ADDRESS
from daguerre.settings import Settings as Section

if TYPE_CHECKING:
    from daguerre.models.family import Family
    from daguerre.objectives.objective import Objective
    from daguerre.samplers.settings import SamplingSettings


class TokenSettings(Section):
    """A new token. It starts from one of init, init_pattern and init_file, else from random numbers with the standard
    deviation of the vocabulary's embeddings."""

    vectors: int | None = Field(None, ge=1)
    """Vectors of the token: it takes as many places in a prompt. null: as many as it starts from, else 1."""
    init: str | None = Field(None, pattern=r"\S")
    """A word or text: each vector starts from the embedding of one of its tokens, from the first again after the
    last."""
    init_pattern: str | None = Field(None, pattern=r"\S")
    """A regular expression: each vector starts from the mean of the embeddings of all tokens in which it is found;
    ^dog</w> is the word dog."""
    init_file: Annotated[str | None, ADDRESS] = None
    """A file of a trained token, in the layout of diffusers, A1111 or sd-scripts."""

    @model_validator(mode="after")
    def _starts_once(self) -> TokenSettings:
        given = [name for name in ("init", "init_pattern", "init_file") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: a token can start from one of them only, remove the others")
        return self


class Settings(AdapterSettings):
    """Trains embeddings of new tokens, and of tokens of the vocabulary."""

    part: ClassVar[Part] = "embeddings"
    of_weights = frozenset(
        {"placeholder_token", "initializer_token", "num_vectors", "tokens", "existing", "text_encoders"}
    )

    name: Literal["tokens"] = "tokens"
    """Name of the adapter."""
    placeholder_token: str | None = Field(None, pattern=r"\S")
    """Name of a new token, such as <toy>, as captions and prompts have it."""
    initializer_token: str | None = Field(None, pattern=r"\S")
    """A word or text that it starts from, such as toy. null: random numbers."""
    num_vectors: int | None = Field(None, ge=1)
    """Its vectors: it takes as many places in a prompt. null: as many as initializer_token has tokens, else 1."""
    tokens: dict[str, TokenSettings] = Field({})
    """Further new tokens by name: {"<toy>": {vectors: 4, init: toy}, "<look>": {init_pattern: "^red"}}."""
    existing: list[str] = Field([])
    """Regular expressions: the tokens of the vocabulary in which one is found are trained, too, such as ^dog</w>."""
    text_encoders: list[str] | None = Field(None, min_length=1)
    """The text encoders that learn the tokens. null: all of the family."""

    @model_validator(mode="after")
    def _some(self) -> Settings:
        if not (self.placeholder_token or self.tokens or self.existing):
            raise ValueError(
                "nothing would be trained: set placeholder_token, such as <toy>, or tokens, or existing for tokens "
                "that the vocabulary has"
            )
        if self.placeholder_token in self.tokens:
            raise ValueError(f"{self.placeholder_token} is given twice: as placeholder_token and in tokens")
        if self.placeholder_token is None and (self.initializer_token or self.num_vectors):
            raise ValueError("initializer_token and num_vectors have no effect without placeholder_token")
        return self

    def reaches(self, trainable: Sequence[str]) -> tuple[str, ...]:
        """The text encoders: all that can be trained with the main component."""
        return tuple(trainable[1:] if self.text_encoders is None else self.text_encoders)

    @property
    def new(self) -> dict[str, TokenSettings]:
        """All new tokens by name."""
        if self.placeholder_token is None:
            return self.tokens
        own = TokenSettings(vectors=self.num_vectors, init=self.initializer_token)
        return {self.placeholder_token: own, **self.tokens}


@dataclass(frozen=True, eq=False)
class _Part:
    """One text encoder and its rows."""

    reader: TextEncoder
    extended: ExtendedEmbedding
    existing: tuple[str, ...]
    counts: Mapping[str, int]
    """Vectors of each new token."""

    def rows(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Rows of the new tokens, and of those of the vocabulary."""
        parts = self.extended.rows.detach().split([*(1 for _ in self.existing), *self.counts.values()])
        old = len(self.existing)
        return dict(zip(self.counts, parts[old:], strict=True)), dict(zip(self.existing, parts[:old], strict=True))


@dataclass(frozen=True, eq=False)
class Tokens(Trainable):
    """Text encoders with rows of their own for tokens."""

    net: nn.Module
    names: frozenset[str]
    parts: Mapping[str, _Part]
    """By component."""
    model: Family
    float32 = True

    def unseen(self, captions: Callable[[int], Sequence[str]]) -> list[str]:
        missing, count = in_none(next(iter(self.parts.values())).counts, captions)
        return [
            f"the new token {name} is in none of the first {count} captions, without which it learns nothing: "
            "write it into them, or set data.captions.text (docs/tokens.md)"
            for name in missing
        ]

    def export(self, folder: Path, objective: Objective, sampling: SamplingSettings, about: About) -> list[str]:
        """The files that diffusers, A1111, ComfyUI and sd-scripts read."""
        new: token_files.Embeddings = {}
        existing: token_files.Embeddings = {}
        for component, part in self.parts.items():
            for found, own in zip((new, existing), part.rows(), strict=True):
                for name, rows in own.items():
                    found.setdefault(name, {})[component] = rows
        assert self.model.text is not None
        named = token_files.keys(self.model.text.encoders)
        with replaced(folder) as fresh:
            token_files.write(fresh, new, existing, token_files.metadata(self.model.components, about), named)
            (fresh / "README.md").write_text(token_files.card(new, [*self.parts]), encoding="utf-8")
        if existing:
            return [
                f"{token_files.EXISTING}.safetensors has trained words that the vocabulary had before: "
                "Daguerre alone reads it, as other programs' files have new words only"
            ]
        return []

    def merge(self) -> None:
        """The rows among those of the vocabulary, and the names in the tokenizers' files."""
        for part in self.parts.values():
            new_tokens.merge(part.reader, part.extended, part.counts)

    @contextmanager
    def detached(self) -> Iterator[None]:
        """The embeddings of the vocabulary stand alone."""
        places = [(part.reader, part.extended, part.extended.plain()) for part in self.parts.values()]
        for reader, extended, plain in places:
            new_tokens.replace(reader, extended, plain)
        try:
            yield
        finally:
            for reader, extended, plain in places:
                new_tokens.replace(reader, plain, extended)


def attach(settings: Settings, model: Family, seed: int) -> Tokens:
    """Gives text encoders rows for the tokens. UserError for names that clash, and for what no row can start from."""
    readers = {} if model.text is None else {reader.name: reader for reader in model.text.encoders}
    reached = settings.reaches(model.trainable)
    if not reached or not {*reached} <= readers.keys():
        raise UserError(
            f"new tokens need text encoders: this family has {', '.join(readers) or 'none that can be trained alone'}",
            code="unsupported",
        )
    parts: dict[str, _Part] = {}
    names = set[str]()
    for component in reached:
        reader = readers[component]
        new_tokens.check_names(reader, [*settings.new])
        new = {name: _start(own, name, reader, [*readers.values()], seed) for name, own in settings.new.items()}
        existing = list(dict.fromkeys(t for pattern in settings.existing for t in new_tokens.matching(reader, pattern)))
        rows_E1D = new_tokens.table(reader)[new_tokens.ids_of(reader, existing)][:, None]
        extended = new_tokens.attach(reader, new, dict(zip(existing, rows_E1D, strict=True)))
        parts[component] = _Part(reader, extended, tuple(existing), {name: len(own) for name, own in new.items()})
        names |= {f"{component}.{name}" for name, p in reader.encoder.named_parameters() if p is extended.rows}
        keep_evaluating(reader.encoder)
    return Tokens(model.net, frozenset(names), parts, model)


def _start(own: TokenSettings, name: str, reader: TextEncoder, readers: Sequence[TextEncoder], seed: int) -> Tensor:
    """The first values [n, D] of a token's vectors."""
    table = new_tokens.table(reader)
    if own.init_file is not None:
        return _repeated(_of_file(own.init_file, reader, readers), own, name, f"init_file={own.init_file}")
    if own.init is not None:
        found = table[new_tokens.ids_of_text(reader, own.init)]
        return _repeated(found, own, name, f"{own.init!r}")
    if own.init_pattern is not None:
        ids = new_tokens.ids_of(reader, new_tokens.matching(reader, own.init_pattern))
        return _repeated(table[ids].float().mean(0, keepdim=True), own, name, own.init_pattern)
    shape = own.vectors or 1, table.shape[1]
    drawn: Any = keys.normals(seed, f"new token {reader.name} {name}", 0, count=shape[0] * shape[1])
    return torch.from_numpy(drawn).reshape(shape).to(table.device) * table.float().std()


def _of_file(place: str, reader: TextEncoder, readers: Sequence[TextEncoder]) -> Tensor:
    path = Path(place).expanduser()
    if not path.exists():
        raise UserError(f"init_file: {place}: there is no such file", code="missing")
    tokens, _ = token_files.read(path, readers)
    if len(tokens) != 1:
        raise UserError(f"init_file: {place} has {len(tokens)} new tokens: give a file of one", code="conflict")
    return next(iter(tokens.values()))[reader.name]


def _repeated(rows: Tensor, own: TokenSettings, name: str, origin: str) -> Tensor:
    """The rows, from the first again after the last, as many as the token has vectors."""
    count = own.vectors or len(rows)
    if count < len(rows):
        raise UserError(
            f"{name} has {count} vectors, but {origin} has {len(rows)}, of which the last would be lost: give it "
            f"{len(rows)} vectors, or another start",
            code="conflict",
        )
    return rows[torch.arange(count) % len(rows)]
