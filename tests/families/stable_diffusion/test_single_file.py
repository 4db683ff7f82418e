"""Single-file checkpoints: what Daguerre writes opens in diffusers, and what it reads is equal to the bit."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, StableDiffusionXLPipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import write_sd, write_sdxl

from daguerre.errors import UserError
from daguerre.families.stable_diffusion.single_file import compatibility, layout, load, save
from daguerre.families.stable_diffusion.single_file.configs import METADATA
from daguerre.models.parts.text.names import with_wrapper
from daguerre.models.weights import conversion_cache, seals

KINDS = {
    "sd1": lambda folder: write_sd(folder, version=1),
    "sd2": lambda folder: write_sd(folder, version=2),
    "sdxl": write_sdxl,
    "sdxl_v": lambda folder: write_sdxl(folder, prediction_type="v_prediction", rescale_betas_zero_snr=True),
}


@pytest.fixture(
    scope="module", params=["sd1", "sdxl_v", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("sd2", "sdxl"))]
)
def exported(request, tmp_path_factory):
    """A tiny pipeline, and the file that was made of it."""
    place = tmp_path_factory.mktemp(request.param)
    folder = KINDS[request.param](place / "pipeline")
    file = place / "model.safetensors"
    assert any("ComfyUI and A1111 cannot open" in line for line in save.write(file, folder))
    return folder, file


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a pipeline by component and name, as the hub's files name them."""
    found = {}
    for path in sorted(folder.glob("*/*.safetensors")):
        for name, tensor in load_file(path).items():
            full = with_wrapper(name) if path.parent.name.startswith("text_encoder") else name
            found[f"{path.parent.name}/{full}"] = tensor
    return found


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_diffusers_opens_the_file_with_equal_weights(exported):
    folder, file = exported
    xl = (folder / "text_encoder_2").is_dir()
    kind = StableDiffusionXLPipeline if xl else StableDiffusionPipeline
    pipe = kind.from_single_file(str(file), config=str(folder), local_files_only=True)
    original = kind.from_pretrained(folder, local_files_only=True)
    for name in ("unet", "vae", "text_encoder", "text_encoder_2")[: 4 if xl else 3]:
        found, expected = getattr(pipe, name).state_dict(), getattr(original, name).state_dict()
        if name == "text_encoder" and not xl and original.text_encoder.config.hidden_act == "gelu":
            # diffusers leaves out the 24th layer of 2.x by its number: all layers of a tiny one are kept
            assert not any("layers.2" in key for key in found)
        assert_equal(found, expected)


def test_import_of_export_is_equal_to_the_bit(exported, capsys):
    folder, file = exported
    made = load.folder(file, pickled=False)
    assert made.parent == conversion_cache.root()
    assert f"converting {file} to diffusers' layout" in capsys.readouterr().err
    assert load.folder(file, pickled=False) == made
    assert capsys.readouterr().err == ""
    assert_equal(weights(made), weights(folder))
    for path in folder.rglob("*.json"):
        name = path.relative_to(folder)
        found, expected = json.loads((made / name).read_text()), json.loads(path.read_text())
        assert {k: v for k, v in found.items() if k in expected} == expected, name
    xl = (folder / "text_encoder_2").is_dir()
    (StableDiffusionXLPipeline if xl else StableDiffusionPipeline).from_pretrained(made, local_files_only=True)


def test_the_file_says_what_it_is(exported):
    folder, file = exported
    scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    with safe_open(file, "pt") as opened:
        metadata, names = opened.metadata(), set(opened.keys())
    v = scheduler["prediction_type"] == "v_prediction"
    assert metadata["modelspec.prediction_type"] == ("v" if v else "epsilon")
    assert ("v_pred" in names) == v
    assert ("ztsnr" in names) == bool(scheduler.get("rescale_betas_zero_snr"))
    assert layout.components(layout.normalized(load_file(file))) == tuple(
        name for name in ("unet", "vae", "text_encoder", "text_encoder_2") if (folder / name).is_dir()
    )


