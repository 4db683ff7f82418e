"""Logical axes (`heads`, `embed`, `mlp`, `conv_out` ...) of the parameters of pretrained networks, by name patterns.

Data for distributed/sharding_rules.py, which says where such a dim goes. The names are MaxDiffusion's, which leaves out
feed-forward layers, norms, text encoders and the autoencoder. Weights are (out, in, ...) as torch stores them.
"""

import re

from torch import nn

BLOCKS = ("BasicTransformerBlock", "ResnetBlock2D", "CLIPEncoderLayer", "T5Block")
"""Class names of the blocks of UNets, autoencoders and text encoders."""
GATED = ("GEGLU", "SwiGLU")
"""Class names of modules whose linear layer gives two halves, one of which gates the other."""
Dims = tuple[str | None, ...]
Table = dict[str, Dims]
"""The logical axis of each dim, by pattern of parameter names."""


def _layers(dims: Dims, *names: str) -> Table:
    """Linear layers or convolutions with these axes, whose biases have the first of them."""
    return {f"{name}.{part}": own for name in names for part, own in (("weight", dims), ("bias", dims[:1]))}


_CONV: Dims = ("conv_out", "conv_in")
_GROUPS: dict[str, Table] = {
    ".transformer_blocks.": {
        "*.transformer_blocks.*.attn*.to_[qkv].weight": ("heads", "embed"),
        **_layers(("embed", "heads"), "*.transformer_blocks.*.attn*.to_out.0"),
        **_layers(("mlp", "embed"), "*.transformer_blocks.*.ff.net.0.proj"),
        **_layers(("embed", "mlp"), "*.transformer_blocks.*.ff.net.2"),
        "*.transformer_blocks.*.norm[123].*": ("norm",),
    },
    ".proj_in.": {"*.attentions.*.norm.*": ("norm",), **_layers(("embed", None), "*.attentions.*.proj_*")},
    ".resnets.": {**_layers(_CONV, "*.resnets.*.conv[12]"), "*.resnets.*.norm[12].*": ("norm",)},
    ".conv_shortcut.": _layers(_CONV, "*.resnets.*.conv_shortcut"),
    ".time_emb_proj.": _layers(("conv_out", "time"), "*.time_emb_proj"),
    "samplers.": _layers(_CONV, "*samplers.*.conv"),
    "time_embedding.": _layers(("time", None), "time_embedding.linear_*"),
    "add_embedding.": _layers(("time", None), "add_embedding.linear_*"),
    "controlnet_cond_embedding.": _layers(
        _CONV, "controlnet_cond_embedding.blocks.*", "controlnet_cond_embedding.conv_out"
    ),
    "controlnet_down_blocks.": _layers(_CONV, "controlnet_*_block*"),
    ".group_norm.": {  # the autoencoder's attention in its middle
        **_layers(("heads", "embed"), "*.mid_block.attentions.*.to_[qkv]"),
        **_layers(("embed", "heads"), "*.mid_block.attentions.*.to_out.0"),
        "*.mid_block.attentions.*.group_norm.*": ("norm",),
    },
    "quant_conv.": _layers(_CONV, "*quant_conv"),
    "conv_norm_out.": {"*conv_norm_out.*": ("norm",), **_layers(_CONV, "*conv_out")},
    "conv_in.": _layers(_CONV, "*conv_in"),
    "token_embedding.": {"*embeddings.token_embedding.weight": ("vocabulary", "embed")},
    ".self_attn.": {
        "*embeddings.position_embedding.weight": ("positions", "embed"),
        **_layers(("heads", "embed"), "*.self_attn.[qkv]_proj"),
        **_layers(("embed", "heads"), "*.self_attn.out_proj"),
        **_layers(("mlp", "embed"), "*.mlp.fc1"),
        **_layers(("embed", "mlp"), "*.mlp.fc2"),
        "*layer_norm*": ("norm",),
    },
    ".patch_embedding.": {  # CLIP's image encoder
        "*embeddings.class_embedding": ("embed",),
        "*embeddings.patch_embedding.weight": _CONV,
        "*pre_layrnorm.*": ("norm",),
        "*post_layernorm.*": ("norm",),
        "visual_projection.weight": (None, "embed"),
    },
    "clip_txt_pooled_mapper.": {  # Stable Cascade, whose feed-forward layers have a norm over all their channels
        **_layers(("embed", None), "clip_txt_pooled_mapper", "*_blocks.*.channelwise.4"),
        **_layers((None, "embed"), "*_blocks.*.channelwise.0"),
        "*_blocks.*.channelwise.2.*": ("norm",),
        **_layers(("conv_out",), "*_blocks.*.depthwise"),
        **_layers(("embed", "time"), "*_blocks.*.mapper*"),
        **_layers(_CONV, "embedding.1", "clf.1", "*scalers.*.1*"),
    },
    "clip_txt_mapper.": _layers(("embed", None), "clip_txt_mapper"),
    "clip_img_mapper.": _layers(("embed", None), "clip_img_mapper"),
    "effnet_mapper.": _layers(_CONV, "effnet_mapper.*"),
    "pixels_mapper.": _layers(_CONV, "pixels_mapper.*"),
    "_repeat_mappers.": _layers(_CONV, "*_repeat_mappers.*"),
    ".kv_mapper.": {
        **_layers(("heads", "embed"), "*_blocks.*.attention.to_[qkv]"),
        **_layers(("embed", "heads"), "*_blocks.*.attention.to_out.0"),
        **_layers(("embed", None), "*_blocks.*.kv_mapper.1"),
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
_FACTOR = re.compile(
    r"\.(?:(lora_[AB])\.\w+\.weight|(?:lora_magnitude_vector|hada_\w+|lokr_\w+|boft_\w+)\.\w+(?:\.weight)?)$"
)
_ROWS = re.compile(r"\b(token_embedding|embed_tokens)\.rows$")
ROWS = "rows"
"""Rows beside embeddings, which every device has."""
OTHER = "other"
"""An addition to a weight that is not one of a LoRA's two factors."""


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
    """The name of the parameter as the network had it before adapters wrapped its layers; and, of what is added to a
    weight, what it is: `lora_A` (rank, in), `lora_B` (out, rank), `rows` (n, width) or `other`."""
    if found := _FACTOR.search(name):
        return f"{name[: found.start()]}.weight", found[1] or OTHER
    if found := _ROWS.search(name):
        return f"{'shared' if found[1] == 'embed_tokens' else name[: -len('.rows')]}.weight", ROWS
    return name.replace(".base_layer.", "."), ""


def of_factor(dims: Dims, factor: str) -> Dims:
    """The axes of a factor of a weight with these, or of the weight itself."""
    if factor in ("", OTHER, ROWS) or len(dims) < 2:
        return () if factor else dims
    return (dims[0], "rank", *dims[2:]) if factor == "lora_B" else ("rank", *dims[1:])


def heads(network: nn.Module) -> dict[str, int]:
    """Attention heads of each parameter that has a `heads` dim, by its name."""
    found: dict[str, int] = {}
    for name, module in network.named_modules():
        if any(hasattr(module, key) for key in ("to_q", "q_proj", "q")):
            # diffusers has `heads`, CLIP `num_heads`, T5 `n_heads`
            counts = [getattr(module, key, None) for key in ("heads", "num_heads", "n_heads")]
            count = next((int(each) for each in counts if each is not None), None)
            if count is not None:
                found |= {f"{name}.{parameter}": count for parameter, _ in module.named_parameters()}
    return found
