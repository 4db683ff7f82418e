"""A text encoder with its tokenizer, read as a family says: captions to features, frozen or trained.

A text longer than is read is truncated, or (`Reading.long`) read in windows, each with its own start and end. Shape
letters: B texts, K windows, T tokens of a window, D features, P pooled features.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daguerre import documents
from daguerre.errors import UserError
from daguerre.models import encoders
from daguerre.models.components import ComponentLoader
from daguerre.models.network import Facts
from daguerre.models.parts.text import masks, tokenizers
from daguerre.models.parts.text.clip import CLIP
from daguerre.models.parts.text.language_model import LanguageModel
from daguerre.models.parts.text.network import TextNetwork
from daguerre.models.parts.text.seen import Seen
from daguerre.models.parts.text.t5 import T5
from daguerre.models.parts.text.tokenizers import AbsentTokenizer, Tokens
from daguerre.models.reading import Reading
from daguerre.models.settings import BASE
from daguerre.models.weights import resolve

_CLIP, _T5 = CLIP(), T5()
_KINDS: tuple[TextNetwork, ...] = (_CLIP, _T5, LanguageModel())
_USUAL = Reading()
_ALWAYS_TOLD = ("kinds", "layers", "final_norm", "long", "masked", "max_tokens", "pooled")
"""Fields of a `Reading` that the rules of every encoder have, in a form of their own."""


class Features(NamedTuple):
    """Features of texts by one encoder."""

    hidden_BTD: Tensor
    """Hidden states; T counts the tokens of all windows."""
    pooled_BKP: Tensor | None
    """Pooled features of each window, where they are read."""
    mask_BT: Tensor | None
    """True for the tokens that the denoiser may attend to; None for all."""


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """A text encoder and the tokenizer that it was trained with."""

    name: str
    """Name of the component, such as `text_encoder`."""
    encoder: Any
    """The network, of one of the classes in models/parts/text."""
    tokenizer: Any
    """transformers' tokenizer; an AbsentTokenizer where networks are built without weights."""
    files: dict[str, bytes]
    """The tokenizer's files by name, as they were loaded."""
    reading: Reading = _USUAL
    spellings: dict[str, str] = field(default_factory=dict)
    """New tokens of several vectors, and what stands in a text for each (models/parts/text/new_tokens.py)."""

    @cached_property
    def kind(self) -> TextNetwork:
        """The kind of the network."""
        return kind_of(self.encoder.config.model_type)

    @property
    def tokenizer_class(self) -> str:
        """Name of transformers' class of its tokenizer."""
        return type(self.tokenizer).__name__

    @property
    def width(self) -> int:
        """D of all hidden states that are read together."""
        return self.kind.width(self.encoder.config) * len(self.reading.layers)

    @property
    def layers(self) -> int:
        return self.kind.depth(self.encoder.config)

    @property
    def max_tokens(self) -> int:
        """Tokens of a text, or of a window, with start and end."""
        return int(self.reading.max_tokens or self.tokenizer.model_max_length)

    def rules(self) -> dict[str, Any]:
        """All that decides the features besides the encoder's weights and config, as JSON."""
        reading = self.reading
        # A cache is found by these rules: what is as it always was has no entry, so that older caches stay valid.
        further = {
            each.name: getattr(reading, each.name)
            for each in fields(Reading)
            if each.name not in _ALWAYS_TOLD and getattr(reading, each.name) != getattr(_USUAL, each.name)
        }
        projects = hasattr(self.encoder, "text_projection")
        if reading.pooled != ("projected" if projects else None):
            further["pooled"] = reading.pooled
        return {
            "layer": reading.layers[0] if len(reading.layers) == 1 else list(reading.layers),
            "final_norm": reading.final_norm,
            "long": reading.long,
            "masked": reading.masked,
            "class": type(self.encoder).__name__,
            "max_tokens": self.max_tokens,
            "tokenizer": {name: sha256(content).hexdigest() for name, content in sorted(self.files.items())},
            "spellings": dict(sorted(self.spellings.items())),
            **further,
        }

    def tokens(self, texts: Sequence[str]) -> Tokens:
        """The tokens of texts, on the CPU."""
        most = None if self.reading.long else 1
        # Without a tokenizer nothing has a length: what is counted then is the most that there can be.
        longest = self.reading.padding == "longest" and not isinstance(self.tokenizer, AbsentTokenizer)
        kept, step = self.reading.kept, self.reading.step
        return tokenizers.windows(self.tokenizer, self._written(texts), most, self._length, longest, kept, step)

    def features(self, tokens: Tokens, seen: Seen | None = None) -> Features:
        """Features of tokens on the encoder's device, as diffusers' pipelines take them; `seen` are the images among
        those of a language model."""
        reading, (n_texts, n_windows, n_tokens) = self.reading, tokens.ids_BKT.shape
        # Where nothing is padding there is no mask: without one, attention has more kernels to choose from.
        is_full = reading.padding == "longest" and not tokens.ragged
        hides = reading.masked and not (is_full and reading.step == 1)
        mask = self._is_text(tokens).flatten(0, 1).long() if hides else None
        images = {} if seen is None else {"images": seen}
        with encoders.at_work(self.encoder), masks.unread(tokens.ids_BKT.device):
            hidden, pooled = self.kind.read(self.encoder, tokens.ids_BKT.flatten(0, 1), mask, reading, **images)
        # in one piece, as a cache has it: kernels are chosen by strides, and round differently
        hidden = hidden.reshape(n_texts, n_windows * n_tokens, -1)[:, reading.dropped :].contiguous()
        mask_BT = None
        if reading.text_mask and not is_full:
            mask_BT = self._is_text(tokens, reading.step).flatten(1)[:, reading.dropped :]
            if reading.padding == "longest":  # zeros as in diffusers' pipelines, and in a batch of cached rows
                hidden = hidden.masked_fill(torch.logical_not(mask_BT)[..., None], 0)
        elif n_windows > 1:
            mask_BT = (tokens.counts_BK >= 0).repeat_interleave(n_tokens, 1)
        return Features(hidden, None if pooled is None else pooled.reshape(n_texts, n_windows, -1), mask_BT)

    def truncated(self, texts: Sequence[str]) -> dict[int, str]:
        """Texts that are longer than the encoder reads, by index."""
        if self.reading.long:
            return {}
        long = tokenizers.truncated(self.tokenizer, self._written(texts), self._length)
        return dict.fromkeys(long, f"cut to {self.max_tokens} tokens")

    @property
    def facts(self) -> Facts:
        """Facts of the network, as it is read: no feature depends on layers behind the ones that are read."""
        unread = {id(parameter) for parameter in self.kind.unread(self.encoder, self.reading)}
        names = frozenset(name for name, parameter in self.encoder.named_parameters() if id(parameter) in unread)
        return replace(self.kind.facts, unread=names)

    @property
    def _length(self) -> int:
        """Tokens that the encoder gets, with those of which nothing is kept."""
        return self.max_tokens + self.reading.dropped

    @cached_property
    def _ends(self) -> int:
        """Tokens that are put before and behind a text."""
        return sum(map(len, tokenizers.ends(self.tokenizer)))

    def lengths(self, counts_BK: Tensor, step: int | None = None) -> Tensor:
        """[B, K]: the tokens of each window, start and end among them, up to the next multiple of a step (None: as they
        are read, with the padding that the denoiser attends to). A window that only pads the batch has its first, as
        attention to nothing is not a number."""
        step = step or self.reading.step
        real_BK = torch.where(counts_BK < 0, 1, counts_BK + self._ends)
        return (real_BK + step - 1) // step * step

    def _is_text(self, tokens: Tokens, step: int = 1) -> Tensor:
        """[B, K, T] bool: the tokens that are no padding, or none behind the next multiple of a step."""
        counts_BK = tokens.counts_BK
        return torch.arange(tokens.ids_BKT.shape[2], device=counts_BK.device) < self.lengths(counts_BK, step)[..., None]

    def _written(self, texts: Sequence[str]) -> list[str]:
        """The texts as they are read: in their template, each new token of several vectors as one token a vector."""
        for name, spelling in self.spellings.items():
            # NAME_1 is the second vector of NAME, which diffusers writes out in prompts: it is not another NAME.
            pattern = re.compile(rf"{re.escape(name)}(?!_\d)", re.IGNORECASE)
            texts = [pattern.sub(spelling.replace("\\", r"\\"), text) for text in texts]
        before, _, behind = self.reading.template.partition("{}")
        return [f"{before}{text}{behind}" for text in texts]


