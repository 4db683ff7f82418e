"""MindOne SDXL's networks: the UNet's numbers, the conditioner's encoders, the first stage.

What is SDXL's own is said to be the base's; a UNet of other numbers starts from random weights with those.
"""

from __future__ import annotations

import json
from typing import Any

from daguerre.config_import.reader import Reading, last
from daguerre.models.weights import architectures

MODEL = "model.params"
OWN = "the base's own"
CLIP_LAYERS = 12
"""Of CLIP-L, which FrozenCLIPEmbedder counts from the embeddings, which are 0."""
UNET = {
    "in_channels": 4,
    "out_channels": 4,
    "num_classes": "sequential",
    "use_spatial_transformer": True,
    "use_linear_in_transformer": True,
    "legacy": False,
}
"""What every UNet of this kind has."""
FIRST_STAGE: dict[str, Any] = {
    "embed_dim": 4,
    "ddconfig.double_z": True,
    "ddconfig.z_channels": 4,
    "ddconfig.in_channels": 3,
    "ddconfig.out_ch": 3,
    "ddconfig.ch": 128,
    "ddconfig.ch_mult": [1, 2, 4, 4],
    "ddconfig.num_res_blocks": 2,
    "ddconfig.attn_resolutions": [],
    "ddconfig.dropout": 0.0,
}
UNUSED = ("monitor", "lossconfig.target", "ddconfig.resolution", "ddconfig.attn_type", "ddconfig.decoder_attn_type")
"""Of the first stage: what only matters where it is trained, or how it is computed."""
LAYERS = {"last": -1, "penultimate": -2}
SIZES = ("original_size_as_tuple", "crop_coords_top_left", "target_size_as_tuple")
FIRST, SECOND = "FrozenCLIPEmbedder", ("FrozenOpenCLIPEmbedder2", "FrozenOpenCLIPEmbedder")


def convert(reading: Reading) -> None:
    """Reads `network_config`, `conditioner_config` and `first_stage_config`."""
    _unet(reading)
    conditioner = f"{MODEL}.conditioner_config"
    if last(reading.get(f"{conditioner}.target")) == "GeneralConditioner":
        reading.notice(f"{conditioner}.target", "both text encoders and the sizes condition the UNet")
    for key in reading.keys(f"{conditioner}.params.emb_models.*.target"):
        _embedder(reading, key.removesuffix(".target"), last(reading.get(key)))
    _first_stage(reading)


def _unet(reading: Reading) -> None:
    key = f"{MODEL}.network_config"
    if last(reading.get(f"{key}.target")) == "UNetModel":
        reading.notice(f"{key}.target", "a UNet2DConditionModel")
    reading.alias(f"{key}.params.spatial_transformer_attn_type", "spatial_transformer_attn_type")
    reading.alias(f"{key}.params.use_recompute", "use_recompute")
    for name, value in UNET.items():
        if f"{key}.params.{name}" in reading.rest:
            reading.expect(f"{key}.params.{name}", value, OWN)
    numbers = _numbers({name.rpartition(".")[2]: reading.get(name) for name in reading.keys(f"{key}.params.*")})
    own = _published()
    if numbers and all(own.get(name) == value for name, value in numbers.items()):
        for name in reading.keys(f"{key}.params.*"):
            reading.notice(name, OWN)
    elif numbers:
        for name in reading.keys(f"{key}.params.*"):
            reading.carry_all(name, {"model.unet": own | numbers}, "other numbers than the base's: random weights")


def _published() -> dict[str, Any]:
    folder = architectures.find("sdxl")
    assert folder is not None, "it ships with the package"
    document = json.loads((folder / "unet" / "config.json").read_text(encoding="utf-8"))
    return {name: value for name, value in document.items() if not name.startswith("_") and name != "sample_size"}


