"""Headers of LoRAs: kohya's keys and hashes by the formulas of its own code, and Stability's modelspec."""

from __future__ import annotations

import hashlib
import io
import json
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import tiny_families
import torch
from diffusers import UNet2DConditionModel
from PIL import Image
from safetensors import safe_open
from test_lora_files import KOHYA, networks, opened
from tiny_models import SDXL_UNET, TINY_UNET, tiny_sd_folder
from torch import nn

from daguerre.models.export.about import UNKNOWN, About
from daguerre.models.lora_files import forms, header
from daguerre.models.lora_files.addition import DOWN, UP, Addition

LAYER = KOHYA.removeprefix("lora_unet_")
ABOUT = About(
    title="my-dog",
    base={
        "unet": {"place": "/home/someone/models/sd15", "digest": "ab"},
        "vae": {"place": "owner/name", "digest": "cd"},
    },
    step=1200,
    epoch=3.7,
    size_px=(512, 768),
    trigger_phrase="a photo of sks dog",
    prediction="eps",
    tags={"dogs": {"a dog": 7, "grass": 2}},
)
REQUIRED = ("sai_model_spec", "architecture", "implementation", "title")


def unet(**numbers: object) -> dict[str, nn.Module]:
    with torch.device("meta"):
        return {"unet": UNet2DConditionModel(**{**TINY_UNET, **numbers})}


def addition(rank: int = 4) -> Addition:
    generator = torch.Generator().manual_seed(0)
    down, up = torch.randn(rank, 32, generator=generator), torch.randn(32, rank, generator=generator)
    return Addition("down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q", {DOWN: down, UP: up}, 0.5)


def of_file(form: forms.Form, folder: Path, about: About) -> dict[str, str]:
    plain = networks(opened(tiny_sd_folder(folder / "base")))
    forms.write(form, folder / "x.safetensors", plain, {"unet": [addition()]}, about)
    with safe_open(folder / "x.safetensors", "pt") as file:
        return file.metadata()


