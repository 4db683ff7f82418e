"""`daguerre convert export`: raw and averaged weights of a run, in each form, equal to the checkpoint's to the bit."""

import shutil

import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from safetensors.torch import load_file
from tiny_models import write_sdxl
from twins import Twins

from daguerre import errors
from daguerre.assembly.parts import build
from daguerre.cli import main
from daguerre.config import config
from daguerre.models.parts.text.names import with_wrapper

UNET = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three updates of a tiny Stable Diffusion 1.5 with its text encoder, averaged and saved after each."""
    folder = tmp_path_factory.mktemp("export")
    given = Twins(folder / "twins").overrides("sd15")
    given += ["run_name=r", f"output_dir={folder}", "training.duration=3 steps", "model.train_text_encoder=true"]
    given += ["ema.decay=0.9", "optimizer.learning_rate=1e-3", "checkpoint.keep=3"]
    given += ["sampling.num_images=0", "checkpoint.every=1 step"]
    assert main.run(["train", "sd15", *given]) == errors.DONE
    return folder / "r"


def export(*arguments):
    return main.run(["convert", "export", *map(str, arguments)])


def saved(run, group, component, name="step-00000003"):
    """A component's weights in a checkpoint."""
    tensors = load_file(run / "checkpoints" / name / f"{group}.safetensors")
    return {key.removeprefix(f"{component}."): t for key, t in tensors.items() if key.startswith(f"{component}.")}


