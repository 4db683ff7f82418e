"""Anima: the transformer of Cosmos-Predict2, conditioned on the tokens of T5 that have looked at Qwen3's hidden states.

CircleStone Labs 2026 (https://huggingface.co/circlestone-labs/Anima). Trained by flow matching. Of T5 there is the
tokenizer alone: a small transformer, the text conditioner, embeds its tokens and attends to Qwen3. Shape letters: B
samples, C channels, H and W height and width of latents, T tokens, D features.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal

import torch
from diffusers import AnimaTextConditioner, AutoencoderKLQwenImage, CosmosTransformer3DModel
from pydantic import Field, model_validator
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.models import trained_net
from daguerre.models.components import ComponentLoader, check_fits
from daguerre.models.controlnets.controlled import Residuals
from daguerre.models.export.diffusers import PipelineExporter
from daguerre.models.family import Family
from daguerre.models.network import Facts
from daguerre.models.parts import vae
from daguerre.models.parts.anima_networks import CONDITIONER, CONDITIONER_NAMES, TRANSFORMER, TRANSFORMER_NAMES
from daguerre.models.parts.settings import TransformerSettings
from daguerre.models.parts.text import encoder as text_encoder
from daguerre.models.parts.text import tokenizers
from daguerre.models.parts.text.conditioning import TextConditioning, frozen
from daguerre.models.parts.text.encoder import TextEncoder
from daguerre.models.parts.text.t5 import T5
from daguerre.models.parts.text.tokenizers import AbsentTokenizer
from daguerre.models.reading import Reading
from daguerre.models.schedulers.flow_matching import FlowMatching
from daguerre.models.schedulers.scheduler import Schedulers
from daguerre.models.settings import BASE, SINGLE_FILES, Component, ComponentSpec
from daguerre.samplers.guidance import CLASSIFIER_FREE, Guidance
from daguerre.settings import ADDRESS
from daguerre.types import Cond

_PATCH = 2
"""Side of the square of latent pixels that is one token."""
_READS = Reading(kinds=("language_model",))
"""The last hidden state of Qwen3, without a template. It looks back alone, so padding needs no mask inside. Windows are
as long as their authors train with, so that a text is computed the same in every batch."""


FACTS: dict[type, Facts] = {CosmosTransformer3DModel: TRANSFORMER, AnimaTextConditioner: CONDITIONER}


class Settings(TransformerSettings):
    """Anima."""

    family: Literal["anima"] = "anima"
    """Name of the family."""
    text_encoder: Component = BASE
    """The language model: Qwen3-0.6B."""
    text_conditioner: Component = BASE
    """The network between Qwen3 and the transformer. base: where model.transformer is a single file, the one in it."""
    t5_tokenizer: Annotated[str, ADDRESS] = BASE
    """The tokenizer of T5, whose tokens the text conditioner embeds."""
    max_sequence_length: int = Field(512, ge=1, le=512)
    """Tokens of Qwen3 and of T5 that are read of a caption; longer ones are cut."""
    sample_posterior: bool = False
    """Draw a latent from the autoencoder's posterior for each sample and epoch; off, as its authors' trainer: take the
    posterior's mean."""

    is_distilled: bool = False
    """Whether the transformer was distilled to few steps, as Anima-Turbo was: it generates, and is not trained. Its
    files do not say so."""

    pipeline_class: ClassVar[str] = "AnimaModularPipeline"
    schedulers: ClassVar[Schedulers] = FlowMatching(token_px=16)
    guidance: ClassVar[Guidance] = CLASSIFIER_FREE
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "data": {"resolution": 1024},
        "sampling": {"guidance_scale": 4.0, "num_inference_steps": 50},
    }
    components: ClassVar[Mapping[str, ComponentSpec]] = {
        **TransformerSettings.components,
        "text_conditioner": ComponentSpec("text_encoder", trainable=True),
        "t5_tokenizer": ComponentSpec("tokenizer"),
    }

    @model_validator(mode="before")
    @classmethod
    def _both_of_one_file(cls, given: Any) -> Any:
        """Another transformer belongs to the text conditioner that it was trained with, and their file has both."""
        if not isinstance(given, dict) or given.get("text_conditioner", BASE) != BASE:
            return given
        place = given.get("transformer", BASE)
        is_file = isinstance(place, str) and place.endswith(SINGLE_FILES)
        return {**given, "text_conditioner": place} if is_file else given


