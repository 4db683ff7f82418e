#!/usr/bin/env python3
"""Records ControlNets of other programs for tests/families/stable_diffusion/test_foreign_controlnets.py:
lllyasviel's own code and ComfyUI's; and lllyasviel's HED for tests/conditions/test_networks.py.

    python3 -m venv /tmp/foreign && /tmp/foreign/bin/pip install -e '.[dev]' einops psutil \\
        opencv-python-headless==5.0.0.93
    git clone https://github.com/lllyasviel/ControlNet /tmp/cldm && git -C /tmp/cldm checkout ed85cd1
    git clone https://github.com/comfyanonymous/ComfyUI /tmp/comfyui
    /tmp/foreign/bin/python tools/record_controlnets.py cldm /tmp/cldm EXTRACT_CONTROLNET_DIFF.PY
    /tmp/foreign/bin/python tools/record_controlnets.py comfyui /tmp/comfyui
    /tmp/foreign/bin/python tools/record_controlnets.py hed /tmp/cldm

`cldm`: ControlNet and ControlledUnetModel of cldm/cldm.py, at toy size, with the names under which such a file is
published (`control_model.`), and the names that the webui's extract_controlnet_diff.py leaves of it. `comfyui`:
comfy/cldm/cldm.py as it is made for SDXL, and ComfyUI's table of diffusers' names for it. `hed`: the network and
detector of annotator/hed, in full size.

Weights and inputs are functions of their names (`foreign_controlnets.py` of the tests), so that only names, shapes and
outputs are kept, in tests/models/recorded/. SHA-256 of what was recorded with torch 2.13.0:

    controlnet_cldm.safetensors     0ac1f3ab914dc9b6593819f723702e45253683afed9c0a153b0683c5d9c352d3
    controlnet_hed.safetensors      0a6ec6269ad506669facd09b991c39543161f8f40e3af7f8f65936465b8a0755
    controlnet_comfyui.safetensors  f0dd1460f4f3dbafc04224eb5f604158ca23a559e9548924e58210e7072f7908
"""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support")]

import diffusers  # noqa: E402, F401
import foreign_controlnets as own  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

ABSENT = ("pytorch_lightning", "pytorch_lightning.utilities", "pytorch_lightning.utilities.distributed")
ABSENT += ("pytorch_lightning.utilities.rank_zero", "torchvision", "torchvision.utils")
"""What the code imports for training and grids of images, and is not run here."""


class Absent(ModuleType):
    """A module of which nothing is used."""

    def __getattr__(self, name: str) -> Any:
        """A base class, or a decorator that does nothing."""
        if name.startswith("__"):
            raise AttributeError(name)
        return torch.nn.Module if name == "LightningModule" else lambda function=None, *_, **__: function


def filled(network: torch.nn.Module, prefix: str) -> dict[str, list[int]]:
    """Fills a network by the names of its tensors in a file; their shapes."""
    state = network.state_dict()
    network.load_state_dict({name: own.tensor(prefix + name, value.shape) for name, value in state.items()})
    network.eval()
    return {prefix + name: list(value.shape) for name, value in state.items()}


