"""The net of a family whose text encoders can be trained: those that are, and behind them the family's denoiser.

Shape letters: B samples, C channels, H and W height and width, T tokens, D features.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from daguerre.models.components import ComponentLoader
from daguerre.models.controlnets.controlled import Residuals
from daguerre.models.family import Exporter, Family, ImageCodec, TextConditioner
from daguerre.models.network import Facts, named
from daguerre.models.parts.text.conditioning import TextConditioning
from daguerre.models.parts.vae import references as reference_condition
from daguerre.models.settings import ReferenceSettings
from daguerre.types import Cond


class Denoise(Protocol):
    """The denoiser of a family as a function of features."""

    def __call__(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Residuals = ()) -> Tensor:
        """The prediction y [B, C, H, W] for noisy latents and their conditioning. `residuals` are a ControlNet's."""


def by_length(denoise: Denoise, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Residuals = ()) -> Tensor:
    """The prediction [B, C, H, W] of a `denoise` that reads every token of a text, so that none may be added: where
    `text_mask` [B, T] says that texts of a batch differ in length, those of one length are computed together."""
    if (mask_BT := cond.get("text_mask")) is None:
        return denoise(x_BCHW, c_noise_B, cond, residuals)
    lengths = mask_BT.sum(1).tolist()  # the one wait for the device
    rows = {length: [row for row, own in enumerate(lengths) if own == length] for length in lengths}
    parts = []
    for length, own in rows.items():
        of_rows = {name: value[own] for name, value in cond.items() if name != "text_mask"}
        parts.append(denoise(x_BCHW[own], c_noise_B[own], {**of_rows, "text": of_rows["text"][:, :length]}))
    order = torch.tensor([row for own in rows.values() for row in own], device=x_BCHW.device).argsort()
    return torch.cat(parts)[order]


class TrainedNet(nn.Module):
    """Text encoders and a denoiser as one net. Weights are named `COMPONENT.`, such as `unet.` or `text_encoder.`, and
    then as their libraries name them; what is not trained is no part of its state."""

    def __init__(self, denoise: Denoise, texts: TextConditioner, trained: Mapping[str, nn.Module]) -> None:
        """`trained` are those of the networks behind `denoise` and `texts` that are trained, by component."""
        super().__init__()
        for name, network in trained.items():
            self.add_module(name, network)
        self._trained = frozenset(trained)
        # in a tuple: as attributes, frozen networks would be registered as parts of the state
        self._parts = (denoise, texts)

    def forward(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond) -> Tensor:
        """The prediction y [B, C, H, W] for latents, c_noise [B] and conditioning as `features` takes it."""
        return self.denoise(x_BCHW, c_noise_B, self.features(cond))

    def features(self, cond: Cond) -> Cond:
        """Conditioning with cond["text"] [B, T, D]: where it holds tokens, text encoders make it, with gradients for
        those that are trained."""
        # Where no encoder is trained, `text` was made outside, or read from a cache.
        return cond if "text" in cond else {**cond, **self._parts[1].features(cond, self._trained)}

    def denoise(self, x_BCHW: Tensor, c_noise_B: Tensor, cond: Cond, residuals: Residuals = ()) -> Tensor:
        """The prediction from features. ControlNets call it by itself, as they read the features, too."""
        return self._parts[0](x_BCHW, c_noise_B, cond, residuals)


def family(
    components: ComponentLoader,
    denoise: Denoise,
    modules: Mapping[str, nn.Module],
    facts: Mapping[str, Facts],
    images: ImageCodec,
    texts: TextConditioning,
    exporter: Exporter,
    **more: Any,
) -> Family:
    """The family of these networks, with its text encoders, in which the first trainable component is trained.

    `modules` and `facts` are by component and need not name the text encoders; `more` are further parts of a `Family`.
    Guidance and reference images, which `images` encodes, are those of the settings where `more` has no others.
    """
    settings = components.settings
    usual: dict[str, Any] = {"guidance": settings.guidance}
    if isinstance(settings, ReferenceSettings):
        usual |= {"references": settings.trained_references, "prompt_references": settings.reference_rule}
        usual |= {"reference_condition": partial(reference_condition, images)}
    make_net = partial(TrainedNet, denoise, texts)
    networks = named({**modules, **texts.networks}, settings.components, {**facts, **texts.facts})
    # First the net in which nothing is trained: `training` alone decides what is.
    whole = Family(
        networks, make_net({}), images, exporter, text=texts, pretrained=components, make_net=make_net, **usual | more
    )
    return whole.training(settings.trainable()[:1])