@pytest.mark.parametrize(
    ("name", "dtype"), [("float16", torch.float16), pytest.param("bfloat16", torch.bfloat16, marks=pytest.mark.long)]
)
def test_another_type_of_numbers(exported, tmp_path, name, dtype):
    folder, _ = exported
    save.write(tmp_path / "half.safetensors", folder, dtype)
    load.convert(tmp_path / "half.safetensors", tmp_path)
    expected = {n: t.to(dtype) if t.is_floating_point() else t for n, t in weights(folder).items()}
    assert_equal(weights(tmp_path), expected)


def test_a_tokenizer_of_its_own_and_numbers_travel_in_the_file(exported):
    _, file = exported
    with safe_open(file, "pt") as opened:
        kept = json.loads(opened.metadata()[METADATA])
    assert all("tokenizer.json" in files for files in kept["tokenizers"].values())
    assert all(config["norm_num_groups"] == 8 for name, config in kept["configs"].items() if name in ("unet", "vae"))


def test_a_full_disk_leaves_nothing_under_the_name(tmp_path_factory, tmp_path, monkeypatch):
    folder = write_sd(tmp_path_factory.mktemp("full"))

    def fail(path, chunks):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(seals, "write_durably", fail)
    with pytest.raises(OSError, match="No space left"):
        save.write(tmp_path / "a.safetensors", folder)
    assert list(tmp_path.iterdir()) == []


def test_float16_that_would_overflow_is_refused(tmp_path):
    folder = write_sd(tmp_path / "p")
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(path) | {"decoder.conv_in.bias": torch.full((16,), 1e5)}, path)
    with pytest.raises(UserError, match=r"decoder.conv_in.bias has values above float16's limit of 65504"):
        save.write(tmp_path / "a.safetensors", folder, torch.float16)
    assert not (tmp_path / "a.safetensors").exists()


def test_pipelines_of_another_kind_are_refused(tmp_path):
    folder = write_sd(tmp_path / "p")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxPipeline"}))
    with pytest.raises(UserError, match="is a FluxPipeline"):
        save.write(tmp_path / "a.safetensors", folder)
    (folder / "model_index.json").write_text(json.dumps(index))
    config = json.loads((folder / "text_encoder" / "config.json").read_text())
    (folder / "text_encoder" / "config.json").write_text(json.dumps(config | {"model_type": "t5"}))
    with pytest.raises(UserError, match="text_encoder must be CLIP, not t5"):
        save.write(tmp_path / "a.safetensors", folder)


@torch.no_grad()
@pytest.mark.parametrize("statistics", [False, True])
def test_a_scaling_that_readers_do_not_know_is_folded_into_the_vae(tmp_path, monkeypatch, statistics):
    folder = write_sdxl(tmp_path / "p")
    vae = AutoencoderKL.from_pretrained(folder / "vae", local_files_only=True)
    mean, std = [0.1, -0.2, 0.3, 0.0], [0.5, 1.0, 2.0, 1.5]
    if statistics:
        vae.register_to_config(latents_mean=mean, latents_std=std)
        vae.save_pretrained(folder / "vae")
    monkeypatch.setattr(compatibility, "_known", lambda numbers: numbers)  # as if its shapes were SDXL's
    assert any("folded into the VAE" in line for line in save.write(tmp_path / "a.safetensors", folder))
    load.convert(tmp_path / "a.safetensors", tmp_path)
    found = AutoencoderKL.from_pretrained(tmp_path / "vae", local_files_only=True)
    assert (found.config.scaling_factor, found.config.latents_mean) == (0.13025, None)
    x = torch.rand(2, 3, 16, 16)
    own, other = vae.encode(x).latent_dist, found.encode(x).latent_dist
    m, s = (torch.tensor(of if statistics else [v] * 4).reshape(1, 4, 1, 1) for of, v in ((mean, 0.0), (std, 1.0)))
    torch.testing.assert_close(0.13025 * other.mean, vae.config.scaling_factor * (own.mean - m) / s)
    torch.testing.assert_close(0.13025 * other.std, vae.config.scaling_factor * own.std / s)
    z = torch.randn(2, 4, 8, 8)
    expected = vae.decode(z / vae.config.scaling_factor * s + m).sample
    torch.testing.assert_close(found.decode(z / 0.13025).sample, expected, rtol=1e-4, atol=1e-5)
