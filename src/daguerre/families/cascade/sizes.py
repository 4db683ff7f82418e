"""Numbers of Stable Cascade's networks: the sizes that Stability publishes, and those that a file's weights tell.

The keys are diffusers' of StableCascadeUNet. No torch here.
"""

import re
from collections.abc import Mapping
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]

V2_S = (
    ("fused", 1, 1, 24, 2),
    ("fused", 4, 2, 48, 4),
    ("fused", 4, 2, 64, 4),
    ("separable", 4, 2, 128, 6),
    ("separable", 6, 1, 160, 9),
    ("separable", 6, 2, 256, 15),
)
"""Of each stage of EfficientNet-V2-S: kind of its blocks, expansion, stride of the first, channels, blocks."""
STEM, FEATURES = 24, 1280
"""Channels of its first and its last layer."""
_HEAD = 64
"""Channels of a head in all published networks."""
_C_BLOCK = ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")
_C: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 1,
    "clip_text_in_channels": 1280,
    "clip_text_pooled_in_channels": 1280,
    "clip_image_in_channels": 768,
    "switch_level": [False],
    "timestep_conditioning_type": ["sca", "crp"],
    "dropout": [0.1, 0.1],
    "block_types_per_layer": [list(_C_BLOCK)] * 2,
}
_B: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 2,
    "conditioning_dim": 1280,
    "clip_text_pooled_in_channels": 1280,
    "effnet_in_channels": 16,
    "pixel_mapper_in_channels": 3,
    "timestep_conditioning_type": ["sca"],
    "down_blocks_repeat_mappers": [1, 1, 1, 1],
    "dropout": [0.0, 0.0, 0.1, 0.1],
    "block_types_per_layer": [list(_C_BLOCK[:2])] * 2 + [list(_C_BLOCK)] * 2,
}
STAGE_C: dict[str, dict[str, Any]] = {
    "3.6B": {
        **_C,
        "conditioning_dim": 2048,
        "block_out_channels": [2048, 2048],
        "num_attention_heads": [32, 32],
        "down_num_layers_per_block": [8, 24],
        "up_num_layers_per_block": [24, 8],
    },
    "1B": {
        **_C,
        "conditioning_dim": 1536,
        "block_out_channels": [1536, 1536],
        "num_attention_heads": [24, 24],
        "down_num_layers_per_block": [4, 12],
        "up_num_layers_per_block": [12, 4],
    },
}
"""Stage C: 3,589.1 M and 1,030.8 M parameters."""
STAGE_B: dict[str, dict[str, Any]] = {
    "3B": {
        **_B,
        "block_out_channels": [320, 640, 1280, 1280],
        "num_attention_heads": [-1, -1, 20, 20],
        "down_num_layers_per_block": [2, 6, 28, 6],
        "up_num_layers_per_block": [6, 28, 6, 2],
        "up_blocks_repeat_mappers": [3, 3, 2, 2],
    },
    "700M": {
        **_B,
        "block_out_channels": [320, 576, 1152, 1152],
        "num_attention_heads": [-1, 9, 18, 18],
        "down_num_layers_per_block": [2, 4, 14, 4],
        "up_num_layers_per_block": [4, 14, 4, 2],
        "up_blocks_repeat_mappers": [2, 2, 2, 2],
    },
}
"""Stage B: 1,562.9 M parameters (called 3B in Stability's configs, 1.5B in its readme) and 699.5 M."""
STAGE_A = {"scale_factor": 0.43}
"""Stage A, 18.4 M parameters, else with the defaults of diffusers' PaellaVQModel."""
FILES = {"stage_c": STAGE_C["3.6B"], "stage_c_lite": STAGE_C["1B"], "stage_b": STAGE_B["3B"]}
FILES |= {"stage_b_lite": STAGE_B["700M"], "stage_a": STAGE_A, "effnet_encoder": {}, "previewer": {}}
"""Numbers by the names of Stability's single files, which may have `_bf16` at the end."""


def named(file: str) -> dict[str, Any] | None:
    """Numbers of a published file by its name; None for other names."""
    return FILES.get(file.partition(".")[0].removesuffix("_bf16"))