def kind_of(model_type: str) -> TextNetwork:
    """The kind of a text encoder that a family has loaded, or exported, by `model_type` of its config."""
    found = _kind(model_type)
    assert found is not None, "a network that was loaded is of a known kind"
    return found


def _kind(model_type: str) -> TextNetwork | None:
    return next((kind for kind in _KINDS if model_type in kind.model_types), None)


def load(components: ComponentLoader, encoder: str, tokenizer: str, reading: Reading) -> TextEncoder:
    """Text encoder and tokenizer of these component names, which must be a pair. `reading` is the family's, which
    settings that are named after the component (`text_encoder_layer_2`) may change."""
    value = getattr(components.settings, encoder)
    config: Mapping[str, Any] = value if isinstance(value, dict) else components.config(encoder)
    kind = _fitting(encoder, config, reading)
    reading = _chosen(components.settings, encoder, kind, reading)
    words, files = tokenizer_of(components, tokenizer, kind)
    # After the tokenizer: of a network that is built from numbers it decides the size of the vocabulary.
    network = kind.network(components, encoder, config, reading, words)
    absent = AbsentTokenizer(reading.max_tokens or kind.window(network.config))
    found = TextEncoder(encoder, network, words or absent, files, reading)
    if odd := [layer for layer in reading.layers if not -found.layers <= layer <= found.layers]:
        chosen = _setting("layer", encoder)
        setting = f"model.{chosen if hasattr(components.settings, chosen) else encoder}"
        said = "is" if setting.endswith(chosen) else "is read by its hidden state"
        raise UserError(f"{setting} {said} {odd[0]}, but the encoder has {found.layers} layers", setting=setting)
    if words is not None and (problem := kind.problem(words, network.config, reading)):
        raise UserError(f"the tokenizer of model.{encoder} {problem}", code="conflict")
    check_ids(tokenizer, words, files)
    return found


