"""`daguerre generate use=...`: LoRAs of any program on a model, each with its strength, as diffusers applies them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import data_sets
import drawing_pipelines
import foreign_loras
import numpy as np
import pytest
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from safetensors.torch import load_file, save_file
from tiny_drawings import documents, drawn, generate
from tiny_models import write_sd, write_sdxl

from daguerre import errors
from daguerre.cli import main
from daguerre.samplers.draw import initial_noise

# diffusers' schedulers hand a tensor to np.array, which numpy 2 warns of; peft warns of a second adapter.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
]

PIPELINES = {"sd": StableDiffusionPipeline, "sdxl": StableDiffusionXLPipeline}
SEED, STEPS, SCALE, PX = 3, 4, 4.0, 16
GIVEN = ("prompt=a cat", f"seed={SEED}", f"num_inference_steps={STEPS}", f"guidance_scale={SCALE}", "sampler=ddim")


@pytest.fixture(scope="module", params=["sd", pytest.param("sdxl", marks=pytest.mark.long)])
def place(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A pipeline, and two LoRAs of its UNet and text encoder with alphas unlike their ranks."""
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    (write_sd if kind == "sd" else write_sdxl)(folder / "base")
    for number, name in enumerate(("one", "two")):
        pipe = PIPELINES[kind].from_pretrained(folder / "base")
        targets = {"unet": ["to_q", "to_v", "ff.net.2"], "text_encoder": ["v_proj", "fc2"]}
        foreign_loras.add(pipe, targets, number, 0.3, r=3, lora_alpha=5)
        foreign_loras.save(pipe, folder / name, [*targets])
    return kind, folder


def ours(folder: Path, out: Path, use: str, *more: str) -> np.ndarray:
    size = [f"height={PX}", f"width={PX}", "training.device=cpu", f"out={out}"]
    assert generate(folder / "base", *GIVEN, *size, *([f"use={use}"] if use else []), *more) == 0
    return drawn(out)[0].astype(int)


