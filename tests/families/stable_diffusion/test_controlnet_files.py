"""Files of ControlNets: every layout gives the same network, diffusers reads ours, and what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from diffusers.loaders.single_file_utils import convert_controlnet_checkpoint
from quick_cases import quick_first, quick_where
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import SDXL_UNET, TEXT_WIDTH, TINY_UNET
from torch import Tensor

from daguerre.errors import UserError
from daguerre.families.stable_diffusion import controlnet, controlnet_files
from daguerre.families.stable_diffusion.controlnet_files import Base
from daguerre.families.stable_diffusion.single_file import keys
from daguerre.models.controlnets import controlled, places
from daguerre.models.export.about import About

ARCHITECTURES = Path(__file__).parents[3] / "src" / "daguerre" / "architectures"
NUMBERS = {"sd": TINY_UNET | {"cross_attention_dim": TEXT_WIDTH}, "sdxl": SDXL_UNET}
EIGHT = (16, 32, 96, 256)


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    return make()


CASES: tuple[tuple[str, controlled.Size], ...] = (("sd", "large"), ("sdxl", "mid"), ("sdxl", "small"))


@pytest.fixture(scope="module", params=[*CASES[::2], pytest.param(CASES[1], marks=pytest.mark.long)], ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, controlled.Size]:
    found: tuple[str, controlled.Size] = request.param
    return found


REQUIRED = ("sai_model_spec", "architecture", "implementation", "title", "resolution")


@pytest.fixture(scope="module")
def base(case: tuple[str, controlled.Size]) -> Base:
    return Base(seeded(lambda: UNet2DConditionModel(**NUMBERS[case[0]])), 8)


@pytest.fixture(scope="module")
def network(base: Base, case: tuple[str, controlled.Size]) -> ControlNetModel:
    """Every weight is another one, zeros among them."""
    made = seeded(lambda: ControlNetModel(**controlnet.numbers(base.unet, EIGHT, case[1])))
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return made


@pytest.fixture(scope="module")
def written(network: ControlNetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("controlnet")
    controlnet_files.write(folder, network, About(size_px=(64, 64)))
    return folder


def same(found: Any, network: ControlNetModel) -> bool:
    own, theirs = network.state_dict(), found.state_dict()
    return own.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in own.items())


def test_diffusers_reads_the_folder(written, network):
    assert same(ControlNetModel.from_pretrained(written, low_cpu_mem_usage=False), network)


def test_the_header_names_the_model(written, case):
    architecture = "stable-diffusion-xl-v1-base" if case[0] == "sdxl" else "stable-diffusion-v1"
    for file in written.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        assert metadata["modelspec.architecture"] == f"{architecture}/controlnet"
        assert metadata.keys() >= {f"modelspec.{key}" for key in REQUIRED}


@pytest.mark.long
def test_every_layout_gives_the_same_network(written, network, base, tmp_path):
    original = load_file(written / places.SINGLE_FILE)
    plain = {name.removeprefix("control_model."): value for name, value in original.items()}
    save_file(plain, tmp_path / "plain.safetensors")
    save_file(original | {"model.diffusion_model.out.0.weight": torch.ones(3)}, tmp_path / "beside.safetensors")
    unet = base.unet.state_dict()
    links = {link.original: link.names[0] for link in keys.controlnet(network.state_dict())}
    differences = {name: value - unet[links[name]] if links[name] in unet else value for name, value in plain.items()}
    save_file(differences | {"difference": torch.ones(1)}, tmp_path / "difference.safetensors")
    shutil.copytree(written, tmp_path / "run" / "adapter")
    (tmp_path / "run" / "config.yaml").touch()
    equal = [
        *(written, written / places.SINGLE_FILE, written / "diffusion_pytorch_model.safetensors"),
        *(tmp_path / "plain.safetensors", tmp_path / "beside.safetensors", tmp_path / "run"),
    ]
    for place in equal:
        assert same(controlnet_files.read(str(place), base), network), place
    summed = controlnet_files.read(str(tmp_path / "difference.safetensors"), base).state_dict()
    for name, value in network.state_dict().items():
        torch.testing.assert_close(summed[name], value, rtol=0, atol=1e-6)


COUNTS = {"sd1": (361_279_120, 340), "sd21": (364_228_240, 340), "sdxl": (1_251_014_160, 844)}
"""Parameters and tensors."""
SIZES = {"mid": 272_586_000, "small": 160_111_120}
"""Parameters of SDXL's, as diffusers/controlnet-canny-sdxl-1.0-mid and -small have them."""