def test_kohyas_file(tmp_path):
    found = of_file("kohya", tmp_path, ABOUT)
    expected = {
        "ss_network_module": "networks.lora", "ss_network_dim": "4", "ss_network_alpha": "2.0", "ss_v2": "False",
        "ss_network_args": "{}", "ss_base_model_version": "sd_v1", "ss_output_name": "my-dog", "ss_epoch": "3",
        "ss_sd_model_name": "sd15", "ss_resolution": "(768, 512)", "ss_steps": "1200",
        "modelspec.sai_model_spec": "1.0.1", "modelspec.architecture": "stable-diffusion-v1/lora",
        "modelspec.title": "my-dog", "modelspec.resolution": "768x512", "modelspec.prediction_type": "epsilon",
        "modelspec.trigger_phrase": "a photo of sks dog",
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected
    assert json.loads(found["ss_tag_frequency"]) == ABOUT.tags
    assert not {"modelspec.thumbnail", "ss_sd_model_hash", "ss_new_sd_model_hash"} & found.keys(), "nothing is known"
    assert json.loads(found["daguerre.base"])["unet"] == {"place": "sd15", "digest": "ab"}, "no folder of this machine"
    assert json.loads(found["daguerre.base"])["vae"]["place"] == "owner/name"


def test_the_rank_is_that_of_the_layers_that_have_one():
    """A Kronecker product of two whole matrices has none."""
    whole = Addition(LAYER, {"lokr_w1": torch.ones(2, 2), "lokr_w2": torch.ones(16, 16)}, 1.0)
    one = replace(
        whole, factors={"lokr_w1": torch.ones(2, 2), "lokr_w2_a": torch.ones(16, 4), "lokr_w2_b": torch.ones(4, 16)}
    )
    two = replace(one, factors={**one.factors, "lokr_w2_a": torch.ones(16, 2), "lokr_w2_b": torch.ones(2, 16)})
    for main, dim in (([whole], None), ([whole, one], "4"), ([one, two], "Dynamic")):
        assert header.kohya(unet(), main, 1.0, UNKNOWN).get("ss_network_dim") == dim


@pytest.mark.parametrize("form", ["kohya", "diffusers"])
def test_what_the_spec_requires_and_is_known_is_there_of_files_that_no_run_has_made(form, tmp_path):
    found = of_file(form, tmp_path, UNKNOWN)
    assert all(found[f"modelspec.{name}"] for name in REQUIRED)
    assert not {"modelspec.resolution", "ss_resolution"} & found.keys(), "nobody knows the size of the images"
    data = (tmp_path / "x.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert found["modelspec.hash_sha256"] == f"0x{hashlib.sha256(data[start:]).hexdigest()}"
    assert not any(name.startswith("ss_") for name in found) or form == "kohya"


@pytest.mark.parametrize(
    ("numbers", "prediction", "said", "version"),
    [
        ({"cross_attention_dim": 768}, "eps", "stable-diffusion-v1", "sd_v1"),
        ({"cross_attention_dim": 1024}, "eps", "stable-diffusion-v2-512", "sd_v2"),
        ({"cross_attention_dim": 1024}, "v", "stable-diffusion-v2-768-v", "sd_v2"),
        (SDXL_UNET, "eps", "stable-diffusion-xl-v1-base", "sdxl_base_v1-0"),
    ],
)
def test_the_architecture(numbers, prediction, said, version):
    made = unet(**numbers)
    assert header.modelspec(made, About(prediction=prediction))["modelspec.architecture"] == f"{said}/lora"
    assert header.kohya(made, [addition()], 1.0, UNKNOWN)["ss_base_model_version"] == version


@pytest.mark.parametrize(
    ("name", "numbers", "said"),
    [("dit", {}, "dit"), ("qwen_image_edit", {"zero_cond_t": False}, "qwen-image-edit"), ("flux2", {}, "")],
)
def test_of_families_with_one_class_each_has_its_own_name_also_in_what_is_converted(name, numbers, said, tmp_path):
    """Of 2509 the transformer is Qwen-Image's, and dit's is FLUX.2's, of which no published one is this small."""
    family = tiny_families.load(name, tmp_path)
    for key, value in numbers.items():
        family.components["transformer"].register_to_config(**{key: value})
    about = About(architecture=family.architecture("flow"), size_px=(64, 64))
    written = header.kohya(family.components, [addition()], 1.0, about) | header.modelspec(family.components, about)
    assert header.architecture(written) == said
    of_diffusers = header.modelspec(family.components, about)
    again = header.about(of_diffusers, "x")
    converted = header.kohya(family.components, [addition()], 1.0, again) | header.modelspec(family.components, again)
    assert header.architecture(converted) == said
    assert converted.get("ss_base_model_version") == written.get("ss_base_model_version")
    assert ("ss_base_model_version" in written) == (name == "qwen_image_edit")


def test_a_base_of_one_file_has_the_hashes_of_sd_scripts(tmp_path):
    content = bytes(range(256)) * 0x1200
    (tmp_path / "base.safetensors").write_bytes(content)
    about = About(base={"unet": {"place": str(tmp_path / "base.safetensors"), "digest": "ab"}})
    for _ in range(2):  # the second time from what is remembered
        found = header.kohya(unet(), [addition()], 1.0, about)
        assert found["ss_sd_model_name"] == "base.safetensors"
        assert found["ss_sd_model_hash"] == hashlib.sha256(content[0x100000:0x110000]).hexdigest()[:8]
        assert found["ss_new_sd_model_hash"] == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(("size", "expected"), [((800, 400), (256, 128)), ((20, 30), (20, 30))])
def test_the_thumbnail_is_a_small_jpeg_of_the_first_image(size, expected, tmp_path):
    Image.new("RGBA", size, (200, 40, 40, 255)).save(tmp_path / "000.png")
    found = header.modelspec(unet(), About(image=tmp_path / "000.png"))["modelspec.thumbnail"]
    kind, _, data = found.partition(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(b64decode(data))) as opened:
        assert (opened.format, opened.size) == ("JPEG", expected)
        assert np.abs(np.asarray(opened).astype(int).mean((0, 1)) - (200, 40, 40)).max() < 4


def test_the_hashes_are_those_of_sd_scripts():
    """By its formulas, of a file by safetensors itself with `ss_*` alone in its header, of more than 0x110000 bytes."""
    generator = torch.Generator().manual_seed(1)
    tensors = {f"{name}.lora_down.weight": torch.randn(300, 300, generator=generator) for name in "abcd"}
    metadata = {"ss_output_name": "Hündchen", "ss_network_dim": "4", "modelspec.title": "x" * 3000}
    file = io.BytesIO(safetensors.torch.save(tensors, {k: v for k, v in metadata.items() if k.startswith("ss_")}))
    file.seek(8 + int.from_bytes(file.read(8), "little"))
    whole = hashlib.sha256(file.read()).hexdigest()
    file.seek(0x100000)
    legacy = hashlib.sha256(file.read(0x10000)).hexdigest()[:8]
    found = header.hashes(tensors, metadata)
    assert found == {
        "sshs_model_hash": whole, "sshs_legacy_hash": legacy, "modelspec.hash_sha256": f"0x{whole}"
    }  # fmt: skip