def theirs(kind: str, folder: Path, strengths: dict[str, float]) -> np.ndarray:
    pipe = drawing_pipelines.opened(PIPELINES[kind], folder / "base", STEPS)
    for name in strengths:
        pipe.load_lora_weights(folder / name, adapter_name=name)
    pipe.set_adapters(list(strengths), list(strengths.values()))
    latents = initial_noise([SEED], (4, PX // 2, PX // 2))
    given = {"num_inference_steps": STEPS, "guidance_scale": SCALE, "height": PX, "width": PX}
    image = pipe("a cat", latents=latents, output_type="np", **given).images[0]
    return (image * 255).round().astype(int)


@pytest.mark.long
def test_images_are_those_of_diffusers(place, tmp_path):
    kind, folder = place
    without = ours(folder, tmp_path / "without", "")
    for strengths in ({"one": 0.7}, {"one": 0.8, "two": -0.5}):
        use = ", ".join(f"{folder / name}: {strength}" for name, strength in strengths.items())
        found = ours(folder, tmp_path / str(len(strengths)), f"{{{use}}}")
        assert np.abs(found - theirs(kind, folder, strengths)).max() <= 2
        assert np.abs(found - without).mean() > 2


def test_what_is_put_on_and_taken_away_leaves_the_base(place, tmp_path):
    _, folder = place
    other = tmp_path / "again.safetensors"
    other.write_bytes((folder / "one" / "pytorch_lora_weights.safetensors").read_bytes())
    found = ours(folder, tmp_path / "both", f"{{{folder / 'one'}: 0.5, {other}: -0.5}}")
    assert np.array_equal(found, ours(folder, tmp_path / "without", ""))


@pytest.fixture(scope="module")
def run(place, tmp_path_factory) -> Path:
    """A run with a LoRA of its own."""
    (kind, folder), to = place, tmp_path_factory.mktemp("runs")
    data_sets.folder(to / "images", 4)
    given = [f"output_dir={to}", "run_name=run", f"model.pretrained_model_name_or_path={folder / 'base'}"]
    given += ["training.duration=2 steps", "training.global_batch_size=2", "training.per_device_batch_size=2"]
    given += ["adapter.name=lora", "adapter.alpha=40", "optimizer.learning_rate=1e-2", "lr_scheduler.warmup=0 steps"]
    given += ["data.source=folder", f"data.path={to / 'images'}", "data.resolution=16", "ema.enabled=false"]
    given += ["validation.every=null", "sampling.num_images=0", "training.device=cpu", "checkpoint.every=null"]
    given += ["loader.num_workers=0"]
    name = "sd15_lora" if kind == "sd" else "sdxl_lora"
    assert main.run(["train", name, *given, "training.weights_dtype=float32"]) == errors.DONE
    return to / "run"


@pytest.mark.long
def test_the_lora_of_a_run_is_taken_away_again(place, run, tmp_path, capsys):
    """On a run with a LoRA of its own, by the file that it exports: it is said at which strength it acts in all."""
    _, folder = place
    size = [f"height={PX}", f"width={PX}", "training.device=cpu"]
    images = {}
    for strength in (0, -1):
        use, out = f"use={{{run}: {strength}}}", tmp_path / f"drawn{strength}"
        assert generate(run, *GIVEN, *size, use, f"out={out}") == 0
        images[strength] = drawn(out)[0].astype(int)
        assert f"so with {strength} more it acts at {1 + strength}; " in capsys.readouterr().out
    without = ours(folder, tmp_path / "without", "")
    assert np.abs(images[-1] - without).max() <= 2
    assert np.abs(images[0] - without).mean() > 2


@pytest.mark.long  # of the quick tests, run/test_lora_runs.py
def test_the_base_of_a_run_may_have_moved(place, run, tmp_path, capsys):
    """The same weights in another folder are read from there; others are refused."""
    kind, folder = place
    size = [f"height={PX}", f"width={PX}", "training.device=cpu"]
    shutil.copytree(folder / "base", tmp_path / "same")
    (write_sd if kind == "sd" else write_sdxl)(tmp_path / "other", seed=1)
    for name, base in {"here": [], "moved": [f"pretrained_model_name_or_path={tmp_path / 'same'}"]}.items():
        assert generate(run, *GIVEN, *size, *base, f"out={tmp_path / name}") == errors.DONE
    assert "ignored" not in capsys.readouterr().out
    assert np.array_equal(drawn(tmp_path / "here"), drawn(tmp_path / "moved"))
    other = f"model.pretrained_model_name_or_path={tmp_path / 'other'}"
    assert generate(run, *GIVEN, *size, other, f"out={tmp_path / 'no'}") == errors.REFUSED
    export = ["convert", "export", str(run), "format=adapters", f"out={tmp_path / 'adapters'}"]
    assert main.run([*export, other]) == errors.REFUSED
    assert capsys.readouterr().err.count("was trained on another") == 2
    assert main.run([*export, f"model.pretrained_model_name_or_path={tmp_path / 'same'}"]) == errors.DONE


@pytest.mark.long  # of the quick tests, run/test_lora_runs.py
def test_a_notice_names_the_base_that_a_lora_was_trained_on(place, run, tmp_path, capsys):
    """On its own base there is none; another one is usual, and gets the LoRA in full."""
    kind, folder = place
    ours(folder, tmp_path / "own", f"{{{run}: 1}}")
    assert "was trained on another" not in capsys.readouterr().out
    (write_sd if kind == "sd" else write_sdxl)(tmp_path / "base", seed=1)
    ours(tmp_path, tmp_path / "other", f"{{{run}: 1}}")
    said = capsys.readouterr().out
    assert "was trained on another unet, that of base: it is applied in full" in said
    assert str(folder) not in said, "no folder of the machine on which it was trained"
    (write_sdxl if kind == "sd" else write_sd)(tmp_path / "base")
    assert generate(tmp_path / "base", *GIVEN, f"use={{{run}: 1}}", f"out={tmp_path / 'refused'}") == errors.REFUSED
    assert "it is applied" not in capsys.readouterr().out


def test_a_run_that_trained_whole_networks_beside_its_lora_is_told(place, tmp_path, capsys):
    _, folder = place
    for name in ("adapter", "pipeline"):
        (tmp_path / "both" / name).mkdir(parents=True)
    (tmp_path / "both" / "pipeline" / "model_index.json").touch()
    shutil.copy(folder / "one" / foreign_loras.FILE, tmp_path / "both" / "adapter")
    ours(folder, tmp_path / "out", f"{{{tmp_path / 'both'}: 1}}")
    assert "its LoRA alone is added, and not the networks that it has trained as a whole" in capsys.readouterr().out


def test_each_image_says_what_was_used(place, tmp_path, capsys):
    kind, folder = place
    if kind == "sdxl":
        pytest.skip("the same for every family")
    ours(folder, tmp_path / "out", f"{{{folder / 'one'}: 0.5}}")
    said = capsys.readouterr().out
    assert f"with {folder / 'one'} x 0.5" in said
    assert "layers of unet" in said
    (document,) = documents(tmp_path / "out")
    strength, digest = document["use"][str(folder / "one")]
    assert strength == 0.5
    assert len(digest) == 64
    assert generate(folder / "base", *GIVEN, f"out={tmp_path / 'out'}", f"use={{{folder / 'one'}: 0.6}}") == 2
    assert "use" in capsys.readouterr().err, "other strengths are other images"


@pytest.mark.long  # of the quick tests, a config that is none is refused
def test_lora_config_of_maxdiffusion(place, tmp_path, capsys):
    """Its lists, and a folder with weight_name."""
    _, folder = place
    given = json.dumps({"lora_model_name_or_path": [str(folder / "one"), str(folder / "two" / foreign_loras.FILE)],
                        "weight_name": [foreign_loras.FILE, "two"], "adapter_name": ["a", "b"],
                        "scale": [0.8, -0.5], "from_pt": ["true", True]})  # fmt: skip
    found = ours(folder, tmp_path / "theirs", "", f"lora_config={given}")
    use = f"{{{folder / 'one'}: 0.8, {folder / 'two'}: -0.5}}"
    assert np.array_equal(found, ours(folder, tmp_path / "ours", use))
    empty = "lora_config={lora_model_name_or_path: [], weight_name: [], adapter_name: [], scale: [], from_pt: []}"
    assert np.array_equal(ours(folder, tmp_path / "none", "", empty), ours(folder, tmp_path / "without", ""))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{lora_model_name_or_path: [ByteDance/Hyper-SD], weight_name: [x.safetensors]}", "daguerre fetch ByteDance/"),
        ("{lora_model_name_or_path: [a, b], scale: [1]}", "lists are of one length"),
        ("{lora_model_name_or_path: [a.safetensors], from_pt: [false]}", "no Flax weights"),
        ("{path: [a]}", "it has the lists"),
        ("{lora_model_name_or_path: [a.safetensors], scale: [much]}", "a list of numbers"),
        ("x", "it has the lists"),
    ],
)
def test_a_lora_config_that_is_none(given, said, place, capsys):
    _, folder = place
    assert generate(folder / "base", *GIVEN, f"lora_config={given}") == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("{nowhere.safetensors: 1}", "there is no such file"),
        ("{ONE: .inf}", "give a number"),
        ("{ONE: 1, ONE/: 0.5}", "are the same file"),
        ("{ONE: strong}", "use"),
        ("ONE", "use"),
    ],
)
def test_what_cannot_be_used_is_refused(use, said, place, tmp_path, capsys):
    _, folder = place
    given = use.replace("ONE", str(folder / "one"))
    assert generate(folder / "base", *GIVEN, f"out={tmp_path / 'out'}", f"use={given}") == 2
    assert said in capsys.readouterr().err


def test_a_lora_of_another_model_is_refused(place, tmp_path, capsys):
    _, folder = place
    tensors = load_file(folder / "one" / "pytorch_lora_weights.safetensors")
    save_file({name.replace("attn1", "attn7"): v for name, v in tensors.items()}, tmp_path / "other.safetensors")
    given = [*GIVEN, f"out={tmp_path / 'out'}", f"use={{{tmp_path / 'other.safetensors'}: 1}}"]
    assert generate(folder / "base", *given, "training.device=cpu") == 2
    assert "was made for another model" in capsys.readouterr().err
