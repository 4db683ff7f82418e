"""Logical axes of FLUX.1's and FLUX.2's transformers, diffusers' FluxTransformer2DModel and Flux2Transformer2DModel.

Single blocks have attention and feed-forward side by side, in layers that are fused: of FLUX.1 the last one, whose
columns are [heads | mlp], of FLUX.2 the first one, too, whose rows are [queries | keys | values | gate | up]. diffusers
splits them in the same way for inference (`_tp_plan`), but forgets that the norms of queries and keys, which every
device has whole, see its own heads alone.
"""

from typing import Any

from daguerre.models.network import HEAD, Segment, Table, layers


def flux_axes(transformer: Any) -> Table:
    """Axes of a FLUX.1 transformer of these numbers."""
    return {
        **_both(),
        **layers(("time", None), "time_text_embed.*.linear_*"),
        **layers((None, "embed"), "transformer_blocks.*.norm1*.linear", "single_transformer_blocks.*.norm.linear"),
        **layers(("heads", "embed"), "single_transformer_blocks.*.attn.to_[qkv]"),
        **layers(("mlp", "embed"), "transformer_blocks.*.ff*.net.0.proj", "single_transformer_blocks.*.proj_mlp"),
        **layers(("embed", "mlp"), "transformer_blocks.*.ff*.net.2"),
        **layers(("embed", (_heads(transformer), Segment("mlp"))), "single_transformer_blocks.*.proj_out"),
    }


def flux2_axes(transformer: Any) -> Table:
    """Axes of a FLUX.2 transformer of these numbers, such as klein."""
    heads, gated = _heads(transformer), (Segment("mlp"), Segment("mlp"))
    return {
        **_both(),
        **layers(("time", None), "time_guidance_embed.*.linear_*"),
        **layers((None, "embed"), "*_stream_modulation*.linear"),
        **layers((gated, "embed"), "transformer_blocks.*.ff*.linear_in"),
        **layers(("embed", "mlp"), "transformer_blocks.*.ff*.linear_out"),
        **layers(((heads, heads, heads, *gated), "embed"), "single_transformer_blocks.*.attn.to_qkv_mlp_proj"),
        **layers(("embed", (heads, Segment("mlp"))), "single_transformer_blocks.*.attn.to_out"),
    }


def _heads(transformer: Any) -> Segment:
    """A stretch of all heads, each of which stays whole."""
    width = int(transformer.config.attention_head_dim)
    return Segment("heads", width * int(transformer.config.num_attention_heads), width)


def _both() -> Table:
    """Axes of what both transformers have: attention of double blocks, norms, and what is outside of blocks.

    Modulation and the last norm's shift and scale are cut along features that every device needs: they stay whole.
    """
    return {
        **layers(("embed", None), "x_embedder", "context_embedder"),
        **layers((None, "embed"), "norm_out.linear", "proj_out"),
        **layers(("heads", "embed"), "transformer_blocks.*.attn.to_[qkv]", "transformer_blocks.*.attn.add_[qkv]_proj"),
        **layers(("embed", "heads"), "transformer_blocks.*.attn.to_out.0", "transformer_blocks.*.attn.to_add_out"),
        "transformer_blocks.*.attn.norm_*.weight": (HEAD,),
        "single_transformer_blocks.*.attn.norm_*.weight": (HEAD,),
    }
