"""Files of LoRAs that this and other programs write: read in full with their strength, or refused."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tiny_models import tiny_sd_folder, write_sdxl
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.models.lora_files.read import read


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sd_folder(tmp_path_factory.mktemp("sd"))


def opened(base: Path) -> StableDiffusionPipeline:
    return StableDiffusionPipeline.from_pretrained(base, local_files_only=True)


def networks(pipe: StableDiffusionPipeline) -> dict[str, nn.Module]:
    return {name: getattr(pipe, name) for name in ("unet", "text_encoder", "vae")}


RANK, ALPHA = 4, 6.0


@pytest.fixture(scope="module")
def theirs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files by diffusers and peft themselves: with alpha in the header, without header, and in older names."""
    folder = tmp_path_factory.mktemp("files")
    pipe, generator = opened(base), torch.Generator().manual_seed(0)
    for name, targets in (("unet", ["to_q", "to_v", "conv1"]), ("text_encoder", ["q_proj", "fc1"])):
        getattr(pipe, name).add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets))
    tensors: dict[str, Tensor] = {}
    from peft import get_peft_model_state_dict

    states = {}
    for name in ("unet", "text_encoder"):
        network = getattr(pipe, name)
        with torch.no_grad():
            for parameter, p in network.named_parameters():
                if "lora_" in parameter:
                    p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
        states[name] = get_peft_model_state_dict(network)
        tensors |= {f"{name}.{key}": value for key, value in states[name].items()}
    pipe.save_lora_weights(
        folder / "whole",
        unet_lora_layers=states["unet"],
        text_encoder_lora_layers=states["text_encoder"],
        unet_lora_adapter_metadata=pipe.unet.peft_config["default"].to_dict(),
        text_encoder_lora_adapter_metadata=pipe.text_encoder.peft_config["default"].to_dict(),
    )
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "bare.safetensors")
    older = {
        key.replace(".lora_A.weight", f"{ending}.down.weight").replace(".lora_B.weight", f"{ending}.up.weight"): value
        for key, value in tensors.items()
        for ending in [".lora" if key.startswith("unet.") else ".lora_linear_layer"]
    }
    save_file(older, folder / "older.safetensors")
    whole = folder / "whole" / "pytorch_lora_weights.safetensors"
    return {"whole": whole, "bare": folder / "bare.safetensors", "older": folder / "older.safetensors"}


@pytest.mark.parametrize("name", ["whole", "bare", "older"])
def test_diffusers_files_are_applied_as_diffusers_applies_them(name, theirs, base):
    """Without a header alpha is the rank."""
    pipe, plain = opened(base), opened(base)
    pipe.load_lora_weights(theirs[name].parent, weight_name=theirs[name].name)
    pipe.fuse_lora()
    counted = 0
    for component, additions in read(theirs[name], networks(plain)).items():
        for each in additions:
            before = getattr(plain, component).get_submodule(each.layer).weight.detach()
            expected = getattr(pipe, component).get_submodule(each.layer).base_layer.weight.detach()
            found = each.weight(before)
            assert each.scale == (ALPHA / RANK if name == "whole" else 1)
            assert (found - expected).abs().max() <= 1e-6 * (expected - before).abs().max() + 1e-7
            counted += 1
    assert counted == len(load_file(theirs[name])) / 2


def changed(source: Path, target: Path, change) -> Path:
    save_file(change(load_file(source)), target)
    return target


def first(tensors: dict[str, Tensor], ending: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(ending))


def with_nan(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors[first(tensors, "lora_A.weight")][0, 0] = float("nan")
    return tensors


def without_up(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    del tensors[first(tensors, "lora_B.weight")]
    return tensors


def of_another_width(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors[first(tensors, "lora_A.weight")] = torch.zeros(RANK, 7)
    return tensors


def misspelt(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace(".to_q.", ".to_qq."): value for name, value in tensors.items()}


def with_lengths(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "lora_unet_mid_block_attentions_0_proj_in.dora_scale": torch.ones(1)}


def with_more(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "unet.conv_in.bias": torch.ones(1)}


WRONG = {
    "NaN": (with_nan, "has NaN or infinity in it"),
    "a factor is missing": (without_up, "parts are missing"),
    "another width": (of_another_width, r"was made for another model: text_encoder\..* is \(64, 48\) here"),
    "a layer that is not there": (misspelt, "the nearest are unet."),
    "DoRA of LyCORIS": (with_lengths, "divides by the norms of other rows"),
    "a tensor that is no LoRA's": (with_more, "is no part of a LoRA"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_applied_in_full_is_refused(name, theirs, base, tmp_path):
    change, said = WRONG[name]
    with pytest.raises(UserError, match=said):
        read(changed(theirs["bare"], tmp_path / "x.safetensors", change), networks(opened(base)))


def test_files_that_are_none(theirs, base, tmp_path):
    whole = theirs["bare"].read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "x.pt").write_bytes(whole)
    (tmp_path / "empty").mkdir()
    save_file({}, tmp_path / "none.safetensors")
    for name, said in (
        ("cut.safetensors", "cannot be read"),
        ("x.pt", "can run code"),
        ("empty", "holds no LoRA"),
        ("there-is-none", "no such file"),
        ("none.safetensors", "no additions"),
    ):
        with pytest.raises(UserError, match=said):
            read(tmp_path / name, networks(opened(base)))


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_header_that_is_none(text, theirs, base, tmp_path):
    save_file(load_file(theirs["bare"]), tmp_path / "x.safetensors", {"lora_adapter_metadata": text})
    with pytest.raises(UserError, match="in its header is not a JSON object"):
        read(tmp_path / "x.safetensors", networks(opened(base)))


def test_a_file_for_another_family_is_refused(theirs, tmp_path):
    from diffusers import StableDiffusionXLPipeline

    write_sdxl(tmp_path / "sdxl")
    pipe = StableDiffusionXLPipeline.from_pretrained(tmp_path / "sdxl")
    components = {name: getattr(pipe, name) for name in ("unet", "text_encoder", "text_encoder_2")}
    with pytest.raises(UserError, match="was made for another model"):
        read(theirs["bare"], components)


def test_patterns_of_the_header_are_followed(base, theirs, tmp_path):
    """As peft writes them: the first pattern that ends a layer's name counts."""
    tensors = load_file(theirs["bare"])
    numbers = {"unet.r": RANK, "unet.lora_alpha": 2.0, "unet.alpha_pattern": {"attn2.to_q": 8.0}}
    save_file(tensors, tmp_path / "x.safetensors", {"lora_adapter_metadata": json.dumps(numbers)})
    found = read(tmp_path / "x.safetensors", networks(opened(base)))
    for each in found["unet"]:
        assert each.scale == (8 if each.layer.endswith("attn2.to_q") else 2) / RANK
    assert {each.scale for each in found["text_encoder"]} == {1.0}