def told(shapes: Shapes) -> dict[str, Any]:
    """Numbers of the network with weights of these shapes, in diffusers' names. Heads have 64 channels, as in all that
    are published, or are one where a level has fewer."""
    is_c = "clip_txt_mapper.weight" in shapes
    down = {level: _layers(shapes, f"down_blocks.{level}.") for level in range(_count(shapes, "down_blocks"))}
    up = [_layers(shapes, f"up_blocks.{level}.") for level in range(len(down))]
    widths = [shapes[layers[0]][0] for layers in down.values()]
    attends = [any(re.match(rf"down_blocks\.{level}\.\d+\.attention\.", name) for name in shapes) for level in down]
    pooled = shapes["clip_txt_pooled_mapper.weight"]
    numbers = (_C if is_c else _B) | {
        "conditioning_dim": pooled[0] // 4,
        "clip_text_pooled_in_channels": pooled[1],
        "block_out_channels": widths,
        "num_attention_heads": [
            max(1, width // _HEAD) if attending else -1 for width, attending in zip(widths, attends, strict=True)
        ],
        "block_types_per_layer": [list(_C_BLOCK if attending else _C_BLOCK[:2]) for attending in attends],
        "down_num_layers_per_block": [len(layers) for layers in down.values()],
        "up_num_layers_per_block": [len(layers) for layers in up],
        "down_blocks_repeat_mappers": _repeats(shapes, "down", len(down)),
        "up_blocks_repeat_mappers": _repeats(shapes, "up", len(down)),
        "dropout": [0.1 if attending else 0.0 for attending in attends],
    }
    if is_c:
        numbers["clip_text_in_channels"] = shapes["clip_txt_mapper.weight"][1]
        numbers["clip_image_in_channels"] = shapes["clip_img_mapper.weight"][1]
        numbers["switch_level"] = [False] * (len(down) - 1)
    else:
        numbers["effnet_in_channels"] = shapes["effnet_mapper.0.weight"][1]
    return numbers


def _count(shapes: Shapes, part: str) -> int:
    return 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith(f"{part}."))


def _layers(shapes: Shapes, level: str) -> list[str]:
    """The depthwise convolutions of a level: one a layer."""
    return [name for name in shapes if name.startswith(level) and name.endswith(".depthwise.weight")]


def _repeats(shapes: Shapes, way: str, levels: int) -> list[int]:
    """Runs of the blocks of each level: one more than it has mappers in between."""
    found = [re.match(rf"{way}_repeat_mappers\.(\d+)\.\d+\.weight", name) for name in shapes]
    return [1 + sum(match is not None and int(match[1]) == level for match in found) for level in range(levels)]


def stage_a_told(shapes: Shapes) -> dict[str, Any]:
    """Numbers of a Stage A with weights of these shapes."""
    width, channels = shapes["up_blocks.0.0.weight"][:2]
    blocks = [name for name in shapes if re.fullmatch(r"up_blocks\.\d+\.gammas", name)]
    return STAGE_A | {
        "embed_dim": width,
        "latent_channels": channels,
        "bottleneck_blocks": len(blocks) - 1,
        "num_vq_embeddings": shapes["vquantizer.embedding.weight"][0],
    }


def effnet_told(shapes: Shapes) -> dict[str, Any]:
    """Numbers of an encoder with weights of these shapes."""
    return backbone_told(shapes) | {"latent_channels": shapes["mapper.0.weight"][0]}


def backbone_told(shapes: Shapes) -> dict[str, Any]:
    """Numbers of an EfficientNet with weights of these shapes; the strides are those of EfficientNet-V2-S."""
    last = _count(shapes, "backbone") - 1
    stages = []
    for number, (_, _, stride, _, _) in zip(range(1, last), V2_S, strict=True):
        first = f"backbone.{number}.0.block"
        count = 1 + max(int(name.split(".")[2]) for name in shapes if name.startswith(f"backbone.{number}."))
        separable = f"{first}.2.fc1.weight" in shapes
        wide, before = shapes[f"{first}.0.0.weight"][:2]
        end = next(f"{first}.{place}.0.weight" for place in (3, 1, 0) if f"{first}.{place}.0.weight" in shapes)
        expand = wide // before if end != f"{first}.0.0.weight" else 1
        stages.append(["separable" if separable else "fused", expand, stride, shapes[end][0], count])
    return {
        "feature_channels": shapes[f"backbone.{last}.0.weight"][0],
        "stem_channels": shapes["backbone.0.0.weight"][0],
        "stages": stages,
    }


def previewer_told(shapes: Shapes) -> dict[str, Any]:
    """Numbers of a previewer with weights of these shapes."""
    hidden, channels = shapes["blocks.0.weight"][:2]
    return {"latent_channels": channels, "hidden_channels": hidden}