def unet_of(name: str) -> Any:
    config = json.loads((ARCHITECTURES / name / "unet" / "config.json").read_text())
    with torch.device("meta"):
        return UNet2DConditionModel.from_config(config)


@pytest.mark.parametrize("name", quick_where(lambda name: name != "sdxl", COUNTS))
def test_numbers_and_names_are_those_of_diffusers(name):
    """Of the networks that people have, by shapes alone. diffusers' converter lacks SDXL's embeddings of sizes."""
    unet = unet_of(name)
    with torch.device("meta"):
        network = ControlNetModel(**controlnet.numbers(unet, EIGHT))
        theirs = ControlNetModel.from_unet(unet)
    assert {key: v for key, v in network.config.items() if key[0] != "_"} == {
        key: v for key, v in theirs.config.items() if key[0] != "_"
    }
    shapes = {key: value.shape for key, value in network.state_dict().items()}
    assert shapes == {key: value.shape for key, value in theirs.state_dict().items()}
    assert (sum(shape.numel() for shape in shapes.values()), len(shapes)) == COUNTS[name]

    links = keys.controlnet(shapes)
    named = {link.original: link.names[0] for link in links}
    assert len(named) == len(links)
    assert {"input_hint_block.0.weight", "input_hint_block.14.bias", "middle_block_out.0.weight"} <= named.keys()
    numbers = {"layers_per_block": 2, "conditioning_embedding_out_channels": EIGHT}
    converted = convert_controlnet_checkpoint(dict(named), numbers)
    assert converted == {key: key for key in shapes if not key.startswith("add_embedding.")}
    if name == "sdxl":
        assert named["label_emb.0.2.weight"] == "add_embedding.linear_2.weight"


@pytest.mark.parametrize("size", quick_first(SIZES))
def test_sizes_of_sdxl(size):
    unet = unet_of("sdxl")
    with torch.device("meta"):
        network = ControlNetModel(**controlnet.numbers(unet, EIGHT, size))
    names = network.state_dict().keys()
    assert sum(p.numel() for p in network.parameters()) == SIZES[size]
    assert "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_k.weight" not in names
    assert ("down_blocks.1.attentions.0.norm.weight" in names) == (size == "mid")
    assert {name for name in names if controlnet.shared(name)} <= unet.state_dict().keys()


def test_the_embedding_halves_as_often_as_the_autoencoder():
    assert controlnet.embedding_channels(8) == EIGHT
    assert controlnet.embedding_channels(4) == EIGHT[:3]
    assert controlnet.embedding_channels(1) == EIGHT[:1]
    assert controlnet.embedding_channels(16) == (*EIGHT, 256)
    with pytest.raises(UserError, match="power of two"):
        controlnet.embedding_channels(6)


