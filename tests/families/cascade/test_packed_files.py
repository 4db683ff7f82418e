"""Stage C and B in ComfyUI's files, which hold the text encoder and Stage A beside them, and as ComfyUI saves them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from daguerre.errors import UserError
from daguerre.families.cascade import files
from daguerre.families.stable_diffusion.single_file import load

HERE = Path(__file__).parent
BESIDE = {
    "text_encoder.text_model.final_layer_norm.weight": torch.ones(2),
    "clip_l_vision.visual_projection.weight": torch.ones(2),
}


def split(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Attention's products apart, in Stability's names."""
    found = {}
    for name, value in tensors.items():
        stem, mark, end = name.partition(".attn.in_proj_")
        parts = zip("qkv", value.chunk(3), strict=True) if mark else ()
        found |= {f"{stem}.attn.to_{part}.{end}": own.contiguous() for part, own in parts} if mark else {name: value}
    return found


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("component", ["prior", "decoder"])
def test_the_network_is_the_same(component, saved, tmp_path):
    own = load_file(HERE / f"{component}.safetensors")
    packed = {f"model.diffusion_model.{name}": value for name, value in (split(own) if saved else own).items()}
    stage_a = {f"vae.{name}": value for name, value in load_file(HERE / "vqgan.safetensors").items()}
    save_file(packed | BESIDE | stage_a, tmp_path / "x.safetensors")
    pairs = [(component, HERE / f"{component}.safetensors"), ("vqgan", HERE / "vqgan.safetensors")]
    for name, file in pairs:
        found, wanted = files.read(tmp_path / "x.safetensors", name), files.read(file, name)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
        assert files.shapes(tmp_path / "x.safetensors", name) == {key: tuple(v.shape) for key, v in wanted.items()}
    if component == "prior":
        assert files.component(tmp_path / "x.safetensors") == "prior"
    other = "decoder" if component == "prior" else "prior"
    with pytest.raises(UserError, match=f"and model.{other} must be"):
        files.read(tmp_path / "x.safetensors", other)


def test_it_is_named_where_a_whole_model_is_wanted(tmp_path):
    own = {f"model.diffusion_model.{name}": v for name, v in load_file(HERE / "prior.safetensors").items()}
    save_file(own | BESIDE, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"a stage of Stable Cascade, for model\.prior"):
        load.folder(tmp_path / "x.safetensors", pickled=False)
