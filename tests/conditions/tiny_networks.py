"""Tiny networks with random weights, of the real architectures, in folders as transformers writes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import foreign_controlnets
import torch
from safetensors.torch import save_file
from transformers import (
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    Dinov2Config,
    RTDetrConfig,
    RTDetrForObjectDetection,
    RTDetrResNetConfig,
    VitPoseBackboneConfig,
    VitPoseConfig,
    VitPoseForPoseEstimation,
)

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def _written(folder: Path, make, processor: dict) -> dict[str, str]:
    """Saves a network; the settings that name it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (weights,) = folder.glob("*.safetensors")
    return {"path": str(folder), "digest": hashlib.sha256(weights.read_bytes()).hexdigest()}


def depth(folder: Path) -> dict[str, str]:
    """Depth Anything."""

    def make():
        backbone = Dinov2Config(
            hidden_size=16, num_hidden_layers=4, num_attention_heads=2, image_size=56, patch_size=14,
            out_features=["stage1", "stage2", "stage3", "stage4"], reshape_hidden_states=False, apply_layernorm=True,
        )  # fmt: skip
        numbers = {"neck_hidden_sizes": [4, 4, 8, 8], "fusion_hidden_size": 8, "head_hidden_size": 4}
        return DepthAnythingForDepthEstimation(
            DepthAnythingConfig(backbone_config=backbone, reassemble_hidden_size=16, patch_size=14, **numbers)
        )

    own = {"size": {"height": 56, "width": 56}, "keep_aspect_ratio": True, "ensure_multiple_of": 14, "resample": 3}
    return _written(folder, make, {"image_processor_type": "DPTImageProcessor", **own, **IMAGENET})


def hed(folder: Path, width: int = 4) -> dict[str, str]:
    """ControlNetHED, narrow."""
    tensors, channels = {"norm": torch.full((1, 3, 1, 1), 100.0)}, 3
    for block, layers in enumerate((2, 2, 3, 3, 3), 1):
        for own in (*(f"block{block}.convs.{i}" for i in range(layers)), f"block{block}.projection"):
            shape = (1, channels, 1, 1) if own.endswith("projection") else (width, channels, 3, 3)
            channels = width
            tensors[f"{own}.weight"] = foreign_controlnets.tensor(own, shape) * 1.4
            tensors[f"{own}.bias"] = torch.zeros(shape[0])
    save_file(tensors, folder / "hed.safetensors")
    digest = hashlib.sha256((folder / "hed.safetensors").read_bytes()).hexdigest()
    return {"path": str(folder / "hed.safetensors"), "digest": digest}


def pose(folder: Path) -> dict[str, str]:
    """ViTPose."""

    def make():
        backbone = VitPoseBackboneConfig(
            image_size=[64, 48], patch_size=[16, 16], hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            out_indices=[2],
        )  # fmt: skip
        return VitPoseForPoseEstimation(VitPoseConfig(backbone_config=backbone, num_labels=17))

    return _written(folder, make, {"size": {"height": 64, "width": 48}, **IMAGENET})


def detector(folder: Path) -> dict[str, str]:
    """RT-DETR."""

    def make():
        backbone = RTDetrResNetConfig(
            embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], layer_type="basic",
            out_features=["stage2", "stage3", "stage4"],
        )  # fmt: skip
        width = {"encoder_hidden_dim": 16, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
        width |= {"encoder_in_channels": [8, 8, 8], "decoder_in_channels": [16, 16, 16], "feat_strides": [8, 16, 32]}
        layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        labels = {"id2label": {0: "person", 1: "bicycle"}, "label2id": {"person": 0, "bicycle": 1}}
        config = RTDetrConfig(
            backbone_config=backbone, num_queries=12, num_denoising=0, eval_size=None, **width, **layers, **labels
        )
        return RTDetrForObjectDetection(config)

    return _written(folder, make, {"size": {"height": 64, "width": 64}, "do_normalize": False})


def of_faces(name: str) -> dict[str, str]:
    """A recorded network of the condition faces: `detector` or `recogniser`."""
    path = Path(__file__).parent / f"faces_{name}.onnx"
    return {"path": str(path), "digest": hashlib.sha256(path.read_bytes()).hexdigest()}
