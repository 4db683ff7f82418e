"""A CLIP text encoder in training, with an image encoder that is thrown away: for latent families to use frozen.

The tokenizer is learnt (models/parts/text/tokenizers.py). Its loss is objectives/contrastive.py, its use
models/parts/text/encoder.py. Shape letters: B samples, C channels, H and W height and width, T tokens, D features.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import CLIPTextConfig, CLIPTextModel

from daguerre.checkpoint.export import replaced
from daguerre.errors import UserError
from daguerre.models.family import Family
from daguerre.models.network import named
from daguerre.models.parts.facts import CLIP_TEXT
from daguerre.models.parts.text import tokenizers
from daguerre.models.parts.text.clip import decided
from daguerre.models.parts.text.encoder import TextEncoder
from daguerre.models.pixel_codec import PixelCodec
from daguerre.models.settings import ComponentSpec, FamilySettings
from daguerre.models.weights import load as weights_load
from daguerre.objectives.objective import Objective
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import Cond

_LARGEST_SCALE = math.log(100.0)  # CLIP, section 2.5: larger ones made training unstable
_POOLED_PX = 4
_MOST_WORDS = 20_000
"""Words that `captions` may list: each has a row of the embeddings, and more would be most of the encoder."""


class Settings(FamilySettings):
    """A text encoder to be trained from random weights, by images and their captions."""

    family: Literal["clip"] = "clip"
    """Name of the family."""
    words: Annotated[list[str], Field(min_length=1)] | Literal["captions"]
    """Words that become one token each; all other text is spelled in pieces of them, at worst letter by letter.
    captions: those of the captions that are trained on, listed when a run is first started."""
    max_tokens: int = Field(77, ge=4)
    """Tokens of a text, start and end included: longer ones are truncated."""
    text_encoder: dict[str, Any]
    """Numbers of a CLIPTextConfig; vocabulary, positions and special tokens follow from the tokenizer."""
    image_channels: list[int] = Field([32, 64, 96, 96], min_length=1)
    """Channels of the image encoder's convolutions, each of which halves the sides; multiples of 8."""
    export_half: bool = False
    """Export float16 weights: half the size."""

    components: ClassVar[Mapping[str, ComponentSpec]] = {
        "text_encoder": ComponentSpec("text_encoder"),
        "image_encoder": ComponentSpec("image_encoder"),
        "tokenizer": ComponentSpec("tokenizer"),
    }

    def of_captions(self, texts: Callable[[], Iterable[str]]) -> Self:
        if self.words != "captions":
            return self
        words = tokenizers.words(texts())
        if not 0 < len(words) <= _MOST_WORDS:
            raise UserError(
                f"model.words=captions: the captions of these data have {len(words):,} different words, and 1 to "
                f"{_MOST_WORDS:,} can be taken: list the most important ones (model.words='[a, red, ...]'), of which "
                "all others are spelled",
                code="unsupported",
                setting="model.words",
            )
        return self.model_copy(update={"words": words})


class TextImage(nn.Module):
    """Text encoder, image encoder and the temperature of their similarities."""

    def __init__(self, text_encoder: Any, image_channels: Sequence[int]) -> None:
        super().__init__()
        width = text_encoder.config.hidden_size
        self.text_encoder = text_encoder
        self.text_projection = nn.Linear(width, width, bias=False)
        self.image_encoder = _image_encoder(image_channels, width)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        """Similarities [B, B] of captions (`cond["ids"]` [B, T]) and images; `c_noise_B` has no meaning."""
        text_BD = normalize(self.text_projection(self.pooled(cond["ids"])).float(), dim=-1)
        image_BD = normalize(self.image_encoder(x_BCHW).float(), dim=-1)
        return self.log_scale.clamp(max=_LARGEST_SCALE).exp() * text_BD @ image_BD.T

    def pooled(self, ids_BT: Tensor) -> Tensor:
        """Features [B, D] of texts."""
        return self.text_encoder(ids_BT).pooler_output


def _image_encoder(channels: Sequence[int], width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise([3, *channels]):
        layers += [nn.Conv2d(before, after, 4, stride=2, padding=1), nn.GroupNorm(8, after), nn.SiLU()]
    del layers[-2]  # a norm before the features are read would take away how much there is of each
    layers += [nn.AdaptiveAvgPool2d(_POOLED_PX), nn.Flatten(), nn.Linear(channels[-1] * _POOLED_PX**2, width)]
    return nn.Sequential(*layers)


@dataclass(frozen=True, eq=False)
class Captions:
    """Captions as tokens: the text encoder is trained, and runs inside the net."""

    tokenizer: Any
    """CLIPTokenizer."""
    tokenizer_files: Mapping[str, bytes]
    """As the text encoder's users read them."""
    net: TextImage
    encoders: tuple[TextEncoder, ...] = ()
    """None that is trained alone: no new tokens."""

    def tokens(self, texts: Sequence[str]) -> Cond:
        """`ids` [B, T]. The encoder is causal and pools at the first end token: padding beyond the longest text changes
        nothing, and is left out."""
        return {"ids": tokenizers.windows(self.tokenizer, texts, most=1, longest=True).ids_BKT[:, 0]}

    def features(self, tokens: Cond, trained: Collection[str] = ()) -> Cond:
        """`pooled` [B, D]: what similarities are taken of."""
        return {"pooled": self.net.pooled(tokens["ids"].to(self.net.log_scale.device))}

    def truncated(self, texts: Sequence[str]) -> dict[int, str]:
        return tokenizers.truncated(self.tokenizer, texts)

    def files(self) -> dict[str, bytes]:
        return {f"tokenizer/{name}": content for name, content in self.tokenizer_files.items()}


def _export(
    family: Family, folder: Path, objective: Objective, sampling: SamplingSettings, export_half: bool
) -> list[str]:
    """`text_encoder/` and `tokenizer/` as stock transformers reads them."""
    encoder: Any = copy.deepcopy(family.components["text_encoder"])
    if export_half:
        encoder.half()
    with replaced(folder) as fresh:
        encoder.save_pretrained(fresh / "text_encoder", safe_serialization=True)
        (fresh / "tokenizer").mkdir()
        for path, content in family.files().items():
            (fresh / path).write_bytes(content)
    return []


def load(settings: Settings, seed: int) -> Family:
    """Encoders of these numbers with weights from `seed`. UserError if transformers cannot build them."""
    assert settings.words != "captions", "assembly/of_captions.py has listed them"
    tokenizer = tokenizers.learn(settings.words, settings.max_tokens)

    def build() -> nn.Module:
        encoder = CLIPTextModel(CLIPTextConfig(**(dict(settings.text_encoder) | decided(tokenizer))))
        return TextImage(encoder, settings.image_channels)

    net: Any = weights_load.seeded(build, seed, "model.text_encoder")
    modules = {"text_encoder": net.text_encoder, "image_encoder": net.image_encoder}
    return Family(
        named(modules, settings.components, {"text_encoder": CLIP_TEXT}),
        net,
        PixelCodec(),
        partial(_export, export_half=settings.export_half),
        text=Captions(tokenizer, tokenizers.files(tokenizer), net),
        trained=frozenset(settings.networks()),
    )