def check_ids(name: str, tokenizer: Any, files: Mapping[str, bytes]) -> None:
    """UserError for the tokenizer `name` (None: it is not there) if captions get other ids than its author's."""
    if tokenizer is not None and (problem := tokenizers.other_ids(tokenizer, files.get("tokenizer.json"))):
        raise UserError(f"model.{name} {problem}", code="damaged", setting=f"model.{name}")


def check_kind(encoder: TextEncoder, model_type: str, called: str) -> None:
    """UserError for a language model of another kind than the one that a model was trained with."""
    if (kind := encoder.encoder.config.model_type) != model_type:
        setting = f"model.{encoder.name}"
        what = f"{setting} is a {kind!r}, and this model was trained with {called}: give that one"
        raise UserError(what, code="unsupported", setting=setting)


def _fitting(encoder: str, config: Mapping[str, Any], reading: Reading) -> TextNetwork:
    """The kind of a text encoder, from its config. UserError for one that cannot be read so."""
    model_type = config.get("model_type", CLIP.model_types[0])
    kind = _kind(model_type)
    if kind is None or kind.name not in reading.kinds:
        able = " or ".join(kind.called for kind in _KINDS if kind.name in reading.kinds)
        raise UserError(
            f"model.{encoder} is a {model_type!r}: text encoders can be {able}",
            code="unsupported",
            setting=f"model.{encoder}",
        )
    return kind


def _setting(name: str, encoder: str) -> str:
    """`text_encoder_layer`, or `text_encoder_layer_2` of the second encoder."""
    return f"text_encoder_{name}{encoder.removeprefix('text_encoder')}"


def _chosen(settings: Any, encoder: str, kind: TextNetwork, reading: Reading) -> Reading:
    """The reading with what the settings choose in place of the family's. UserError where they choose for an encoder
    that is read in one way alone."""
    layer = getattr(settings, _setting("layer", encoder), None)
    final_norm = getattr(settings, _setting("final_norm", encoder), None)
    long = getattr(settings, "long_prompts", False)
    if not kind.chosen:
        if layer is not None or final_norm is not None or long:
            raise UserError(
                f"model.{encoder} is a {kind.called}, of which only the last hidden state is used: remove "
                "text_encoder_layer, text_encoder_final_norm and long_prompts",
                code="conflict",
            )
        return replace(reading, layers=(-1,), final_norm=True) if kind.last_alone else reading
    layers = reading.layers if layer is None else (layer,)
    return replace(
        reading, layers=layers, final_norm=reading.final_norm if final_norm is None else final_norm, long=long
    )


def tokenizer_of(components: ComponentLoader, name: str, kind: TextNetwork) -> tuple[Any, dict[str, bytes]]:
    """The tokenizer `name` of this kind and its files. Without weights it need not be there: None."""
    if resolve.without_weights() and not (
        getattr(components.settings, name) == BASE
        and (components.base / components.settings.folder_of(name) / "tokenizer_config.json").is_file()
    ):
        return None, {}
    folder = components.folder(name, resolve.TOKENIZER)
    files = {  # a tokenizer may lie beside the config and weights of its encoder, which are not its own
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and path.name != "config.json"
    }
    # The files say whose they are: a tokenizer of another kind is read, too, and then refused by its numbers.
    is_t5 = b'"T5Tokenizer' in files["tokenizer_config.json"]
    owner = _T5 if is_t5 else _CLIP if isinstance(kind, T5) else kind
    try:
        made = tokenizers.opened(owner.tokenizer, folder)
    except documents.MISREAD as error:
        raise UserError(
            f"{folder} cannot be read as a tokenizer of {kind.called}: {' '.join(str(error).split())[:300]}",
            code="damaged",
            setting=f"model.{name}",
        ) from error
    config = f"{folder}/tokenizer_config.json"
    if not isinstance(made.model_max_length, int | float):
        raise UserError(f"{config}: model_max_length must be a number", code="damaged", setting=f"model.{name}")
    if made.pad_token_id is None:
        raise UserError(
            f"{config} names no pad_token, by which texts are filled up", code="damaged", setting=f"model.{name}"
        )
    return made, files