def _numbers(theirs: dict[str, Any]) -> dict[str, Any]:
    """Their numbers of a UNet as diffusers' ones; nothing where one is missing or of another kind."""
    single = ("model_channels", "num_res_blocks", "num_head_channels", "context_dim", "adm_in_channels")
    several = ("channel_mult", "attention_resolutions")
    if not all(_whole(theirs.get(name)) for name in single) or "transformer_depth" not in theirs:
        return {}
    if not all(isinstance(theirs.get(name), list) and all(map(_whole, theirs[name])) for name in several):
        return {}
    mult, depth = theirs["channel_mult"], theirs["transformer_depth"]
    channels = [theirs["model_channels"] * factor for factor in mult]
    attends = [2**level in theirs["attention_resolutions"] for level in range(len(mult))]
    return {
        "block_out_channels": channels,
        "layers_per_block": theirs["num_res_blocks"],
        "attention_head_dim": [width // theirs["num_head_channels"] for width in channels],
        "transformer_layers_per_block": depth if isinstance(depth, list) else [depth] * len(mult),
        "cross_attention_dim": theirs["context_dim"],
        "projection_class_embeddings_input_dim": theirs["adm_in_channels"],
        "down_block_types": ["CrossAttnDownBlock2D" if has else "DownBlock2D" for has in attends],
        "up_block_types": ["CrossAttnUpBlock2D" if has else "UpBlock2D" for has in reversed(attends)],
    }


def _whole(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _embedder(reading: Reading, key: str, name: str) -> None:
    field = str(reading.get(f"{key}.input_key"))
    if name == "ConcatTimestepEmbedderND" and field in SIZES:
        for part in ("target", "input_key"):
            reading.notice(f"{key}.{part}", f"{field} conditions the UNet, as SDXL has it")
        reading.expect(f"{key}.params.outdim", 256, "each number is embedded in 256")
        reading.expect(f"{key}.is_trainable", False, "an embedding of numbers has nothing to train")
        return
    if field != "txt" or name not in (FIRST, *SECOND):
        return
    mark = "" if name == FIRST else "_2"
    reading.notice(f"{key}.target", f"the text encoder model.text_encoder{mark}")
    reading.notice(f"{key}.input_key", "captions")
    reading.carry(f"{key}.is_trainable", f"model.train_text_encoder{mark}")
    reading.notice(f"{key}.params.freeze", f"model.train_text_encoder{mark} says it")
    _layer(reading, f"{key}.params", mark)
    _encoder(reading, f"{key}.params", mark)


def _layer(reading: Reading, key: str, mark: str) -> None:
    layer, index = reading.get(f"{key}.layer"), reading.get(f"{key}.layer_idx")
    if layer == "hidden" and isinstance(index, int):
        ours = index - CLIP_LAYERS - 1 if index > 0 else index
        reading.carry(f"{key}.layer_idx", f"model.text_encoder_layer{mark}", ours)
        reading.notice(f"{key}.layer", f"model.text_encoder_layer{mark} says which")
    elif str(layer) in LAYERS:
        reading.carry(f"{key}.layer", f"model.text_encoder_layer{mark}", LAYERS[str(layer)])


def _encoder(reading: Reading, key: str, mark: str) -> None:
    """Which weights: those of the base, or a text encoder of another place."""
    if reading.get(f"{key}.version") == "openai/clip-vit-large-patch14":
        reading.notice(f"{key}.version", OWN)
    reading.carry(f"{key}.version", f"model.text_encoder{mark}")
    if str(reading.get(f"{key}.arch")).startswith("ViT-bigG-14"):
        reading.notice(f"{key}.arch", OWN)
    for name, value in {"always_return_pooled": True, "legacy": False, "require_pretrained": False}.items():
        if f"{key}.{name}" in reading.rest:
            reading.expect(f"{key}.{name}", value, OWN)


def _first_stage(reading: Reading) -> None:
    key = f"{MODEL}.first_stage_config"
    if last(reading.get(f"{key}.target")) in ("AutoencoderKLInferenceWrapper", "AutoencoderKL"):
        reading.notice(f"{key}.target", "the autoencoder of the base (model.vae), frozen")
    for name, value in FIRST_STAGE.items():
        if f"{key}.params.{name}" in reading.rest:
            reading.expect(f"{key}.params.{name}", value, OWN)
    for name in UNUSED:
        reading.notice(f"{key}.params.{name}", OWN)
