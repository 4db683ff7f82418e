"""What the dims of pretrained networks' parameters are: `heads`, `embed`, `mlp`, `conv_out` and so on, by name
patterns.

Data for distributed/sharding_rules.py, which says where such a dim goes. Every parameter of every network here has
its axes: MaxDiffusion, whose names these are, leaves out feed-forward layers, norms, text encoders and the
autoencoder. Linear and convolution weights are (out, in, ...) as torch stores them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

BLOCKS = ("BasicTransformerBlock", "ResnetBlock2D", "CLIPEncoderLayer", "T5Block")
"""Class names of the blocks of UNets, autoencoders and text encoders."""
GATED = ("GEGLU", "SwiGLU")
"""Class names of modules whose linear layer gives two halves, one of which gates the other."""
Table = dict[str, tuple[str | None, ...]]
"""The logical axis of each dim, by pattern of parameter names."""

_ATTENTION: Table = {
    "*.transformer_blocks.*.attn*.to_[qkv].weight": ("heads", "embed"),
    "*.transformer_blocks.*.attn*.to_out.0.weight": ("embed", "heads"),
    "*.transformer_blocks.*.attn*.to_out.0.bias": ("embed",),
    "*.transformer_blocks.*.ff.net.0.proj.weight": ("mlp", "embed"),
    "*.transformer_blocks.*.ff.net.0.proj.bias": ("mlp",),
    "*.transformer_blocks.*.ff.net.2.weight": ("embed", "mlp"),
    "*.transformer_blocks.*.ff.net.2.bias": ("embed",),
    "*.transformer_blocks.*.norm[123].*": ("norm",),
    "*.attentions.*.norm.*": ("norm",),
    "*.attentions.*.proj_in.weight": ("embed", None),
    "*.attentions.*.proj_out.weight": ("embed", None),
    "*.attentions.*.proj_*.bias": ("embed",),
}
_RESNETS: Table = {
    "*.resnets.*.conv[12].weight": ("conv_out", "conv_in"),
    "*.resnets.*.conv[12].bias": ("conv_out",),
    "*.resnets.*.norm[12].*": ("norm",),
}
_GROUPS: dict[str, Table] = {
    ".transformer_blocks.": _ATTENTION,
    ".resnets.": _RESNETS,
    ".conv_shortcut.": {
        "*.resnets.*.conv_shortcut.weight": ("conv_out", "conv_in"),
        "*.resnets.*.conv_shortcut.bias": ("conv_out",),
    },
    ".time_emb_proj.": {
        "*.time_emb_proj.weight": ("conv_out", "time"),
        "*.time_emb_proj.bias": ("conv_out",),
    },
    "samplers.": {
        "*samplers.*.conv.weight": ("conv_out", "conv_in"),
        "*samplers.*.conv.bias": ("conv_out",),
    },
    "time_embedding.": {
        "time_embedding.linear_*.weight": ("time", None),
        "time_embedding.linear_*.bias": ("time",),
    },
    "add_embedding.": {
        "add_embedding.linear_*.weight": ("time", None),
        "add_embedding.linear_*.bias": ("time",),
    },
    "controlnet_cond_embedding.": {
        "controlnet_cond_embedding.blocks.*.weight": ("conv_out", "conv_in"),
        "controlnet_cond_embedding.blocks.*.bias": ("conv_out",),
        "controlnet_cond_embedding.conv_out.weight": ("conv_out", "conv_in"),
        "controlnet_cond_embedding.conv_out.bias": ("conv_out",),
    },
    "controlnet_down_blocks.": {
        "controlnet_*_block*.weight": ("conv_out", "conv_in"),
        "controlnet_*_block*.bias": ("conv_out",),
    },
    ".group_norm.": {  # the autoencoder's attention in its middle
        "*.mid_block.attentions.*.to_[qkv].weight": ("heads", "embed"),
        "*.mid_block.attentions.*.to_[qkv].bias": ("heads",),
        "*.mid_block.attentions.*.to_out.0.weight": ("embed", "heads"),
        "*.mid_block.attentions.*.to_out.0.bias": ("embed",),
        "*.mid_block.attentions.*.group_norm.*": ("norm",),
    },
    "quant_conv.": {
        "*quant_conv.weight": ("conv_out", "conv_in"),
        "*quant_conv.bias": ("conv_out",),
    },
    "conv_norm_out.": {
        "*conv_norm_out.*": ("norm",),
        "*conv_out.weight": ("conv_out", "conv_in"),
        "*conv_out.bias": ("conv_out",),
    },
    "conv_in.": {
        "*conv_in.weight": ("conv_out", "conv_in"),
        "*conv_in.bias": ("conv_out",),
    },
    ".self_attn.": {
        "*embeddings.token_embedding.weight": ("vocabulary", "embed"),
        "*embeddings.position_embedding.weight": ("positions", "embed"),
        "*.self_attn.[qkv]_proj.weight": ("heads", "embed"),
        "*.self_attn.[qkv]_proj.bias": ("heads",),
        "*.self_attn.out_proj.weight": ("embed", "heads"),
        "*.self_attn.out_proj.bias": ("embed",),
        "*.mlp.fc1.weight": ("mlp", "embed"),
        "*.mlp.fc1.bias": ("mlp",),
        "*.mlp.fc2.weight": ("embed", "mlp"),
        "*.mlp.fc2.bias": ("embed",),
        "*layer_norm*": ("norm",),
    },
    "text_projection.": {"text_projection.weight": (None, "embed")},
    ".SelfAttention.": {
        "shared.weight": ("vocabulary", "embed"),
        "encoder.block.*.SelfAttention.[qkv].weight": ("heads", "embed"),
        "encoder.block.*.SelfAttention.o.weight": ("embed", "heads"),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (None, "heads"),
        "encoder.block.*.DenseReluDense.wi*.weight": ("mlp", "embed"),
        "encoder.block.*.DenseReluDense.wo.weight": ("embed", "mlp"),
        "*layer_norm.weight": ("norm",),
    },
}
"""Patterns that belong together: a group holds for networks with a parameter whose name has its part."""
_FACTOR = re.compile(r"\.(lora_[AB])\.\w+\.weight$")


def patterns(network: nn.Module) -> Table:
    """The patterns of a network of diffusers or transformers; empty for one that no group knows. Layers that an adapter
    wraps are known as they were before."""
    names = [host(name)[0] for name, _ in network.named_parameters()]
    return {
        pattern: dims
        for part, table in _GROUPS.items()
        if any(part in f".{name}" if part.startswith(".") else part in name for name in names)
        for pattern, dims in table.items()
    }


def host(name: str) -> tuple[str, str]:
    """The name of the parameter as the network had it before adapters wrapped its layers; and, of a factor that is
    added to a weight, which one it is: `lora_A` (rank, in) or `lora_B` (out, rank)."""
    if found := _FACTOR.search(name):
        return f"{name[: found.start()]}.weight", found[1]
    return name.replace(".base_layer.", "."), ""


def of_factor(dims: tuple[str | None, ...], factor: str) -> tuple[str | None, ...]:
    """The axes of a factor of a weight with these, or of the weight itself."""
    if not factor or len(dims) < 2:
        return () if factor else dims
    return (dims[0], "rank") if factor == "lora_B" else ("rank", dims[1])


def heads(network: nn.Module) -> dict[str, int]:
    """Attention heads of each parameter that has a `heads` dim, by its name."""
    found: dict[str, int] = {}
    for name, module in network.named_modules():
        count = _heads_of(module)
        if count is not None:
            found |= {f"{name}.{parameter}": count for parameter, _ in module.named_parameters()}
    return found


def _heads_of(module: Any) -> int | None:
    """diffusers says `heads`, CLIP `num_heads`, T5 `n_heads`."""
    if not isinstance(module, nn.Module) or not any(hasattr(module, key) for key in ("to_q", "q_proj", "q")):
        return None
    counts: Mapping[str, Any] = {key: getattr(module, key, None) for key in ("heads", "num_heads", "n_heads")}
    return next((int(count) for count in counts.values() if count is not None), None)
