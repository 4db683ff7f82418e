"""Names of FLUX.1's transformer in Black Forest Labs' files, which ComfyUI and kohya's sd-scripts use, too.

Source: black-forest-labs/flux (src/flux/model.py). diffusers names the scale of the last norm before its shift.
"""

from daguerre.models.weights.original_names import NameTable

_EMBEDDERS = {"time_in": "timestep", "vector_in": "text", "guidance_in": "guidance"}


def _stream(original: str, attention: dict[str, str | tuple[str, ...]], block: str) -> dict[str, str | tuple[str, ...]]:
    """A double block's layers of one stream: image (`img`) or text (`txt`)."""
    layers = {
        "mod.lin": f"norm1{block}.linear",
        "mlp.0": f"ff{block}.net.0.proj",
        "mlp.2": f"ff{block}.net.2",
        **{f"attn.{name}": layer for name, layer in attention.items()},
    }
    prefix = "transformer_blocks.*."
    return {
        f"double_blocks.*.{original}_{name}": prefix + layer
        if isinstance(layer, str)
        else tuple(prefix + part for part in layer)
        for name, layer in layers.items()
    }


_SINGLE = "single_transformer_blocks.*."
FLUX = NameTable(
    {
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
        **{
            f"{original}.{side}_layer": f"time_text_embed.{name}_embedder.linear_{number}"
            for original, name in _EMBEDDERS.items()
            for number, side in ((1, "in"), (2, "out"))
        },
        **_stream(
            "img",
            {
                "qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
                "proj": "attn.to_out.0",
                "norm.query_norm": "attn.norm_q",
                "norm.key_norm": "attn.norm_k",
            },
            "",
        ),
        **_stream(
            "txt",
            {
                "qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
                "proj": "attn.to_add_out",
                "norm.query_norm": "attn.norm_added_q",
                "norm.key_norm": "attn.norm_added_k",
            },
            "_context",
        ),
        "single_blocks.*.modulation.lin": f"{_SINGLE}norm.linear",
        "single_blocks.*.linear1": tuple(
            _SINGLE + part for part in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
        ),
        "single_blocks.*.linear2": f"{_SINGLE}proj_out",
        "single_blocks.*.norm.query_norm": f"{_SINGLE}attn.norm_q",
        "single_blocks.*.norm.key_norm": f"{_SINGLE}attn.norm_k",
    },
    swapped=frozenset({"norm_out.linear"}),
    scales=frozenset(
        f"{place}.{norm}"
        for place in ("double_blocks.*.img_attn.norm", "double_blocks.*.txt_attn.norm", "single_blocks.*.norm")
        for norm in ("query_norm", "key_norm")
    ),
)
