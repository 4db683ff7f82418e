"""Models in float8, through every verb that reads or writes weights, and in each type."""

import json
import shutil

import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from quick_cases import quick_where
from safetensors.torch import load_file, save_file
from tiny_models import write_sdxl

from daguerre import errors
from daguerre.cli import main
from daguerre.errors import UserError
from daguerre.families.stable_diffusion import controlnet_files as unet_files
from daguerre.models.lora_files.low_rank import Keep, of_weight
from daguerre.models.weights.files import DTYPES

FLOAT8 = torch.float8_e4m3fn
UNET = "unet/diffusion_pytorch_model.safetensors"
LAYER = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q.weight"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """A tiny pipeline in float8."""
    folder = write_sdxl(tmp_path_factory.mktemp("float8") / "folder")
    for path in folder.glob("*/*.safetensors"):
        save_file({name: tensor.to(FLOAT8) for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    return folder


def run(*words):
    assert main.run([str(word) for word in words]) == errors.DONE


@pytest.mark.parametrize("dtype", [None, *quick_where("float16".__eq__, DTYPES)])
def test_it_is_written_in_each_type(narrow, tmp_path, dtype):
    given = [f"dtype={dtype}"] if dtype else []
    run("convert", "export", narrow, "format=single_file", f"out={tmp_path / 'a.safetensors'}", *given)
    run("convert", "export", narrow, "format=unet", f"out={tmp_path / 'b.safetensors'}", *given)
    run("convert", "model", tmp_path / "a.safetensors", f"out={tmp_path / 'c'}", *given)
    expected = {name: t.to(DTYPES[dtype] if dtype else FLOAT8) for name, t in load_file(narrow / UNET).items()}
    for found in (load_file(tmp_path / "b.safetensors"), load_file(tmp_path / "c" / UNET)):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name].float(), tensor.float())
    if dtype:
        run("convert", "export", narrow, "format=diffusers", f"out={tmp_path / 'd'}", *given)


def test_loras_are_merged_and_extracted(narrow, tmp_path, capsys):
    layer = "lora_unet_" + LAYER.removesuffix(".weight").replace(".", "_")
    factors = {f"{layer}.lora_up.weight": torch.ones(64, 1), f"{layer}.lora_down.weight": torch.ones(1, 64)}
    save_file(factors, tmp_path / "lora.safetensors")
    use = "use=" + json.dumps({str(tmp_path / "lora.safetensors"): 1})
    run("convert", "merge", narrow, use, f"out={tmp_path / 'half'}", "dtype=float16")
    run("convert", "merge", narrow, use, f"out={tmp_path / 'own'}")
    old, half, own = (load_file(place / UNET) for place in (narrow, tmp_path / "half", tmp_path / "own"))
    assert torch.equal(half[LAYER], (old[LAYER].float() + 1).half())
    assert torch.equal(own[LAYER].float(), (old[LAYER].float() + 1).to(FLOAT8).float())
    run("convert", "extract", tmp_path / "own", f"base={narrow}", "rank=2", f"out={tmp_path / 'x.safetensors'}")
    assert "1 layers of unet" in capsys.readouterr().out


def test_it_generates(narrow, tmp_path):
    run("generate", narrow, "prompt=a", "num_inference_steps=1", "training.device=cpu", f"out={tmp_path / 'out'}")


def test_a_controlnet_is_read(narrow, tmp_path):
    wide = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(narrow / "unet"))
    network = ControlNetModel.from_unet(wide, conditioning_embedding_out_channels=(16, 32))
    own = {name: tensor.to(FLOAT8) for name, tensor in network.state_dict().items()}
    save_file(own, tmp_path / "control.safetensors")
    read = unet_files.read(str(tmp_path / "control.safetensors"), unet_files.Base(wide, 2))
    assert all(torch.equal(tensor, own[name].float()) for name, tensor in read.state_dict().items())
    folder = tmp_path / "folder"
    shutil.copytree(narrow / "scheduler", folder)
    network.save_config(folder)
    save_file(own, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    read = unet_files.read(str(folder), unet_files.Base(wide, 2))
    assert all(torch.equal(tensor, own[name].float()) for name, tensor in read.state_dict().items())


@pytest.mark.parametrize("scale", ["scale_weight", "weight_scale", "weight_scale_inv", "SCB"])
def test_a_controlnet_with_scales_is_multiplied_out_or_refused(narrow, tmp_path, scale):
    wide = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(narrow / "unet"))
    own = ControlNetModel.from_unet(wide, conditioning_embedding_out_channels=(16, 32)).state_dict()
    name = "mid_block.attentions.0.proj_in"
    stored = own | {f"{name}.weight": (own[f"{name}.weight"] * 64).to(FLOAT8), f"{name}.{scale}": torch.tensor(1 / 64)}
    save_file({"control_model." + key: value for key, value in stored.items()}, tmp_path / "control.safetensors")
    if scale not in ("scale_weight", "weight_scale"):
        with pytest.raises(UserError, match=f"{scale} next to weights of its networks"):
            unet_files.read(str(tmp_path / "control.safetensors"), unet_files.Base(wide, 2))
        return
    read = unet_files.read(str(tmp_path / "control.safetensors"), unet_files.Base(wide, 2)).state_dict()
    assert torch.equal(read[f"{name}.weight"], stored[f"{name}.weight"].float() / 64)


@pytest.mark.parametrize("shape", [(64, 48), (48, 64)])
@pytest.mark.parametrize("rank", [1, 4, 16, 48])
def test_a_rank_above_that_of_the_change_divides_by_no_rounding(shape, rank):
    """The singular values behind the fourth are rounding; before, the factors had infinity in them, or 1e60."""
    draw = torch.Generator().manual_seed(0)
    change = torch.zeros(shape)
    change[:4] = torch.randn(4, shape[1], generator=draw) * 1e-3
    for each in (change, change * 1e-15, torch.zeros(shape)):
        down, up = of_weight("x", each, Keep(rank)).addition.factors.values()
        assert torch.isfinite(down).all()
        assert torch.isfinite(up).all()
        assert max(down.abs().max(), up.abs().max()) <= 2 * each.double().norm().sqrt()
        if rank >= 4:
            assert (up @ down - each).norm() <= 1e-6 * each.norm()
