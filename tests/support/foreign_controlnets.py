"""ControlNets that other programs make (`tools/record_controlnets.py`): names, shapes and outputs are theirs, weights
and inputs are functions of the names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

FOLDER = Path(__file__).resolve().parents[1] / "models" / "recorded"
WIDTH = 48
XL_WIDTH, XL_POOLED, XL_SIZE = 112, 40, 8
UNTRAINED = ("input_blocks.0.0.weight", "time_embed.2.bias")
"""Tensors of the ControlNet of which a difference is made that are the base model's."""
PX = 64


def tensor(name: str, shape: Iterable[int]) -> Tensor:
    """A weight of this name in a file."""
    shape = tuple(shape)
    normal = np.random.default_rng(crc32(name.encode())).standard_normal(shape)
    if len(shape) > 1:
        normal /= np.sqrt(np.prod(shape[1:]))
    elif name.endswith("weight"):
        normal = 1 + 0.1 * normal
    else:
        normal *= 0.1
    return torch.from_numpy(normal.astype(np.float32))


def cldm_controlnet(shapes: Mapping[str, Iterable[int]]) -> dict[str, Tensor]:
    """A file of lllyasviel's layout, in which UNTRAINED are as in the base model's file."""
    whole = {name: tensor(name, shape) for name, shape in shapes.items()}
    for name in UNTRAINED:
        own = f"control_model.{name}"
        whole[own] = tensor(f"model.diffusion_model.{name}", shapes[own])
    return whole


def inputs(kind: str) -> dict[str, Tensor]:
    """Two latents, times, texts and pictures; for sdxl also pooled texts and sizes."""
    noise = np.random.default_rng(0)

    def normals(*shape: int) -> Tensor:
        return torch.from_numpy(noise.standard_normal(shape).astype(np.float32))

    found = {"x": normals(2, 4, 8, 8), "t": torch.tensor([7, 801])}
    found["hint"] = torch.from_numpy(noise.random((2, 3, PX, PX)).astype(np.float32))
    found["text"] = normals(2, 5, WIDTH if kind == "sd" else XL_WIDTH)
    if kind == "sdxl":
        found["pooled"] = normals(2, XL_POOLED)
        found["sizes"] = torch.tensor([[64, 64, 0, 0, 64, 64], [90, 70, 3, 1, 64, 64]], dtype=torch.float32)
    return found


def hed(shapes: Mapping[str, Iterable[int]]) -> dict[str, Tensor]:
    """Weights of HED by their names, of a size at which the maps of all blocks are seen."""
    found = {name: tensor(name, shape) for name, shape in shapes.items()}
    for name, value in found.items():
        block = int(name[5]) if name.startswith("block") else 0
        value *= 100 if not block else 0.006 * 1.6**block if name.endswith("projection.weight") else 1.4
    return found


def photos() -> dict[str, np.ndarray]:
    """Two images [H, W, 3] uint8, of sides that do not halve evenly."""
    found = {}
    for name, (height, width) in {"small": (37, 53), "large": (96, 80)}.items():
        y, x = np.mgrid[0:height, 0:width]
        waves = [np.sin(x / 5 + k) + np.cos(y / 7 - k) + ((x // 16 + y // 16) % 2) for k in range(3)]
        found[name] = (np.stack(waves, axis=2) * 50 + 100).clip(0, 255).astype(np.uint8)
    return found


def recorded(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Outputs and facts that a program left."""
    with safe_open(FOLDER / f"controlnet_{name}.safetensors", "pt") as file:
        facts: dict[str, Any] = json.loads(file.metadata()["facts"])
        return {key: file.get_tensor(key) for key in file.keys()}, facts  # noqa: SIM118
