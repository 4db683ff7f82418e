"""Facts of the networks that several families use: CLIP's and T5's encoders, and the KL autoencoder."""

from transformers import CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel

from daguerre.distributed.sharding_rules import Dims
from daguerre.models.network import Facts, Table, layers
from daguerre.models.parts.text.names import ClipNames, T5Names

_CONV: Dims = ("conv_out", "conv_in")
_NORM: Dims = ("norm",)
_CLIP_LAYERS: Table = {
    "*embeddings.position_embedding.weight": ("positions", "embed"),
    **layers(("heads", "embed"), "*.self_attn.[qkv]_proj"),
    **layers(("embed", "heads"), "*.self_attn.out_proj"),
    **layers(("mlp", "embed"), "*.mlp.fc1"),
    **layers(("embed", "mlp"), "*.mlp.fc2"),
    "*layer_norm*": _NORM,
}
CLIP_TEXT = Facts(
    blocks=("CLIPEncoderLayer",),
    axes={
        **_CLIP_LAYERS,
        "*embeddings.token_embedding.weight": ("vocabulary", "embed"),
        "text_projection.weight": (None, "embed"),
    },
    heads="num_heads",
    layers={"attention": ("q_proj", "k_proj", "v_proj", "out_proj"), "ff": ("mlp.fc?",)},
    readers=(("self_attn", "q_proj", "k_proj", "v_proj"),),
    names=ClipNames(),
)
"""transformers' CLIPTextModel, with and without a projection."""
CLIP_IMAGE = Facts(
    blocks=("CLIPEncoderLayer",),
    axes={
        **_CLIP_LAYERS,
        "*embeddings.class_embedding": ("embed",),
        "*embeddings.patch_embedding.weight": _CONV,
        "*pre_layrnorm.*": _NORM,
        "*post_layernorm.*": _NORM,
        "visual_projection.weight": (None, "embed"),
    },
    heads="num_heads",
)
"""transformers' CLIPVisionModelWithProjection."""
T5 = Facts(
    blocks=("T5Block",),
    axes={
        "shared.weight": ("vocabulary", "embed"),
        "encoder.block.*.SelfAttention.[qkv].weight": ("heads", "embed"),
        "encoder.block.*.SelfAttention.o.weight": ("embed", "heads"),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (None, "heads"),
        "encoder.block.*.DenseReluDense.wi*.weight": ("mlp", "embed"),
        "encoder.block.*.DenseReluDense.wo.weight": ("embed", "mlp"),
        "*layer_norm.weight": _NORM,
    },
    heads="n_heads",
    layers={"attention": ("SelfAttention.[qkvo]",), "ff": ("DenseReluDense.w[io]*",)},
    readers=(("SelfAttention", "q", "k", "v"), ("DenseReluDense", "wi_0", "wi_1")),
    names=T5Names(),
    published_bf16=True,
)
"""transformers' T5EncoderModel. Its first block alone has the biases of positions, a column a head."""
KL_AUTOENCODER = Facts(
    blocks=("ResnetBlock2D",),
    axes={
        **layers(_CONV, "*.resnets.*.conv[12]", "*.resnets.*.conv_shortcut", "*samplers.*.conv", "*quant_conv"),
        **layers(_CONV, "*conv_in", "*conv_out"),
        "*.resnets.*.norm[12].*": _NORM,
        "*conv_norm_out.*": _NORM,
        **layers(("heads", "embed"), "*.mid_block.attentions.*.to_[qkv]"),
        **layers(("embed", "heads"), "*.mid_block.attentions.*.to_out.0"),
        "*.mid_block.attentions.*.group_norm.*": _NORM,
    },
    heads="heads",
)
"""diffusers' AutoencoderKL, whose only attention is in its middle."""
TEXT_ENCODERS: dict[type, Facts] = {
    CLIPTextModel: CLIP_TEXT,
    CLIPTextModelWithProjection: CLIP_TEXT,
    T5EncoderModel: T5,
}
"""Facts of text encoders by class, for the `FACTS` of families."""
