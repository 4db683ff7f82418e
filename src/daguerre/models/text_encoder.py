"""A text encoder with its tokenizer: captions to features, CLIP's or T5's, frozen or trained.

A text longer than the encoder reads is truncated, or (`long`) read in windows, each with its own start and end. Shape
letters: B texts, K windows, T tokens of a window, D features, P pooled features.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer, T5Tokenizer

from daguerre.errors import UserError
from daguerre.models import tokenizers
from daguerre.models.components import ComponentLoader
from daguerre.models.settings import BASE, CaptionedSettings
from daguerre.models.tokenizers import AbsentTokenizer, Tokens
from daguerre.models.weights import resolve

_MOST_TOKENS = 1 << 16
"""A T5 without a limit of its own has 1e30 in transformers, and captions would be padded to that."""


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """A text encoder and the tokenizer that it was trained with."""

    name: str
    """Of the component, such as `text_encoder`."""
    encoder: Any
    """transformers' CLIPTextModel, CLIPTextModelWithProjection or T5EncoderModel."""
    tokenizer: Any
    """transformers' CLIPTokenizer or T5Tokenizer; an AbsentTokenizer where networks are built without weights."""
    files: dict[str, bytes]
    """The tokenizer's, as they were loaded."""
    layer: int = -1
    """Hidden state that is read, from the end."""
    final_norm: bool = True
    """Whether the last norm is applied to it."""
    long: bool = False
    """Whether long texts are read in windows."""
    masked: bool = False
    """Whether padding is hidden from attention. CLIP looks back alone, so the features of padding differ, and no
    others."""
    spellings: dict[str, str] = field(default_factory=dict)
    """New tokens of several vectors, and what stands in a text for each (models/new_tokens.py)."""

    @property
    def width(self) -> int:
        """D."""
        config = self.encoder.config
        return int(config.d_model if config.model_type == "t5" else config.hidden_size)

    @property
    def layers(self) -> int:
        return int(self.encoder.config.num_hidden_layers)

    def rules(self) -> dict[str, Any]:
        """All that decides the features beside the encoder's weights and config, as JSON."""
        return {
            "layer": self.layer,
            "final_norm": self.final_norm,
            "long": self.long,
            "masked": self.masked,
            "class": type(self.encoder).__name__,
            "max_tokens": self.tokenizer.model_max_length,
            "tokenizer": {name: sha256(content).hexdigest() for name, content in sorted(self.files.items())},
            "spellings": dict(sorted(self.spellings.items())),
        }

    def tokens(self, texts: Sequence[str]) -> Tokens:
        """The tokens of texts, on the CPU."""
        return tokenizers.windows(self.tokenizer, self._spelled(texts), None if self.long else 1)

    def features(self, ids_BKT: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states [B, K T, D], as diffusers' pipelines take them, and the pooled and projected ones [B, K, P] of
        an encoder that has them."""
        n_texts, n_windows, n_tokens = ids_BKT.shape
        last = self.layer == -1 and self.final_norm
        ids = ids_BKT.reshape(-1, n_tokens)
        mask = {"attention_mask": _up_to_end(ids, self.tokenizer.eos_token_id)} if self.masked else {}
        out = self.encoder(ids, output_hidden_states=not last, **mask)
        hidden = out.last_hidden_state if last else out.hidden_states[self.layer]
        if self.final_norm and not last:
            hidden = _final_norm(self.encoder)(hidden)
        pooled = out.text_embeds.reshape(n_texts, n_windows, -1) if "text_embeds" in out else None
        return hidden.reshape(n_texts, n_windows * n_tokens, -1), pooled

    def truncated(self, texts: Sequence[str]) -> dict[int, str]:
        """Texts that are longer than the encoder reads, by index."""
        return {} if self.long else tokenizers.truncated(self.tokenizer, self._spelled(texts))

    def _spelled(self, texts: Sequence[str]) -> Sequence[str]:
        """The texts with each new token of several vectors as one token a vector."""
        for name, spelling in self.spellings.items():
            found = re.compile(rf"{re.escape(name)}(?!_\d)", re.IGNORECASE)
            texts = [found.sub(spelling.replace("\\", r"\\"), text) for text in texts]
        return texts


def _up_to_end(ids_BT: Tensor, eos_token_id: int) -> Tensor:
    """1 for each token of a text and its end, 0 for the padding behind."""
    is_end_BT = ids_BT == eos_token_id
    return (is_end_BT.cumsum(1) - is_end_BT.long() == 0).long()


def _final_norm(encoder: Any) -> Any:
    """CLIP's last norm, whose depth differs between versions of transformers."""
    return next(module for name, module in encoder.named_modules() if name.endswith("final_layer_norm"))


def load(
    components: ComponentLoader,
    encoder: str,
    tokenizer: str,
    layer: int,
    final_norm: bool,
    *,
    masked: bool = False,
    projected: bool = False,
) -> TextEncoder:
    """Text encoder and tokenizer of these component names, which must be a pair. `layer` and `final_norm` are what the
    family reads where the settings leave it open; `projected`: it needs the pooled and projected features."""
    settings: Any = components.settings  # CaptionedSettings
    value = getattr(settings, encoder)
    kind = _kind(encoder, value if isinstance(value, dict) else components.config(encoder), projected)
    layer, final_norm = _hidden_state(settings, encoder, kind, layer, final_norm)
    words, files = _tokenizer(components, tokenizer)
    own = {} if words is None else decided(words)
    if projected and isinstance(value, str) and components.config(encoder).get("architectures") == ["CLIPTextModel"]:
        net = _projecting(components.network(encoder, CLIPTextModel, own))
    else:
        net = components.network(encoder, kind, own)
    reader = TextEncoder(
        encoder, net, words or AbsentTokenizer.of(net), files, layer, final_norm, settings.long_prompts, masked
    )
    if -layer > reader.layers:
        setting = f"model.{_setting('layer', encoder)}"
        raise UserError(f"{setting} is {layer}, but the encoder has {reader.layers} layers", setting=setting)
    if words is not None:
        _check_pair(reader)
    return reader


def _projecting(encoder: Any) -> Any:
    """A CLIPTextModel with a projection that changes nothing, for families that read projected features."""
    config = copy.deepcopy(encoder.config)
    config.projection_dim = config.hidden_size
    with torch.device("meta"):
        made = transformers.CLIPTextModelWithProjection(config)
    made.text_model = encoder
    identity = torch.eye(config.hidden_size, device=encoder.device)
    made.text_projection.weight = nn.Parameter(identity, requires_grad=False)
    made.config.architectures = ["CLIPTextModelWithProjection"]
    return made.eval()


def unread(reader: TextEncoder) -> list[nn.Parameter]:
    """Parameters that no feature depends on: layers behind the one that is read, and a last norm that is left out.

    Pooled features come out of the last layer, and depend on all.
    """
    if reader.encoder.config.model_type == "t5" or hasattr(reader.encoder, "text_projection"):
        return []
    layers = next(m for name, m in reader.encoder.named_modules() if name.endswith("encoder.layers"))
    behind: list[nn.Module] = list(layers)[len(layers) + reader.layer + 1 :]
    behind += [] if reader.final_norm else [_final_norm(reader.encoder)]
    return [parameter for module in behind for parameter in module.parameters()]


def as_read(reader: TextEncoder, layer: int, final_norm: bool) -> Any:
    """The encoder for a pipeline that reads this hidden state: with fewer layers if the reader reads an earlier one.
    Weights are shared, not copied."""
    if reader.layer >= layer or reader.final_norm != final_norm:
        return reader.encoder
    layers = reader.layers + reader.layer - layer
    config = type(reader.encoder.config)(**(reader.encoder.config.to_dict() | {"num_hidden_layers": layers}))
    with torch.device("meta"):
        made = type(reader.encoder)(config)
    tensors = reader.encoder.state_dict()
    made.load_state_dict({name: tensors[name] for name in made.state_dict()}, assign=True)
    return made


def _setting(name: str, encoder: str) -> str:
    """`text_encoder_layer`, or `text_encoder_layer_2` of the second encoder."""
    return f"text_encoder_{name}{encoder.removeprefix('text_encoder')}"


def _hidden_state(
    settings: CaptionedSettings, encoder: str, kind: Any, layer: int, final_norm: bool
) -> tuple[int, bool]:
    """The hidden state to read, and whether the last norm is applied: by the settings, else as the family does.

    A T5's is its last one; UserError where the settings ask for another.
    """
    own_layer = getattr(settings, _setting("layer", encoder))
    own_norm = getattr(settings, _setting("final_norm", encoder))
    if kind is not transformers.T5EncoderModel:
        return layer if own_layer is None else own_layer, final_norm if own_norm is None else own_norm
    if own_layer is not None or own_norm is not None or settings.long_prompts:
        raise UserError(
            f"model.{encoder} is a T5, of which only the last hidden state is used: remove text_encoder_layer, "
            "text_encoder_final_norm and long_prompts",
            code="conflict",
        )
    return -1, True


def _kind(encoder: str, config: Mapping[str, Any], projected: bool) -> Any:
    """The class of a text encoder, from its config."""
    if config.get("model_type") == "t5":
        return transformers.T5EncoderModel
    if config.get("model_type", "clip_text_model") not in ("clip_text_model", "clip"):
        raise UserError(
            f"model.{encoder} is a {config['model_type']!r}: text encoders can be CLIP or T5",
            code="unsupported",
            setting=f"model.{encoder}",
        )
    projects = projected or "CLIPTextModelWithProjection" in (config.get("architectures") or ())
    return transformers.CLIPTextModelWithProjection if projects else transformers.CLIPTextModel


def _tokenizer(components: ComponentLoader, name: str) -> tuple[Any, dict[str, bytes]]:
    """The tokenizer and its files. Without weights it need not be there."""
    if resolve.without_weights() and not (
        getattr(components.settings, name) == BASE and (components.base / name / "tokenizer_config.json").is_file()
    ):
        return None, {}
    folder = components.folder(name, resolve.TOKENIZER)
    files = {  # a tokenizer may lie beside the config and weights of its encoder, which are not its own
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in (".json", ".txt", ".model") and path.name != "config.json"
    }
    kind = T5Tokenizer if b'"T5Tokenizer' in files["tokenizer_config.json"] else CLIPTokenizer
    try:
        return tokenizers.stateless(kind.from_pretrained(folder, local_files_only=True)), files
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} cannot be read as a {kind.__name__}: {error}", code="damaged", setting=f"model.{name}"
        ) from error


