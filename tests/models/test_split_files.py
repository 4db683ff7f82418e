"""ComfyUI's files of text encoders and autoencoders are the same weights as the folders that they were made of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny_families
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.loaders import single_file_utils
from quick_cases import quick_first, quick_where
from safetensors.torch import load_file, save_file

from daguerre import plugins
from daguerre.errors import UserError
from daguerre.families.pretrained import single_files
from daguerre.families.stable_diffusion.single_file import keys
from daguerre.models.parts.qwen.vae import QwenImageVAE

READERS = ("z_image", "flux2", "krea2", "qwen_image", "qwen_image_21", "flux3", "anima")
FLOAT8 = torch.float8_e4m3fn


def loaded(name: str, own: dict[str, Any], **more: str) -> Any:
    module = plugins.find("families", name)
    return module.load(module.Settings.model_validate({**own, **more}), 0)


def bare(name: str) -> str:
    for wrapper in ("model.", "language_model.", "model."):
        name = name.removeprefix(wrapper)
    return name


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def same(family: Any, other: Any, component: str) -> bool:
    one, two = (each.components[component].state_dict() for each in (family, other))
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.mark.parametrize("name", quick_where({"z_image", "qwen_image"}.__contains__, READERS))
def test_a_text_encoder_in_a_file_is_that_of_the_folder(name: str, tmp_path: Path) -> None:
    """In the names of transformers of any time: with one wrapper, with both, and without."""
    own = tiny_families.settings(name, tmp_path)
    held, expected = weights(Path(own["pretrained_model_name_or_path"]) / "text_encoder"), loaded(name, own)
    file = tmp_path / "qwen.safetensors"
    for spell in ("model.{}", "{}", "model.language_model.{}"):
        spelt = {n if "visual" in n or "lm_head" in n else spell.format(bare(n)): v for n, v in held.items()}
        assert len(spelt) == len(held)
        save_file(spelt, file)
        assert same(loaded(name, own, text_encoder=str(file)), expected, "text_encoder")
    missing = next(n for n in spelt if "mlp" in n)
    save_file({n: v for n, v in spelt.items() if n != missing}, file)
    with pytest.raises(UserError, match="does not have the weights of this"):
        loaded(name, own, text_encoder=str(file))


def test_scaled_files_of_8_bits_are_multiplied_and_others_refused(tmp_path: Path) -> None:
    own = tiny_families.settings("z_image", tmp_path)
    held = {f"model.{n}": v for n, v in weights(Path(own["pretrained_model_name_or_path"]) / "text_encoder").items()}
    layer = "model.layers.0.mlp.up_proj"
    scale = held[f"{layer}.weight"].abs().max() / 448
    codes = (held[f"{layer}.weight"] / scale).to(FLOAT8)
    scaled = {**held, f"{layer}.weight": codes, f"{layer}.scale_weight": scale, "scaled_fp8": torch.zeros(2).to(FLOAT8)}
    file = tmp_path / "fp8.safetensors"
    save_file(scaled, file)
    found = loaded("z_image", own, text_encoder=str(file)).components["text_encoder"]
    assert torch.equal(found.layers[0].mlp.up_proj.weight, codes.float() * scale)
    save_file({**held, f"{layer}.weight": (codes.float() * 10).to(torch.int8)}, file)
    with pytest.raises(UserError, match="weights of int8"):
        loaded("z_image", own, text_encoder=str(file))
    save_file({**held, f"{layer}.other_scale": torch.ones(3)}, file)
    with pytest.raises(UserError, match="other_scale"):
        loaded("z_image", own, text_encoder=str(file))


@pytest.mark.parametrize(("name", "prefix"), [("flux", ""), ("z_image", ""), ("flux2", ""), ("flux2", "vae.")])
def test_an_autoencoder_in_its_authors_names_is_that_of_the_folder(name: str, prefix: str, tmp_path: Path) -> None:
    """`ae.safetensors` and `flux2-vae.safetensors`, which has its outer convolutions inside and a count of batches."""
    own = tiny_families.settings(name, tmp_path)
    held = weights(Path(own["pretrained_model_name_or_path"]) / "vae")
    file, made = tmp_path / "ae.safetensors", {}
    for link in keys.vae(held):
        value = held[link.names[0]]
        inside = {"quant_conv": "encoder.", "post_quant_conv": "decoder."} if name == "flux2" else {}
        original = inside.get(link.original.partition(".")[0], "") + link.original
        made[prefix + original] = value[:, :, None, None] if link.form == "convolution" and value.ndim == 2 else value
    assert not any(".down_blocks." in each for each in made)
    save_file({n: v.contiguous() for n, v in made.items()}, file)
    assert same(loaded(name, own, vae=str(file)), loaded(name, own), "vae")


@pytest.mark.parametrize("name", quick_first(["qwen_image", "krea2", "anima"]))
def test_the_autoencoder_of_videos_is_read_in_the_names_of_its_authors(name: str, tmp_path: Path) -> None:
    """`qwen_image_vae.safetensors`, in the names of Wan."""
    own = tiny_families.settings(name, tmp_path)
    held = weights(Path(own["pretrained_model_name_or_path"]) / "vae")
    _, links = QwenImageVAE.names.links_in((), held)  # type: ignore[union-attr]
    made = {link.original: held[link.names[0]] for link in links}
    assert len(made) == len(held)
    assert "decoder.upsamples.2.resample.1.weight" in made
    file = tmp_path / "qwen_image_vae.safetensors"
    save_file(made, file)
    assert same(loaded(name, own, vae=str(file)), loaded(name, own), "vae")


OF_ENCODERS = dict.fromkeys(READERS, r"(model|visual)\.|lm_head\.weight") | {"flux": r"text_model\."}
OF_AUTOENCODERS = {
    **dict.fromkeys(("flux", "z_image"), r"(en|de)coder\.(conv_|down\.|up\.|mid\.|norm_)"),
    "flux2": r"(en|de)coder\.(conv_|down\.|up\.|mid\.|norm_|quant_|post_)|bn\.",
    "krea2": r"(en|de)coder\.(conv1|downsamples|upsamples|middle|head)|conv[12]\.",
    "qwen_image_21": r"(en|de)coder\.|(post_)?quant_conv",
}


@pytest.mark.parametrize(
    ("name", "component"), [*((n, "text_encoder") for n in OF_ENCODERS), *((n, "vae") for n in OF_AUTOENCODERS)]
)
def test_what_is_written_is_read_back_to_the_bit(name: str, component: str, tmp_path: Path) -> None:
    own, file = tiny_families.settings(name, tmp_path), tmp_path / "split.safetensors"
    folder = Path(own["pretrained_model_name_or_path"])
    (told,) = single_files.write(file, folder, component=component)
    assert f"the {component} alone" in told
    names = (OF_ENCODERS if component == "text_encoder" else OF_AUTOENCODERS)[name]
    assert not [each for each in load_file(file) if not re.match(names, each)]
    assert same(loaded(name, own, **{component: str(file)}), loaded(name, own), component)


def test_other_components_and_a_prefix_are_refused(tmp_path: Path) -> None:
    folder = Path(tiny_families.settings("z_image", tmp_path)["pretrained_model_name_or_path"])
    with pytest.raises(UserError, match=r"no such network.*it has text_encoder, vae, and its denoiser without"):
        single_files.write(tmp_path / "a.safetensors", folder, component="scheduler")
    with pytest.raises(UserError, match="prefix: it is for a transformer"):
        single_files.write(tmp_path / "a.safetensors", folder, component="vae", prefix="")


def test_these_names_are_those_that_diffusers_reads() -> None:
    """Of the published size, for which its converter is written."""
    with torch.device("meta"):
        held = AutoencoderKLQwenImage().state_dict()
    _, links = QwenImageVAE.names.links_in((), held)  # type: ignore[union-attr]
    made = {link.original: torch.empty(held[link.names[0]].shape, device="meta") for link in links}
    theirs = single_file_utils.convert_wan_vae_to_diffusers(dict(made))
    assert theirs.keys() == held.keys()
    assert all(theirs[link.names[0]] is made[link.original] for link in links)
