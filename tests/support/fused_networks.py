"""Tiny networks whose layers are hard to split over tensor, with what they read, in float64: transformers of FLUX.1 and
FLUX.2 (klein), which have fused layers and norms of heads, and T5, whose first block has a bias a head.

The transformers have 4 heads of 16, real position ids, and norms that are not 1.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Flux2Transformer2DModel, FluxTransformer2DModel
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel

from daguerre.models.network import Facts, Network
from daguerre.models.parts.facts import T5
from daguerre.models.parts.flux_transformer import flux2_axes, flux_axes

KINDS = ("flux", "klein", "t5")
TEXT, SIDE, BATCH = 5, 4, 4
"""Tokens of a text; of a side of an image; samples."""


def network(kind: str, heads: int = 4) -> Any:
    """With weights of a fixed seed."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16}
    sizes["num_attention_heads"] = heads
    made: Any
    if kind == "flux":
        more: dict[str, Any] = {"in_channels": 64, "joint_attention_dim": 64, "pooled_projection_dim": 32}
        made = FluxTransformer2DModel(**sizes, **more, guidance_embeds=True, axes_dims_rope=(4, 6, 6))
    elif kind == "klein":
        more = {"in_channels": 32, "joint_attention_dim": 96, "guidance_embeds": False}
        made = Flux2Transformer2DModel(**sizes, **more, axes_dims_rope=(4, 4, 4, 4))
    else:
        config = T5Config(vocab_size=32, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=heads)
        config.feed_forward_proj, config.dropout_rate = "gated-gelu", 0.0
        made = T5EncoderModel(T5Config(**config.to_dict()))
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "norm" in name and p.ndim == 1:
                p.uniform_(0.5, 1.5)  # of ones, a norm whose gradient is wrong would not show
    return made.double()


def with_lora(network: nn.Module, rank: int = 4) -> nn.Module:
    """A LoRA on every linear layer of the blocks, with factors that have an effect; the base is frozen."""
    layers = [n for n, m in network.named_modules() if isinstance(m, nn.Linear) and "block" in n]
    network.requires_grad_(False)
    torch.manual_seed(1)
    config = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=False, target_modules=layers)
    inject_adapter_in_model(config, network)
    return network.double()


def known(kind: str, network: Any) -> Network:
    """The network with its facts."""
    if kind == "t5":
        return Network(network, "text_encoder", T5)
    name, axes = ("Flux", flux_axes) if kind == "flux" else ("Flux2", flux2_axes)
    blocks = f"{name}TransformerBlock", f"{name}SingleTransformerBlock"
    return Network(network, "denoiser", Facts(blocks, axes=axes(network), heads="heads"))


def output(kind: str, network: Any, part: slice = slice(None)) -> Tensor:
    """What the network makes of these samples."""
    made = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(BATCH, *shape, generator=made, dtype=torch.float64)

    if kind == "t5":
        found: Tensor = network(torch.randint(0, 32, (BATCH, TEXT), generator=made)[part]).last_hidden_state
        return found
    rows, columns = (each.reshape(-1) for each in torch.meshgrid(*[torch.arange(SIDE)] * 2, indexing="ij"))
    none, tokens = torch.zeros_like(rows), torch.arange(TEXT)
    given = {"timestep": torch.rand(BATCH, generator=made, dtype=torch.float64)}
    if kind == "flux":
        given |= {"hidden_states": normal(SIDE * SIDE, 64), "encoder_hidden_states": normal(TEXT, 64)}
        given |= {"pooled_projections": normal(32), "guidance": torch.full((BATCH,), 3.5, dtype=torch.float64)}
        ids = {"txt_ids": torch.zeros(TEXT, 3), "img_ids": torch.stack([none, rows, columns], 1)}
    else:
        given |= {"hidden_states": normal(SIDE * SIDE, 32), "encoder_hidden_states": normal(TEXT, 96)}
        of_text = torch.stack([*[torch.zeros_like(tokens)] * 3, tokens], 1)
        ids = {"txt_ids": of_text, "img_ids": torch.stack([none, rows, columns, none], 1)}
    given = {name: value[part] for name, value in given.items()}
    return network(**given, **{name: value.double() for name, value in ids.items()}, return_dict=False)[0]
