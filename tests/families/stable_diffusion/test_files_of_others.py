"""Recipes take what others wrote: one file, one network out of a file, folders of pickles."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_sd
from twins import Twins

from daguerre.assembly.parts import build
from daguerre.config import config
from daguerre.errors import UserError
from daguerre.families.stable_diffusion.single_file import layout, save
from daguerre.models.parts.text.names import with_wrapper

UNET, VAE, TEXT = (
    "unet/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "model.safetensors",
)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A pipeline with other weights than the twin's, and the same as one file."""
    place = tmp_path_factory.mktemp("other")
    folder = write_sd(place / "folder", seed=5)
    save.write(place / "model.safetensors", folder)
    return folder, place / "model.safetensors"


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    place = tmp_path_factory.mktemp("twin")
    return [*Twins(place).overrides("sd15"), f"output_dir={place}", "run_name=r"]


def networks(twin, *given):
    return build(config.load("sd15", [*twin, *given]).config).family.components


def is_from(network, path):
    expected = {with_wrapper(name): tensor for name, tensor in load_file(path).items()}
    found = {with_wrapper(name): tensor for name, tensor in network.state_dict().items()}
    return found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())


def test_a_whole_model_from_one_file(twin, other):
    folder, file = other
    found = networks(twin, f"model.pretrained_model_name_or_path={file}")
    assert is_from(found["unet"], folder / UNET)
    assert is_from(found["vae"], folder / VAE)
    assert is_from(found["text_encoder"], folder / "text_encoder" / TEXT)
    found = networks(twin, f"model.text_encoder={file}")
    assert is_from(found["text_encoder"], folder / "text_encoder" / TEXT)
    assert not is_from(found["unet"], folder / UNET)


@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt"])
def test_an_autoencoder_alone_in_original_names(twin, other, tmp_path, suffix):
    folder, file = other
    prefix = layout.VAE
    bare = {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items() if name.startswith(prefix)}
    path = tmp_path / f"vae{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(bare, path)
    given = [f"model.vae={path}"] + (["model.pickled_weights=true"] if suffix == ".ckpt" else [])
    assert is_from(networks(twin, *given)["vae"], folder / VAE)


@pytest.mark.parametrize("prefix", ["diffusion_model.", "module.model.diffusion_model.", "module.input_blocks"])
def test_a_unet_alone_in_original_names_behind_what_programs_put_before_them(twin, other, tmp_path, prefix):
    folder, file = other
    mine = {name: tensor for name, tensor in load_file(file).items() if name.startswith(layout.UNET)}
    before = prefix.removesuffix("input_blocks")
    save_file({before + name.removeprefix(layout.UNET): v for name, v in mine.items()}, tmp_path / "x.safetensors")
    assert is_from(networks(twin, f"model.unet={tmp_path / 'x.safetensors'}")["unet"], folder / UNET)


def test_a_folder_of_pickles(twin, other, tmp_path):
    folder = shutil.copytree(other[0], tmp_path / "old")
    for path in folder.glob("*/*.safetensors"):
        name = "pytorch_model.bin" if path.name == "model.safetensors" else "diffusion_pytorch_model.bin"
        torch.save(load_file(path), path.with_name(name))
        path.unlink()
    place = f"model.pretrained_model_name_or_path={folder}"
    with pytest.raises(UserError, match=r"model.pickled_weights=true"):
        networks(twin, place)
    found = networks(twin, place, "model.pickled_weights=true")
    assert is_from(found["unet"], other[0] / UNET)
    assert is_from(found["text_encoder"], other[0] / "text_encoder" / TEXT)
    assert is_from(networks(twin, place, "from_pt=true")["unet"], other[0] / UNET)