def assert_equal(found, expected):
    found, expected = ({with_wrapper(n): t for n, t in of.items()} for of in (found, expected))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("given", "group", "name"),
    [
        pytest.param([], "ema", "step-00000003", marks=pytest.mark.long),
        (["weights=raw", "checkpoint=step-00000002"], "model", "step-00000002"),
        pytest.param(["weights=ema", "checkpoint=step-00000002"], "ema", "step-00000002", marks=pytest.mark.long),
        pytest.param(["weights=raw"], "model", "step-00000003", marks=pytest.mark.long),
    ],
)
def test_the_weights_that_are_asked_for(run, tmp_path, given, group, name, capsys):
    out = tmp_path / "model.safetensors"
    assert export(run, "format=single_file", f"out={out}", *given) == errors.DONE
    said = capsys.readouterr().out
    assert f"{name} of {run} ({'raw' if group == 'model' else 'averaged'} weights)" in said
    assert f"{out}: " in said
    pipe = StableDiffusionPipeline.from_single_file(str(out), config=str(run / "pipeline"), local_files_only=True)
    assert_equal(pipe.unet.state_dict(), saved(run, group, "unet", name))
    assert_equal(pipe.text_encoder.state_dict(), saved(run, group, "text_encoder", name))
    assert export(run, "format=diffusers", f"out={tmp_path / 'folder'}", *given) == errors.DONE
    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / "folder", local_files_only=True)
    assert_equal(pipe.unet.state_dict(), saved(run, group, "unet", name))
    assert_equal(pipe.text_encoder.state_dict(), saved(run, group, "text_encoder", name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "model.safetensors"]


@pytest.mark.long  # of the quick tests, a pipeline of SDXL takes every form, and so does a run of Stable Diffusion
def test_sdxl_with_both_text_encoders(tmp_path):
    given = [*Twins(tmp_path / "twins").overrides("sdxl"), "run_name=xl", f"output_dir={tmp_path}"]
    given += [
        "model.train_text_encoder=true",
        "model.train_text_encoder_2=true",
        "sampling.num_images=0",
        "ema.enabled=true",
    ]
    assert main.run(["train", "sdxl", *given]) == errors.DONE
    file, run = tmp_path / "xl.safetensors", tmp_path / "xl"
    assert export(run, "format=single_file", f"out={file}") == errors.DONE
    pipe = StableDiffusionXLPipeline.from_single_file(str(file), config=str(run / "pipeline"), local_files_only=True)
    name = sorted(path.name for path in (run / "checkpoints").glob("step-*"))[-1]
    for component in ("unet", "text_encoder", "text_encoder_2"):
        found = {with_wrapper(n): t for n, t in getattr(pipe, component).state_dict().items()}
        trained = {with_wrapper(n): t for n, t in saved(run, "ema", component, name).items()}
        assert trained
        assert_equal({n: found[n] for n in trained}, trained)


def test_raw_and_averaged_weights_differ_and_the_run_exports_the_averages(run):
    raw, averaged = (saved(run, group, "unet") for group in ("model", "ema"))
    assert not torch.equal(raw["conv_in.weight"], averaged["conv_in.weight"])
    assert_equal(load_file(run / "pipeline" / "unet" / UNET), averaged)


def test_the_unet_alone(run, tmp_path):
    assert export(run, "format=unet", f"out={tmp_path / 'unet'}", "dtype=bfloat16") == errors.DONE
    assert export(run, "format=unet", f"out={tmp_path / 'unet.safetensors'}", "dtype=bfloat16") == errors.DONE
    expected = {name: tensor.bfloat16() for name, tensor in saved(run, "ema", "unet").items()}
    net = UNet2DConditionModel.from_pretrained(tmp_path / "unet", torch_dtype=torch.bfloat16, local_files_only=True)
    assert_equal(net.state_dict(), expected)
    assert_equal(load_file(tmp_path / "unet.safetensors"), expected)


def test_a_recipe_starts_from_what_was_exported(run, tmp_path):
    file = tmp_path / "model.safetensors"
    assert export(run, "format=single_file", f"out={file}", "weights=raw") == errors.DONE
    given = [*Twins(run.parent / "twins").overrides("sd15"), f"model.pretrained_model_name_or_path={file}"]
    given += ["run_name=next", f"output_dir={tmp_path}"]
    parts = build(config.load("sd15", given).config)
    assert_equal(parts.family.components["unet"].state_dict(), saved(run, "model", "unet"))
    assert_equal(parts.family.components["text_encoder"].state_dict(), saved(run, "model", "text_encoder"))


def test_a_pipeline_in_every_form(tmp_path, capsys):
    folder = write_sdxl(tmp_path / "xl")
    whole = StableDiffusionXLPipeline.from_pretrained(folder, local_files_only=True)
    file = tmp_path / "xl.safetensors"
    assert export(folder, "format=single_file", f"out={file}", "dtype=float16") == errors.DONE
    assert "ComfyUI and A1111 cannot open the file" in capsys.readouterr().out
    pipe = StableDiffusionXLPipeline.from_single_file(
        str(file), config=str(folder), local_files_only=True, torch_dtype=torch.float16
    )
    for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
        expected = {n: t.half() for n, t in getattr(whole, name).state_dict().items()}
        assert_equal(getattr(pipe, name).state_dict(), expected)
    assert export(folder, "format=diffusers", f"out={tmp_path / 'half'}", "dtype=float16") == errors.DONE
    assert StableDiffusionXLPipeline.from_pretrained(tmp_path / "half", local_files_only=True).unet is not None
    assert '"dtype": "float16"' in (tmp_path / "half" / "text_encoder" / "config.json").read_text()
    shutil.copy(folder / "vae" / UNET, folder / "vae" / "diffusion_pytorch_model.odd.safetensors")
    for name in ("unet", "text_encoder", "text_encoder_2"):
        for path in (folder / name).glob("*.safetensors"):
            path.rename(path.with_name(path.name.replace(".safetensors", ".odd.safetensors")))
    (folder / "vae" / UNET).unlink()
    assert export(folder, "format=diffusers", f"out={tmp_path / 'plain'}", "variant=odd") == errors.DONE
    found = AutoencoderKL.from_pretrained(tmp_path / "plain" / "vae", local_files_only=True)
    assert_equal(found.state_dict(), whole.vae.state_dict())
    assert export(folder, "format=single_file", f"out={tmp_path / 'a.safetensors'}") == errors.REFUSED
    assert "has no weights in safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["format=single_file"], "Set out=my-model.safetensors"),
        (["out=x"], "format\n      must be given"),
        (["format=onnx", "out=x"], 'format = "onnx"\n      allowed: single_file'),
        (["format=single_file", "out=x"], "format=single_file writes a .safetensors file"),
        (["format=diffusers", "out=x.safetensors"], "format=diffusers writes a folder"),
        (["format=unet", "out=x", "dtype=int8"], 'dtype = "int8"\n      allowed: '),
        (["format=unet", "out=x", "variant=fp16"], "it applies to a pipeline, not to a run"),
        (["format=unet", "out=x", "weights=best"], 'weights = "best"\n      allowed: ema'),
        (["format=unet", "out=x", "checkpoint=step-9"], "has no checkpoint 'step-9'; it has: step-00000001"),
        (["format=unet", "out=x", "seed=3"], "seed: convert export takes format, out"),
        (["format=unet", "out=."], "out=. exists"),
    ],
)
def test_what_it_cannot_do_is_refused(run, tmp_path, given, words, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").touch()
    assert export(run, *given) == errors.REFUSED
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["format=diffusers", "out=x"], "is already in diffusers' layout: set dtype="),
        (
            ["format=unet", "out=x", "weights=raw", "training.device=cpu"],
            "weights, training.device: it applies to a run only",
        ),
    ],
)
def test_what_a_pipeline_cannot_have_is_refused(run, given, words, capsys):
    assert export(run / "pipeline", *given) == errors.REFUSED
    assert words in capsys.readouterr().err
    assert export(run / "checkpoints", *given) == errors.REFUSED
    assert "give a run folder" in capsys.readouterr().err
    assert main.run(["convert", "export"]) == errors.REFUSED


def test_a_pipeline_without_a_unet_is_refused_in_words(tmp_path, capsys):
    from tiny_families import z_image

    base = z_image.write(tmp_path / "z")
    for out in ("unet.safetensors", "unet"):
        assert export(base, "format=unet", f"out={tmp_path / out}") == errors.REFUSED
        said = " ".join(capsys.readouterr().err.split())
        assert "has no UNet (its networks: text_encoder, transformer, vae); format=single_file" in said
        assert not (tmp_path / out).exists()
