"""Facts of Anima's networks, and their names in NVIDIA's and ComfyUI's files, which have both: the text conditioner is
`llm_adapter` there.

Sources: nvidia-cosmos/cosmos-predict2; Comfy-Org/ComfyUI comfy/ldm/anima; tdrussell/diffusion-pipe.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from daguerre.models.network import HEAD, Architecture, Facts, layers
from daguerre.models.weights.original_names import FLAT, PREFIXES, NameTable, Spelling, spelled

_PROJECTIONS = {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "output_proj": "to_out.0"}
_PARTS = {"self_attn": "attn1", "cross_attn": "attn2"}
_MODULATED = {"self_attn": "norm1", "cross_attn": "norm2", "mlp": "norm3"}
TRANSFORMER_NAMES = NameTable(
    {
        "x_embedder.proj.1": "patch_embed.proj",
        **{f"t_embedder.1.linear_{n}": f"time_embed.t_embedder.linear_{n}" for n in (1, 2)},
        "t_embedding_norm": "time_embed.norm",
        "final_layer.linear": "proj_out",
        **{f"final_layer.adaln_modulation.{n}": f"norm_out.linear_{n}" for n in (1, 2)},
        **{
            f"blocks.*.{part}.{theirs}": f"transformer_blocks.*.{own}.{layer}"
            for part, own in _PARTS.items()
            for theirs, layer in {**_PROJECTIONS, "q_norm": "norm_q", "k_norm": "norm_k"}.items()
        },
        **{
            f"blocks.*.adaln_modulation_{part}.{n}": f"transformer_blocks.*.{norm}.linear_{n}"
            for part, norm in _MODULATED.items()
            for n in (1, 2)
        },
        "blocks.*.mlp.layer1": "transformer_blocks.*.ff.net.0.proj",
        "blocks.*.mlp.layer2": "transformer_blocks.*.ff.net.2",
    },
    prefix="net.",
)
"""NVIDIA's and ComfyUI's names of the transformer."""


class _InsideNames(NameTable):
    """Names of the text conditioner, which lies inside the transformer's files. Without a prefix its own names would be
    taken for those of the transformer's blocks."""

    def spellings(self, component: str, networks: Mapping[str, nn.Module], layers: Sequence[str]) -> Iterator[Spelling]:
        yield from ((f"{component}.{layer}", (layer,), False) for layer in layers)
        for original, parts in self._layers(layers).items():
            yield from spelled(original, parts, PREFIXES, FLAT, is_original=True)


_SAME = ("embed", "in_proj", "out_proj", "norm")
_IN_BLOCKS = ("norm_self_attn", "norm_cross_attn", "norm_mlp", "mlp.0", "mlp.2")
_IN_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
CONDITIONER_NAMES = _InsideNames(
    {
        f"llm_adapter.{name}": name
        for name in (
            *_SAME,
            *(f"blocks.*.{name}" for name in _IN_BLOCKS),
            *(f"blocks.*.{part}.{name}" for part in _PARTS for name in _IN_ATTENTION),
        )
    },
    prefix="net.",
)


def _architecture(network: nn.Module, prediction: str) -> Architecture:
    return Architecture("anima", {"ss_base_model_version": "anima"})


TRANSFORMER = Facts(
    blocks=("CosmosTransformerBlock",),
    axes={
        **layers(("embed", None), "patch_embed.proj"),
        **layers((None, "embed"), "proj_out", "norm_out.linear_?", "*.norm?.linear_?"),
        **layers(("time", None), "time_embed.t_embedder.linear_?"),
        **layers(("heads", "embed"), "*.attn?.to_[qkv]"),
        **layers(("embed", "heads"), "*.attn?.to_out.0"),
        **layers(("mlp", "embed"), "*.ff.net.0.proj"),
        **layers(("embed", "mlp"), "*.ff.net.2"),
        "*.attn?.norm_[qk].weight": (HEAD,),
        "time_embed.norm.weight": ("norm",),
    },
    heads="heads",
    layers={"attention": ("attn?.to_[qkv]", "attn?.to_out.0"), "ff": ("ff.net.*",)},
    readers=(("attn1", "to_q", "to_k", "to_v"), ("attn2", "to_k", "to_v")),
    names=TRANSFORMER_NAMES,
    unknown_to_diffusers=("*",),
    architecture=_architecture,
)
CONDITIONER = Facts(
    blocks=("AnimaTextConditionerBlock",),
    axes={
        "embed.weight": ("vocabulary", "embed"),
        **layers(("embed", None), "in_proj", "out_proj"),
        **layers(("heads", "embed"), "*_attn.[qkv]_proj"),
        **layers(("embed", "heads"), "*_attn.o_proj"),
        **layers(("mlp", "embed"), "*.mlp.0"),
        **layers(("embed", "mlp"), "*.mlp.2"),
        "*_attn.[qk]_norm.weight": (HEAD,),
        "*.norm_*": ("norm",),
        "norm.weight": ("norm",),
    },
    heads="num_attention_heads",
    layers={"attention": ("*_attn.[qkvo]_proj",), "ff": ("mlp.?",)},
    readers=(("self_attn", "q_proj", "k_proj", "v_proj"), ("cross_attn", "k_proj", "v_proj")),
    names=CONDITIONER_NAMES,
    unknown_to_diffusers=("*",),
)