def write(name: str, outputs: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
    path = own.FOLDER / f"controlnet_{name}.safetensors"
    save_file(outputs, path, {"facts": json.dumps(facts)})
    print(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


@torch.no_grad()
def cldm(folder: str, extract: str) -> None:
    """lllyasviel's networks."""
    sys.path.insert(0, folder)
    sys.modules.update({name: Absent(name) for name in ABSENT})
    from cldm.cldm import ControlledUnetModel, ControlNet

    numbers: dict[str, Any] = {"image_size": 8, "in_channels": 4, "model_channels": 32, "num_res_blocks": 1}
    numbers |= {"attention_resolutions": [1], "channel_mult": [1, 2], "num_heads": 2, "use_spatial_transformer": True}
    numbers |= {"transformer_depth": 1, "context_dim": own.WIDTH, "legacy": False, "use_checkpoint": False}
    control, unet = ControlNet(hint_channels=3, **numbers), ControlledUnetModel(out_channels=4, **numbers)
    shapes = {"controlnet": filled(control, "control_model."), "unet": filled(unet, "model.diffusion_model.")}
    control.load_state_dict(
        {
            name.removeprefix("control_model."): value
            for name, value in own.cldm_controlnet(shapes["controlnet"]).items()
        }
    )
    x, t, text, hint = (own.inputs("sd")[name] for name in ("x", "t", "text", "hint"))
    found = {f"residual.{i}": y.contiguous() for i, y in enumerate(control(x=x, hint=hint, timesteps=t, context=text))}
    residuals = [y.clone() for y in found.values()]
    found["prediction"] = unet(x=x, timesteps=t, context=text, control=residuals).contiguous()
    found["alone"] = unet(x=x, timesteps=t, context=text, control=None).contiguous()
    with TemporaryDirectory() as temporary:
        place = Path(temporary)
        base = {name: own.tensor(name, shape) for name, shape in shapes["unet"].items()}
        save_file(base, place / "base.safetensors")
        save_file(own.cldm_controlnet(shapes["controlnet"]), place / "control.safetensors")
        given = ["--sd15", "base.safetensors", "--control", "control.safetensors", "--dst", "difference.safetensors"]
        sys.argv = [extract, *(str(place / each) if each.endswith("tensors") else each for each in given)]
        runpy.run_path(extract, run_name="__main__")
        difference = {name: list(value.shape) for name, value in load_file(place / "difference.safetensors").items()}
    write("cldm", found, {**shapes, "difference": difference})


@torch.no_grad()
def comfyui(folder: str) -> None:
    """ComfyUI's network for SDXL."""
    sys.argv[1:] = ["--cpu"]
    sys.path.insert(0, folder)
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.cldm.cldm
    import comfy.utils
    from comfy.ldm.modules.diffusionmodules.openaimodel import Timestep

    depths = {"transformer_depth": [0, 2], "transformer_depth_middle": 2}
    numbers: dict[str, Any] = {"image_size": 8, "in_channels": 4, "model_channels": 32, "num_res_blocks": [1, 1]}
    numbers |= {"channel_mult": [1, 2], "num_head_channels": 32, "use_spatial_transformer": True, **depths}
    numbers |= {"context_dim": own.XL_WIDTH, "use_linear_in_transformer": True, "legacy": False}
    numbers |= {"num_classes": "sequential", "adm_in_channels": own.XL_POOLED + 6 * own.XL_SIZE}
    control = comfy.cldm.cldm.ControlNet(hint_channels=3, dtype=torch.float32, **numbers)
    shapes = filled(control, "")
    given = own.inputs("sdxl")
    sizes = torch.cat([Timestep(own.XL_SIZE)(column) for column in given["sizes"].T], dim=1)
    y = torch.cat([given["pooled"], sizes], dim=1)
    made = control(x=given["x"], hint=given["hint"], timesteps=given["t"], context=given["text"], y=y)
    residuals = [*made["output"], *made["middle"]]
    names = comfy.utils.unet_to_diffusers(numbers | depths | {"transformer_depth_output": [0, 0, 2, 2]})
    table = {theirs: original for theirs, original in names.items() if original in shapes}
    outputs = {f"residual.{i}": y.contiguous() for i, y in enumerate(residuals)}
    write("comfyui", outputs, {"controlnet": shapes, "diffusers": table})


@torch.no_grad()
def hed(folder: str) -> None:
    """lllyasviel's soft edges of two images, with the names and shapes of the network."""
    sys.path.insert(0, folder)
    from annotator.hed import ControlNetHED_Apache2, HEDdetector

    network = ControlNetHED_Apache2()
    shapes = {name: list(value.shape) for name, value in network.state_dict().items()}
    network.load_state_dict(own.hed(shapes))
    detector = HEDdetector.__new__(HEDdetector)  # it would download weights, and wants a GPU
    detector.netNetwork = network
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    made = {name: torch.from_numpy(detector(pixels)) for name, pixels in own.photos().items()}
    write("hed", made, {"hed": shapes})


if __name__ == "__main__":
    {"cldm": cldm, "comfyui": comfyui, "hed": hed}[sys.argv[1]](*sys.argv[2:])
