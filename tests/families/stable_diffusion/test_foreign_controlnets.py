"""ControlNets as other programs make them: our import gives the outputs that these programs were seen to give."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import foreign_controlnets as foreign
import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from tiny_models import SDXL_UNET, TINY_UNET
from torch import Tensor

from daguerre.errors import UserError
from daguerre.families.stable_diffusion import controlnet, controlnet_files
from daguerre.families.stable_diffusion.controlnet_files import Base
from daguerre.families.stable_diffusion.single_file import keys

DIGESTS = {
    "cldm": "0ac1f3ab914dc9b6593819f723702e45253683afed9c0a153b0683c5d9c352d3",
    "hed": "0a6ec6269ad506669facd09b991c39543161f8f40e3af7f8f65936465b8a0755",
    "comfyui": "f0dd1460f4f3dbafc04224eb5f604158ca23a559e9548924e58210e7072f7908",
}
GROUPS = {"norm_num_groups": 32}
"""As the original code has them, whatever the width."""


def base(numbers: dict[str, Any], prefix: str) -> Base:
    """A base model with the weights of the names of its original layout."""
    unet = UNet2DConditionModel(**numbers)
    shapes = {name: value.shape for name, value in unet.state_dict().items()}
    links = keys.unet(shapes)
    unet.load_state_dict(
        {link.names[0]: foreign.tensor(prefix + link.original, shapes[link.names[0]]) for link in links}
    )
    return Base(unet.eval(), 8)


@pytest.fixture(scope="module")
def sd() -> Base:
    return base(TINY_UNET | GROUPS | {"cross_attention_dim": foreign.WIDTH}, "model.diffusion_model.")


@torch.no_grad()
def residuals(network: Any, kind: str) -> list[Tensor]:
    """Those of the down blocks, and last that of the middle block."""
    given = foreign.inputs(kind)
    added = {"text_embeds": given["pooled"], "time_ids": given["sizes"]} if kind == "sdxl" else None
    down, middle = network.eval()(
        *(given["x"], given["t"], given["text"], given["hint"]), added_cond_kwargs=added, return_dict=False
    )
    return [*down, middle]


def apart(found: list[Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the largest number, of the worst residual."""
    every = [expected[f"residual.{i}"] for i in range(len(found))]
    assert f"residual.{len(found)}" not in expected
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, every, strict=True))


@pytest.mark.parametrize("name", list(DIGESTS))
def test_what_was_recorded_is_what_was_recorded(name: str) -> None:
    path = foreign.FOLDER / f"controlnet_{name}.safetensors"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == DIGESTS[name]


def test_a_file_of_cldm_controls_as_it_does_there(sd: Base, tmp_path: Path) -> None:
    outputs, facts = foreign.recorded("cldm")
    tensors = foreign.cldm_controlnet(facts["controlnet"])
    names = ["model.diffusion_model." + link.original for link in keys.unet(sd.unet.state_dict())]
    assert sorted(names) == sorted(facts["unet"]), "the base model is named as there, too"
    for file in (tensors, tensors | {name: foreign.tensor(name, shape) for name, shape in facts["unet"].items()}):
        save_file(file, tmp_path / "control.safetensors")  # alone, and with the base as control_sd15_canny.pth has it
        network = controlnet_files.read(str(tmp_path / "control.safetensors"), sd)
        found = residuals(network, "sd")
        assert apart(found, outputs) < 1e-5
    given = foreign.inputs("sd")
    with torch.no_grad():
        alone = sd.unet(given["x"], given["t"], given["text"]).sample
        both = {"down_block_additional_residuals": found[:-1], "mid_block_additional_residual": found[-1]}
        prediction = sd.unet(given["x"], given["t"], given["text"], **both).sample
    assert (alone - outputs["alone"]).abs().max() < 1e-5 * outputs["alone"].abs().max()
    assert (prediction - outputs["prediction"]).abs().max() < 1e-5 * outputs["prediction"].abs().max()
    assert (prediction - alone).abs().max() > 0.1 * alone.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_difference_of_the_webui_is_added_to_the_base(dtype: torch.dtype, sd: Base, tmp_path: Path) -> None:
    """It leaves out what training did not change, which is the base's."""
    outputs, facts = foreign.recorded("cldm")
    assert {f"control_model.{name}" for name in foreign.UNTRAINED} == facts["controlnet"].keys() - facts["difference"]
    whole = foreign.cldm_controlnet(facts["controlnet"])
    shared = {name.replace("model.diffusion_model.", "control_model."): name for name in facts["unet"]}
    tensors = {
        name: whole[name] - foreign.tensor(shared[name], shape) if name in shared else whole[name]
        for name, shape in facts["difference"].items()
        if name != "difference"
    }
    tensors = {name: value.to(dtype) for name, value in (tensors | {"difference": torch.tensor(1.0)}).items()}
    save_file(tensors, tmp_path / "difference.safetensors")
    network = controlnet_files.read(str(tmp_path / "difference.safetensors"), sd)
    assert apart(residuals(network, "sd"), outputs) < (1e-5 if dtype == torch.float32 else 5e-3)


def test_comfyuis_network_for_sdxl_under_both_names(tmp_path: Path) -> None:
    outputs, facts = foreign.recorded("comfyui")
    sdxl = base(SDXL_UNET | GROUPS, "")
    tensors = {name: foreign.tensor(name, shape) for name, shape in facts["controlnet"].items()}
    network = controlnet_files.read(written(tensors, tmp_path / "original.safetensors"), sdxl)
    assert apart(residuals(network, "sdxl"), outputs) < 1e-5
    links = {link.original: link.names[0] for link in keys.controlnet(network.state_dict())}
    assert sorted(links) == sorted(facts["controlnet"])
    table = {theirs: name for theirs, name in facts["diffusers"].items() if not theirs.startswith("class_embedding.")}
    assert {theirs: name for name, theirs in links.items() if controlnet.shared(theirs)} == table
    renamed = {links[name]: value for name, value in tensors.items()}
    again = controlnet_files.read(written(renamed, tmp_path / "diffusers.safetensors"), sdxl)
    assert apart(residuals(again, "sdxl"), outputs) < 1e-5


def test_a_file_that_diffusers_writes_in_half_precision(sd: Base, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = ControlNetModel.from_unet(sd.unet)
    network.half().save_pretrained(tmp_path, variant="fp16")
    read = controlnet_files.read(str(tmp_path / "diffusion_pytorch_model.fp16.safetensors"), sd)
    expected = network.float().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in read.state_dict().items())
    folder = controlnet_files.read(str(tmp_path), sd)
    assert all(torch.equal(value, expected[name]) for name, value in folder.state_dict().items())


@pytest.mark.parametrize("form", ["file", "folder"])
def test_tensors_that_are_not_known_are_left_out_by_patterns(form: str, sd: Base, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = ControlNetModel.from_unet(sd.unet)
    network.save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    written({**load_file(path), "conv_in.weight_scale": torch.tensor(3.0)}, path)
    place = str(path if form == "file" else tmp_path)
    with pytest.raises(UserError, match=r"conv_in\.weight_scale"):
        controlnet_files.read(place, sd)
    read = controlnet_files.read(place, sd._replace(ignored=("*.weight_scale",)))
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in read.state_dict().items())


def written(tensors: dict[str, Tensor], path: Path) -> str:
    save_file(tensors, path)
    return str(path)
