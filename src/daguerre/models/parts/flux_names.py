"""Names of FLUX.1's and FLUX.2's transformers in Black Forest Labs' files, which ComfyUI and sd-scripts use, too.

Sources: black-forest-labs/flux (src/flux/model.py), black-forest-labs/flux2 (src/flux2/model.py). diffusers names the
scale of the last norm before its shift.
"""

from daguerre.models.weights.original_names import NameTable

_Layers = dict[str, str | tuple[str, ...]]
_OUTSIDE: _Layers = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
}
_ATTENTION: dict[str, _Layers] = {
    "img": {
        "qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "proj": "attn.to_out.0",
        "norm.query_norm": "attn.norm_q",
        "norm.key_norm": "attn.norm_k",
    },
    "txt": {
        "qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        "proj": "attn.to_add_out",
        "norm.query_norm": "attn.norm_added_q",
        "norm.key_norm": "attn.norm_added_k",
    },
}
"""Attention of a double block by stream: image or text."""


def _embedders(place: str, names: dict[str, str]) -> _Layers:
    """The embeddings of numbers that are inside `place`."""
    return {
        f"{original}.{side}_layer": f"{place}.{name}_embedder.linear_{number}"
        for original, name in names.items()
        for number, side in ((1, "in"), (2, "out"))
    }


def _stream(original: str, others: dict[str, str]) -> _Layers:
    """A double block's layers of one stream: its attention, and others."""
    layers = {**others, **{f"attn.{name}": layer for name, layer in _ATTENTION[original].items()}}
    prefix = "transformer_blocks.*."
    return {
        f"double_blocks.*.{original}_{name}": prefix + layer
        if isinstance(layer, str)
        else tuple(prefix + part for part in layer)
        for name, layer in layers.items()
    }


_SINGLE = "single_transformer_blocks.*."
_NORMS: _Layers = {
    f"single_blocks.*.norm.{original}_norm": f"{_SINGLE}attn.norm_{original[0]}" for original in ("query", "key")
}
_SWAPPED = frozenset({"norm_out.linear"})
_SCALES = frozenset(
    f"{place}.{norm}"
    for place in ("double_blocks.*.img_attn.norm", "double_blocks.*.txt_attn.norm", "single_blocks.*.norm")
    for norm in ("query_norm", "key_norm")
)
FLUX = NameTable(
    {
        **_OUTSIDE,
        **_embedders("time_text_embed", {"time_in": "timestep", "vector_in": "text", "guidance_in": "guidance"}),
        **_stream("img", {"mod.lin": "norm1.linear", "mlp.0": "ff.net.0.proj", "mlp.2": "ff.net.2"}),
        **_stream(
            "txt",
            {"mod.lin": "norm1_context.linear", "mlp.0": "ff_context.net.0.proj", "mlp.2": "ff_context.net.2"},
        ),
        "single_blocks.*.modulation.lin": f"{_SINGLE}norm.linear",
        "single_blocks.*.linear1": tuple(
            _SINGLE + part for part in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
        ),
        "single_blocks.*.linear2": f"{_SINGLE}proj_out",
        **_NORMS,
    },
    swapped=_SWAPPED,
    scales=_SCALES,
    omi={"img_in": "img_in.proj"},
)
FLUX2 = NameTable(
    {
        **_OUTSIDE,
        **_embedders("time_guidance_embed", {"time_in": "timestep", "guidance_in": "guidance"}),
        **{
            f"{modulation}.lin": f"{modulation}.linear"
            for modulation in (
                *("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation"),
            )
        },
        **_stream("img", {"mlp.0": "ff.linear_in", "mlp.2": "ff.linear_out"}),
        **_stream("txt", {"mlp.0": "ff_context.linear_in", "mlp.2": "ff_context.linear_out"}),
        "single_blocks.*.linear1": f"{_SINGLE}attn.to_qkv_mlp_proj",
        "single_blocks.*.linear2": f"{_SINGLE}attn.to_out",
        **_NORMS,
    },
    swapped=_SWAPPED,
    scales=_SCALES,
)
"""klein has no embedding of a guidance."""
