"""Settings that Stable Diffusion 1.x, 2.x and XL share."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from daguerre.errors import UserError
from daguerre.formatting import shown
from daguerre.models.parts.settings import ReadingSettings
from daguerre.models.settings import BASE, Component, ComponentSpec, ProbedSettings, ScaledSettings

_LARGEST = 1 << 16


class UNetSettings(ReadingSettings, ScaledSettings, ProbedSettings):
    """Settings of families with a UNet with cross attention, a KL autoencoder and text encoders."""

    unet: Component = BASE
    """The UNet. Of given numbers, channels, cross_attention_dim and sample_size follow from the other networks; what
    else is not given takes diffusers' defaults."""
    vae: Component = BASE
    """The autoencoder, frozen; its weights are float32."""
    guidance_embedding: int | None = Field(None, ge=2, multiple_of=2, exclude_if=lambda width: width is None)
    """Adds to a UNet without one an input for the guidance scale, in so many sines and cosines (256 is usual): with
    objective lcm it learns to guide itself at a scale. It is zero at first. null: the UNet as it is."""

    of_students: ClassVar[tuple[str, ...]] = ("guidance_embedding",)
    kinds: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "eps": {"name": "eps"},
        "v": {"name": "v"},
        "flow": {"name": "flow"},
        "edm": {"name": "edm"},
        "edm of unit variance": {"name": "edm", "sigma_data": 1.0},
        "edm of CosXL": {"name": "edm", "prediction": "v", "sigma_data": 1.0},
    }
    components: ClassVar[Mapping[str, ComponentSpec]] = {
        "unet": ComponentSpec("denoiser", trainable=True),
        "vae": ComponentSpec("autoencoder"),
        "text_encoder": ComponentSpec("text_encoder", trainable=True),
        "tokenizer": ComponentSpec("tokenizer"),
    }
    """Each is a field, too: where it comes from."""

    @classmethod
    def usual_of(cls, configs: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """Side of a pipeline's images: of its UNet's samples, times what its autoencoder enlarges. UserError where the
        configs name no side."""
        size = configs.get("unet", {}).get("sample_size")
        levels = configs.get("vae", {}).get("block_out_channels", [0] * 4)
        sides = size if isinstance(size, list) and size else [size if size is not None else 64]
        if not isinstance(levels, list) or any(type(side) is not int or not 0 < side < _LARGEST for side in sides):
            text = f"sample_size of its unet is {shown(size)}, and block_out_channels of its vae {shown(levels)}"
            raise UserError(f"{text}: a number of pixels and a list. Copy the whole folder again", code="damaged")
        return {"data": {"resolution": max(sides) * 2 ** (len(levels) - 1)}}
