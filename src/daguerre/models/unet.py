"""A UNet with cross attention as the net of a family: called as every net is, with the text encoders that are trained.

Also how one of given numbers is built, and whether it fits the other networks. Shape letters: B samples, C channels, H
and W height and width, T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.models.components import Components
from daguerre.models.family import Exporter, Family
from daguerre.models.text_conditioning import Texts
from daguerre.models.vae import VAE
from daguerre.types import Cond

_UNUSED = ("class_embed_type", "num_class_embeds", "encoder_hid_dim_type", "time_cond_proj_dim")


class UNet(nn.Module):
    """diffusers' UNet2DConditionModel. Its weights are named `unet.`, those of trained encoders `text_encoder.`, and
    then as their libraries name them; what is not trained is no part of its state."""

    def __init__(self, unet: Any, texts: Texts, trained: Mapping[str, nn.Module]) -> None:
        """`trained` are the components, of these, that are trained."""
        super().__init__()
        for name, network in trained.items():
            self.add_module(name, network)
        self._trained = frozenset(trained)
        self._all = (unet, texts)  # in a tuple: what is frozen is not registered

    def forward(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        """The prediction y [B, C, H, W] for latents, c_noise [B] and conditioning as `features` takes it."""
        return self.denoise(x_BCHW, c_noise_B, self.features(cond))

    def features(self, cond: Cond) -> Cond:
        """Conditioning with cond["text"] [B, T, D]: where it holds tokens, text encoders make it, with gradients for
        those that are trained."""
        return cond if "text" in cond else {**cond, **self._all[1].features(cond, self._trained)}

    def denoise(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Sequence[Tensor] = ()) -> Tensor:
        """The prediction from cond["text"], with cond["pooled"] [B, P] and cond["sizes"] [B, 6] where the UNet knows
        them. `residuals` are a ControlNet's: those of the down blocks, and last that of the middle block."""
        unet = self._all[0]
        added = {"text_embeds": cond["pooled"], "time_ids": cond["sizes"]} if "sizes" in cond else None
        return unet(
            x_BCHW,
            c_noise_B,
            encoder_hidden_states=cond["text"],
            encoder_attention_mask=cond.get("text_mask"),
            added_cond_kwargs=added,
            down_block_additional_residuals=tuple(residuals[:-1]) or None,
            mid_block_additional_residual=residuals[-1] if residuals else None,
            return_dict=False,
        )[0]


def load(components: Components, vae: VAE, texts: Texts, more: Mapping[str, Any] | None = None) -> Any:
    """The UNet of these components. `more` are numbers that the family decides besides those of latents and text;
    UserError says where they do not fit."""
    decided = {
        "in_channels": (vae.channels, "latent channels of the autoencoder"),
        "out_channels": (vae.channels, "latent channels of the autoencoder"),
        "cross_attention_dim": (texts.width, "the width of the text encoders"),
    }
    decided |= {name: (value, "as this family conditions it") for name, value in (more or {}).items()}
    given = {"sample_size": vae.net.config.sample_size // vae.factor} | {n: v for n, (v, _) in decided.items()}
    unet = components.network("unet", UNet2DConditionModel, given)
    if components.is_random("unet"):
        _refuse_deaf(unet)
    wrong = [
        f"{name} is {unet.config[name]}, but must be {want}, {why}"
        for name, (want, why) in decided.items()
        if unet.config[name] != want
    ]
    wrong += [
        f"{name} is {unet.config[name]!r}, but this family gives the UNet {'text and sizes' if more else 'text only'}"
        for name in _UNUSED + (() if more else ("addition_embed_type",))
        if unet.config[name] is not None
    ]
    if wrong:
        raise UserError(
            f"the UNet does not fit the other networks: {'; '.join(wrong)}. Change model.unet (what is left out is "
            "taken from the other networks) or model.pretrained_model_name_or_path" + _other_family(unet, bool(more))
        )
    return unet


def family(components: Components, unet: Any, vae: VAE, texts: Texts, exporter: Exporter) -> Family:
    """The family of these networks, with those trained that the settings name."""
    settings, make_net = components.settings, partial(UNet, unet, texts)
    networks = {"unet": unet, "vae": vae.net, **texts.networks}
    whole = Family(
        networks, settings.components, make_net({}), vae, exporter,
        text=texts, pretrained=components, make_net=make_net, unread=texts.unread,
    )  # fmt: skip
    return whole.training(settings.trainable()[:1])


def _other_family(unet: Any, sized: bool) -> str:
    """Whose UNet this is, where it is that of the other family."""
    is_sized = unet.config.addition_embed_type == "text_time"
    if is_sized == sized:
        return ""
    return f". It is {'SDXL' if is_sized else 'Stable Diffusion'}'s: take a recipe of model.family=" + (
        "sdxl" if is_sized else "sd"
    )


def _refuse_deaf(unet: Any) -> None:
    """The time embedding is one number a channel, and a norm over a single channel takes it out again."""
    if unet.config.norm_num_groups == min(unet.config.block_out_channels):
        raise UserError(
            f"model.unet: norm_num_groups is {unet.config.norm_num_groups}, as many as the first block has channels: "
            "each norm would remove the time embedding of its channel; set norm_num_groups to a half or less (8)"
        )