Change = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
CHANGES: dict[str, tuple[Change, str]] = {
    "Control-LoRA": (lambda own: own | {"lora_controlnet": torch.ones(1)}, "Control-LoRA"),
    "Control-LoRA's factors": (lambda own: {"input_blocks.0.0.up": torch.ones(1)}, "Control-LoRA"),
    "union": (lambda own: own | {"task_embedding": torch.ones(1)}, "a union ControlNet"),
    "T2I-adapter": (lambda own: {"adapter.body.0.in_conv.weight": torch.ones(1)}, "a T2I-adapter"),
    "LoRA": (lambda own: {"lora_unet_mid_block.lora_down.weight": torch.ones(1)}, "is a LoRA"),
    "Flux": (lambda own: {"controlnet_x_embedder.weight": torch.ones(1)}, "Flux or SD3"),
    "base model": (lambda own: {"model.diffusion_model.out.2.bias": torch.ones(1)}, "a base model"),
    "something else": (lambda own: {"decoder.weight": torch.ones(1)}, "no ControlNet: it has tensors such as decoder"),
    "NaN": (lambda own: own | {"control_model.zero_convs.0.0.bias": torch.full((32,), torch.nan)}, "NaN"),
    "hint of 4 channels": (
        lambda own: own | {"control_model.input_hint_block.0.weight": torch.zeros(16, 4, 3, 3)},
        "another model.*input_hint_block.0.weight",
    ),
    "another autoencoder": (
        lambda own: {name: v for name, v in own.items() if ".input_hint_block.12." not in name and ".14." not in name},
        "shrinks pictures by 4",
    ),
    "a tensor less": (
        lambda own: {name: v for name, v in own.items() if name != "control_model.middle_block_out.0.bias"},
        "middle_block_out.0.bias",
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Base, Path]:
    """A Stable Diffusion UNet, and the export of a ControlNet of it."""
    base = Base(seeded(lambda: UNet2DConditionModel(**NUMBERS["sd"])), 8)
    folder = tmp_path_factory.mktemp("tiny")
    controlnet_files.write(folder, seeded(lambda: ControlNetModel.from_unet(base.unet)))
    return base, folder


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_file_that_is_none_is_refused_by_name(name, tiny, tmp_path):
    base, folder = tiny
    change, message = CHANGES[name]
    path = tmp_path / "other.safetensors"
    save_file(dict(change(load_file(folder / places.SINGLE_FILE))), path)
    with pytest.raises(UserError, match=message):
        controlnet_files.read(str(path), base)


def test_places_that_cannot_be_read_are_refused(tiny, tmp_path):
    base, folder = tiny
    whole = (folder / places.SINGLE_FILE).read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    for name in ("run", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    for place, message in {
        "run": "run holds no ControlNet: this run has trained none",
        "empty": "empty holds no ControlNet: it has no config.json of one",
        "cut.safetensors": "cannot be read as safetensors",
        "absent.safetensors": "there is no file",
        "old.pth": "can run code",
        "nowhere": "there is no folder",
    }.items():
        with pytest.raises(UserError, match=message):
            controlnet_files.read(str(tmp_path / place), base)
    shutil.copytree(folder, tmp_path / "cut")
    weights = tmp_path / "cut" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:10_000])
    with pytest.raises(UserError, match=r"truncated|cannot be read"):
        controlnet_files.read(str(tmp_path / "cut"), base)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "ControlNetUnionModel"}, "a union ControlNet"),
        ({"_class_name": "T2IAdapter"}, "a T2I-adapter"),
        ({"_class_name": "FluxControlNetModel"}, "is a FluxControlNetModel"),
        ({"conditioning_channels": 4}, "4 channels"),
        ({"conditioning_embedding_out_channels": [16, 32, 96]}, "shrinks pictures by 4"),
        ({"cross_attention_dim": 768}, "its cross_attention_dim is 768"),
        ({"addition_embed_type": "text_time"}, "for SDXL"),
    ],
)
def test_a_folder_of_another_network_is_refused(change, message, tiny, tmp_path):
    """Its config tells; weights that do not fit to a config that does are refused too."""
    base, folder = tiny
    shutil.copytree(folder, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message):
        controlnet_files.read(str(tmp_path / "other"), base)


def test_a_controlnet_of_sd_is_refused_beside_sdxl(tiny):
    _, folder = tiny
    sdxl = Base(seeded(lambda: UNet2DConditionModel(**SDXL_UNET)), 8)
    with pytest.raises(UserError, match=r"for Stable Diffusion 1.x or 2.x, and this model is SDXL"):
        controlnet_files.read(str(folder), sdxl)
    with pytest.raises(UserError, match=r"another model .Stable Diffusion 1.x or 2.x"):
        controlnet_files.read(str(folder / places.SINGLE_FILE), sdxl)