def decided(tokenizer: Any) -> dict[str, Any]:
    """Numbers that a tokenizer decides of an encoder that is built for it."""
    if isinstance(tokenizer, T5Tokenizer):
        return {"vocab_size": len(tokenizer)}
    return {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": tokenizer.model_max_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _check_pair(reader: TextEncoder) -> None:
    """UserError where tokenizer and encoder do not belong together.

    transformers 5 silently builds a tokenizer of 2 tokens when the files are not what it expects.
    """
    tokenizer, config = reader.tokenizer, reader.encoder.config
    is_t5 = isinstance(tokenizer, T5Tokenizer)  # its embeddings have spare rows
    if len(tokenizer) > config.vocab_size if is_t5 else len(tokenizer) != config.vocab_size:
        problem = (
            f"has {len(tokenizer)} tokens, but the text encoder has {config.vocab_size}: they do not belong "
            "together, or the tokenizer's files are incomplete (tokenizer.json, or vocab.json with merges.txt)"
        )
    elif is_t5 and tokenizer.model_max_length > _MOST_TOKENS:
        problem = (
            "does not set the number of tokens of a caption: set model_max_length in tokenizer_config.json (T5's "
            "were trained with 512; 77 takes less time and memory)"
        )
    elif not is_t5 and tokenizer.model_max_length > config.max_position_embeddings:
        problem = (
            f"sets model_max_length to {tokenizer.model_max_length}, but the text encoder reads "
            f"{config.max_position_embeddings} tokens: correct model_max_length in tokenizer_config.json"
        )
    elif "left" in (tokenizer.padding_side, tokenizer.truncation_side):
        problem = (
            "cuts or fills texts on the left, which no text encoder here was trained with: remove padding_side and "
            "truncation_side from tokenizer_config.json"
        )
    else:
        return
    raise UserError(f"the tokenizer of model.{reader.name} {problem}", code="conflict")