@dataclass(frozen=True, eq=False)
class ConditionedText(TextConditioning):
    """Qwen3, and the text conditioner that looks at its hidden states for each token of T5."""

    conditioner: Any = None
    """diffusers' AnimaTextConditioner."""
    words: Any = None
    """T5's tokenizer."""
    word_files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def networks(self) -> dict[str, nn.Module]:
        return {**super().networks, "text_conditioner": self.conditioner}

    @property
    def facts(self) -> dict[str, Facts]:
        return {**super().facts, "text_conditioner": CONDITIONER}

    def rules(self) -> dict[str, Any]:
        return super().rules() | {
            "t5_tokenizer": {name: sha256(content).hexdigest() for name, content in sorted(self.word_files.items())}
        }

    def files(self) -> dict[str, bytes]:
        return super().files() | {f"t5_tokenizer/{name}": content for name, content in self.word_files.items()}

    def tokens(self, texts: Sequence[str]) -> Cond:
        """Those of Qwen3, and of T5 `t5_ids` [B, T] with `t5_lengths` [B]."""
        found = tokenizers.windows(self.words, texts, 1, self.encoders[0].max_tokens)
        ends = sum(map(len, tokenizers.ends(self.words)))
        own = {"t5_ids": found.ids_BKT[:, 0], "t5_lengths": found.counts_BK[:, 0] + ends}
        return {**super().tokens(texts), **own}

    def features(self, tokens: Cond, trained: Collection[str] = ()) -> Cond:
        """`text` [B, T, D]: the tokens of T5, and zeros up to the conditioner's window, which are attended to."""
        device = self.conditioner.device
        own = {name: tokens[name].to(device) for name in ("text_encoder_counts", "t5_ids", "t5_lengths")}
        states_BTD = super().features(tokens, trained)["text"].to(self.conditioner.dtype)
        is_text_BT = torch.arange(states_BTD.shape[1], device=device) < own["text_encoder_counts"]
        # The empty text has no token to look at; where all states are zeros, attention to any of them gives zeros.
        seen_BT = is_text_BT | (own["text_encoder_counts"] == 0)
        with nullcontext() if {*self.networks} & {*trained} else frozen(device):
            text_BTD = self.conditioner(
                source_hidden_states=states_BTD * is_text_BT[..., None],
                target_input_ids=own["t5_ids"],
                target_attention_mask=torch.arange(own["t5_ids"].shape[1], device=device) < own["t5_lengths"][:, None],
                source_attention_mask=seen_BT,
            )
        return {"text": text_BTD}

    def truncated(self, texts: Sequence[str]) -> dict[int, str]:
        return super().truncated(texts) | tokenizers.truncated(self.words, texts, self.encoders[0].max_tokens)


_EXAMPLE = """\
from diffusers import ClassifierFreeGuidance, ModularPipeline

pipe = ModularPipeline.from_pretrained("path/to/this/folder")
pipe.load_components()  # the transformer of diffusers needs torchvision
pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale={scale}))
image = pipe(prompt="a prompt", {call}, output="images")[0]
"""


