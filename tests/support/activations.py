"""Counts what the backward pass of a UNet keeps of a sample, without memory: the numbers of docs/large-scale.md.

The network is built on the meta device in bf16; attention keeps what a fused kernel keeps: its inputs and its output.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from daguerre.models.weights import architectures


class _Fused(torch.autograd.Function):
    """Attention as far as its memory goes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out)
        return out


class _Kept:
    """Bytes of the different tensors that are kept at the moment, parameters aside."""

    def __init__(self, net: nn.Module) -> None:
        self._known = {parameter.untyped_storage()._cdata for parameter in net.parameters()}
        self._alive: list[Tensor] = []
        self.bytes = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._alive.append(tensor)  # so that no other tensor gets its address
            self.bytes += storage.nbytes()
        return tensor


def kept_gb(architecture: str, resolution_px: int, checkpointing: bool = False) -> tuple[float, float]:
    """GB that a forward pass of one sample keeps for the backward pass, and GB of the block that keeps most of it."""
    config = json.loads((architectures.FOLDER / architecture / "unet" / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        net = UNet2DConditionModel.from_config(config)
        nn.Module.to(net, torch.bfloat16)  # diffusers' own says what it would keep in float32: nothing
        if checkpointing:
            net.enable_gradient_checkpointing()
        kept, largest = _Kept(net), [0]
        for block in net.modules():
            if isinstance(block, BasicTransformerBlock | ResnetBlock2D):
                _measure(block, kept, largest)
        with (
            patch.object(F, "scaled_dot_product_attention", lambda q, k, v, *rest, **more: _Fused.apply(q, k, v)),
            torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor),
        ):
            net(**_inputs(config, resolution_px // 8))
    return kept.bytes / 1e9, largest[0] / 1e9


def _measure(block: nn.Module, kept: _Kept, largest: list[int]) -> None:
    before = [0]
    block.register_forward_pre_hook(lambda *_: before.__setitem__(0, kept.bytes))
    block.register_forward_hook(lambda *_: largest.__setitem__(0, max(largest[0], kept.bytes - before[0])))


def _inputs(config: dict[str, Any], side: int) -> dict[str, Any]:
    empty = partial(torch.empty, dtype=torch.bfloat16)
    given: dict[str, Any] = {"sample": empty(1, 4, side, side), "timestep": torch.zeros(1)}
    given["encoder_hidden_states"] = empty(1, 77, config["cross_attention_dim"])
    if config.get("addition_embed_type"):
        given["added_cond_kwargs"] = {"text_embeds": empty(1, 1280), "time_ids": empty(1, 6)}
    return given