def load(settings: Settings, seed: int) -> Family:
    """The family of these settings. Raises UserError if something is missing or does not fit together."""
    components = ComponentLoader(settings, seed)
    autoencoder = vae.load(components, AutoencoderKLQwenImage.__name__, patch=_PATCH)
    reading = replace(_READS, max_tokens=settings.max_sequence_length)
    encoder = text_encoder.load(components, "text_encoder", "tokenizer", reading)
    _check_kind(encoder)
    words, files = text_encoder.tokenizer_of(components, "t5_tokenizer", T5())
    decided = {"source_dim": encoder.width}
    conditioner = _conditioner(components, decided)
    check_fits("text_conditioner", conditioner, decided)
    _check_window(conditioner, words, settings.max_sequence_length)
    text_encoder.check_ids("t5_tokenizer", words, files)
    decided = {
        "in_channels": autoencoder.channels,
        "out_channels": autoencoder.channels,
        "text_embed_dim": conditioner.config.target_dim,
    }
    transformer = components.network("transformer", CosmosTransformer3DModel, decided, TRANSFORMER_NAMES)
    check_fits("transformer", transformer, decided)
    words = words or AbsentTokenizer(settings.max_sequence_length)
    config = json.loads(transformer.to_json_string())
    # With it diffusers resizes the mask of padding by torchvision: `denoise` gives this channel of zeros itself.
    marks_padding = transformer.config.concat_padding_mask
    transformer.register_to_config(concat_padding_mask=False)
    return trained_net.family(
        components,
        partial(denoise, transformer, marks_padding),
        {"transformer": transformer, "vae": autoencoder.net},
        {"transformer": TRANSFORMER},
        replace(autoencoder, most_tokens=max(transformer.rope.max_size)),
        ConditionedText((encoder,), conditioner=conditioner, words=words, word_files=files),
        PipelineExporter(
            settings,
            {"t5_tokenizer": ["transformers", type(words).__name__]},
            {},
            documents={"transformer/config.json": config},
            example=_EXAMPLE,
            unknown=("guidance_scale",),
            blocks="AnimaAutoBlocks",
        ),
        distilled="circlestone-labs/Anima-Base-v1.0-Diffusers" if settings.is_distilled else "",
    )


def _conditioner(components: ComponentLoader, decided: Mapping[str, Any]) -> Any:
    """The text conditioner. UserError for a file of a transformer alone, from where it is usually taken."""
    try:
        return components.network("text_conditioner", AnimaTextConditioner, decided, CONDITIONER_NAMES)
    except UserError as error:
        settings: Any = components.settings
        if settings.text_conditioner != settings.transformer:
            raise
        raise type(error)(
            f"model.text_conditioner: {error}. Of a file of the transformer alone, set model.text_conditioner to the "
            "place of the base",
            code=error.code,
            setting="model.text_conditioner",
        ) from error


def _check_kind(encoder: TextEncoder) -> None:
    """UserError for a text encoder of another kind than the one that Anima was trained with."""
    if (kind := encoder.encoder.config.model_type) != "qwen3":
        raise UserError(
            f"model.text_encoder is a {kind!r}, and Anima was trained with Qwen3: give Qwen3-0.6B",
            code="unsupported",
            setting="model.text_encoder",
        )


def _check_window(conditioner: Any, words: Any, max_tokens: int) -> None:
    """UserError for a text conditioner that has no embedding for a token, or less room than captions take."""
    known, window = conditioner.config.target_vocab_size, conditioner.config.min_sequence_length
    if words is not None and len(words) > known:
        raise UserError(
            f"model.t5_tokenizer has {len(words)} tokens, and the text conditioner embeds {known}: give T5's tokenizer",
            code="conflict",
            setting="model.t5_tokenizer",
        )
    if max_tokens > window:
        raise UserError(
            f"model.max_sequence_length is {max_tokens}, and the text conditioner was made for {window} tokens: set "
            f"it to {window} or less",
            code="conflict",
            setting="model.max_sequence_length",
        )


def denoise(
    transformer: Any, marks_padding: bool, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Residuals = ()
) -> Tensor:
    """The velocity [B, C, H, W] of noisy latents, as a video of one frame. `cond` has `text` [B, T, D]."""
    x_BCFHW = x_BCHW[:, :, None]
    padding = torch.zeros_like(x_BCFHW[:, :1]) if marks_padding else None
    y = transformer(
        hidden_states=x_BCFHW,
        timestep=c_noise_B,
        encoder_hidden_states=cond["text"],
        condition_mask=padding,
        return_dict=False,
    )[0]
    return y[:, :, 0]
