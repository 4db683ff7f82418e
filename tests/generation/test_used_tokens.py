"""`daguerre generate use=...` with new tokens: files of any program and runs; images as diffusers makes them."""

from __future__ import annotations

from pathlib import Path

import drawing_pipelines
import foreign_loras
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_drawings import documents, drawn, generate
from tiny_models import write_sd, write_sdxl

from daguerre import errors
from daguerre.cli import main
from daguerre.samplers.draw import initial_noise

# diffusers' schedulers hand a tensor to np.array, which numpy 2 warns of.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
]
PIPELINES = {"sd": StableDiffusionPipeline, "sdxl": StableDiffusionXLPipeline}
SEED, STEPS, SCALE, PX, PROMPT = 3, 4, 4.0, 16, "a <toy> cat"
GIVEN = (f"seed={SEED}", f"num_inference_steps={STEPS}", f"guidance_scale={SCALE}", "sampler=ddim")
WIDTHS = {"sd": {"": 48}, "sdxl": {"": 48, "_2": 64}}


@pytest.fixture(scope="module", params=["sd", pytest.param("sdxl", marks=pytest.mark.long)])
def place(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A pipeline, and a token of three vectors in the layouts of diffusers, of A1111 and of sd-scripts."""
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    (write_sd if kind == "sd" else write_sdxl)(folder / "base")
    generator, rows = torch.Generator().manual_seed(0), {}
    (folder / "toy").mkdir()
    for mark, width in WIDTHS[kind].items():
        rows[mark] = torch.randn(3, width, generator=generator)
        save_file({"<toy>": rows[mark]}, folder / "toy" / f"learned_embeds{mark}.safetensors")
    if kind == "sd":
        save_file({"emb_params": rows[""]}, folder / "a1111.safetensors")
        torch.save({"string_to_param": {"*": rows[""]}, "name": "toy", "step": 4}, folder / "old.pt")
    else:
        save_file({"clip_l": rows[""], "clip_g": rows["_2"]}, folder / "a1111.safetensors")
    return kind, folder


def ours(folder: Path, out: Path, use: str, prompt: str = PROMPT) -> np.ndarray:
    size = [f"height={PX}", f"width={PX}", "training.device=cpu", f"out={out}", f"prompt={prompt}"]
    assert generate(folder / "base", *GIVEN, *size, *([f"use={use}"] if use else [])) == 0
    return drawn(out)[0].astype(int)


def theirs(kind: str, folder: Path) -> np.ndarray:
    pipe = drawing_pipelines.opened(PIPELINES[kind], folder / "base", STEPS)
    for mark in WIDTHS[kind]:
        # At the config's eos_token_id of 2 transformers pools at the new token's id.
        encoder = getattr(pipe, f"text_encoder{mark}")
        for module in encoder.modules():
            module.eos_token_id = 513 if getattr(module, "eos_token_id", None) == 2 else None
        own = load_file(folder / "toy" / f"learned_embeds{mark}.safetensors")
        pipe.load_textual_inversion(own, text_encoder=encoder, tokenizer=getattr(pipe, f"tokenizer{mark}"))
    latents = initial_noise([SEED], (4, PX // 2, PX // 2))
    given = {"num_inference_steps": STEPS, "guidance_scale": SCALE, "height": PX, "width": PX}
    image = pipe(PROMPT, latents=latents, output_type="np", **given).images[0]
    return (image * 255).round().astype(int)


def test_images_are_those_of_diffusers_from_every_layout(place, tmp_path):
    kind, folder = place
    expected, without = theirs(kind, folder), ours(folder, tmp_path / "without", "")
    uses = {"folder": folder / "toy", "a1111": f"<toy>={folder / 'a1111.safetensors'}"}
    if kind == "sd":
        uses |= {"diffusers": folder / "toy" / "learned_embeds.safetensors", "old": f"<toy>={folder / 'old.pt'}"}
    for name, use in uses.items():
        found = ours(folder, tmp_path / name, f'{{"{use}": 1}}')
        assert np.abs(found - expected).max() <= 2, name
        assert np.abs(found - without).mean() > 2
    (document,) = documents(tmp_path / "a1111")
    assert [*document["tokens"]] == [str(folder / "a1111.safetensors")]
    other = ours(folder, tmp_path / "other", f'{{"<dog>={folder / "a1111.safetensors"}": 1}}', "a <DOG> cat")
    assert np.array_equal(other, ours(folder, tmp_path / "again", f'{{"{uses["a1111"]}": 1}}'))


@pytest.mark.long
def test_tokens_in_the_file_of_a_lora_are_used_with_it(place, tmp_path, capsys):
    """As OneTrainer and A1111 bundle them: the same as both from files of their own."""
    kind, folder = place
    pipe = PIPELINES[kind].from_pretrained(folder / "base")
    foreign_loras.add(pipe, {"unet": ["to_q"]}, 0, 0.3, r=3, lora_alpha=3)
    foreign_loras.save(pipe, tmp_path / "lora", ["unet"])
    lora = load_file(tmp_path / "lora" / foreign_loras.FILE)
    keys = {"": "clip_l", "_2": "clip_g"}
    rows = {mark: load_file(folder / "toy" / f"learned_embeds{mark}.safetensors")["<toy>"] for mark in WIDTHS[kind]}
    both, expected = tmp_path / "both.safetensors", {f"{tmp_path / 'lora'}": 0.7, f"{folder / 'toy'}": 1}
    images = ours(folder, tmp_path / "apart", str(expected).replace("'", '"'))
    own = {f"bundle_emb.<toy>.{keys[mark]}": value for mark, value in rows.items()}
    save_file(lora | own, both)
    assert np.array_equal(ours(folder, tmp_path / "whole", f'{{"{both}": 0.7}}'), images)
    named = ours(folder, tmp_path / "named", f'{{"<dog>={both}": 0.7}}', "a <dog> cat")
    assert np.array_equal(named, images)
    if kind == "sd":
        save_file(lora | {"bundle_emb.<toy>.string_to_param.*": rows[""]}, both)
        assert np.array_equal(ours(folder, tmp_path / "older", f'{{"{both}": 0.7}}'), images)
    capsys.readouterr()
    given = ["format=kohya", f"out={tmp_path / 'x.safetensors'}", f"base={folder / 'base'}"]
    assert main.run(["convert", "lora", str(both), *given]) == errors.DONE
    assert "the new tokens in it are left out: `daguerre convert tokens` writes" in capsys.readouterr().out
    assert main.run(["convert", "tokens", str(both), f"out={tmp_path / 'x'}", given[-1]]) == errors.DONE
    apart = f'{{"{tmp_path / "x.safetensors"}": 0.7, "{tmp_path / "x"}": 1}}'
    assert np.abs(ours(folder, tmp_path / "parts", apart) - images).max() <= 1
    save_file(lora | {"bundle_emb.<toy>.clip_l_out": rows[""]}, both)
    size = [f"height={PX}", f"width={PX}", "training.device=cpu", f"out={tmp_path / 'no'}", "prompt=a"]
    assert generate(folder / "base", *GIVEN, *size, f"use={{{both}: 1}}") == errors.REFUSED
    assert "an output embedding of OneTrainer's" in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
def test_a_run_of_pivotal_tuning_is_used_whole(place, tmp_path, capsys):
    """Its LoRA and its tokens, on the base: the images of the run itself."""
    kind, folder = place
    (tmp_path / "images").mkdir()
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
    given = ["placeholder_token=<toy>", "adapter.num_vectors=2", f"data.path={tmp_path / 'images'}"]
    given += ["data.source=folder", "data.captions.text=a <toy>", "data.resolution=16", "ema.enabled=false"]
    given += ["training.duration=2 steps", "training.global_batch_size=2", "training.per_device_batch_size=2"]
    given += ["optimizer.learning_rate=1e-1", "lr_scheduler.warmup=0 steps", "validation.every=null"]
    given += ["sampling.num_images=0", "training.device=cpu", "training.weights_dtype=float32", "checkpoint.every=null"]
    name = "sd15_lora" if kind == "sd" else "sdxl_lora"
    place_of = [f"output_dir={tmp_path}", "run_name=run", f"model.pretrained_model_name_or_path={folder / 'base'}"]
    assert main.run(["train", name, *place_of, *given]) == errors.DONE
    size = [f"height={PX}", f"width={PX}", "training.device=cpu", f"prompt={PROMPT}"]
    assert generate(tmp_path / "run", *GIVEN, *size, f"out={tmp_path / 'own'}") == 0
    own = drawn(tmp_path / "own")[0].astype(int)
    used = ours(folder, tmp_path / "used", f"{{{tmp_path / 'run'}: 1}}")
    assert np.abs(own - used).max() <= 1
    assert np.abs(own - ours(folder, tmp_path / "without", "")).mean() > 2
    assert "no prompt has" not in capsys.readouterr().out
    ours(folder, tmp_path / "other", f"{{{tmp_path / 'run'}: 1}}", prompt="a cat")
    assert "no prompt has the new token <toy>, so the images show nothing" in capsys.readouterr().out
    export = ["convert", "export", str(tmp_path / "run"), "format=single_file", f"out={tmp_path / 'x.safetensors'}"]
    assert main.run(export) == errors.REFUSED
    assert "the vocabulary has new tokens (<toy>, <toy>_1), for which the original layout" in capsys.readouterr().err
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize("made_for", ["stable-diffusion-v1", "stable-diffusion-xl-v1-base"])
def test_a_folder_that_was_made_for_another_model_is_refused(made_for, place, tmp_path, capsys):
    """By its header, as SDXL's first text encoder and that of SD 1.x are of one width."""
    kind, folder = place
    for mark in WIDTHS[kind]:
        name = f"learned_embeds{mark}.safetensors"
        told = {"modelspec.architecture": f"{made_for}/textual-inversion"}
        save_file(load_file(folder / "toy" / name), tmp_path / name, told)
    size = [f"height={PX}", f"width={PX}", "training.device=cpu", f"out={tmp_path / 'no'}", f"prompt={PROMPT}"]
    fits = (kind == "sdxl") == ("xl" in made_for)
    assert generate(folder / "base", *GIVEN, *size, f"use={{{tmp_path}: 1}}") == (0 if fits else errors.REFUSED)
    assert (f"was made for another model ({made_for}), and this one has" in capsys.readouterr().err) != fits


def test_what_cannot_be_used_is_refused(place, tmp_path, capsys):
    kind, folder = place
    if kind == "sdxl":
        save_file({"<toy>": torch.zeros(1, 48)}, tmp_path / "one.safetensors")
        cases = {f"{{{tmp_path / 'one.safetensors'}: 1}}": "for one text encoder, but this model has 2"}
    else:
        files = {"wide": {"<toy>": torch.zeros(1, 64)}, "nan": {"<toy>": torch.full((1, 48), torch.nan)}}
        files |= {"sdxl": {"clip_l": torch.zeros(1, 48), "clip_g": torch.zeros(1, 64)}}
        files |= {"long": {"<toy>": torch.zeros(23, 48)}, "odd": {"<toy>": torch.zeros(2, 2, 48)}}
        for name, tensors in files.items():
            save_file(tensors, tmp_path / f"{name}.safetensors")
        good = folder / "a1111.safetensors"
        (tmp_path / "cut.safetensors").write_bytes(good.read_bytes()[:-9])
        (tmp_path / "code.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
        cases = {
            f"{{{tmp_path / 'wide.safetensors'}: 1}}": "embeddings of the text_encoder here are 48 numbers wide",
            f"{{{tmp_path / 'odd.safetensors'}: 1}}": "was made for another model",
            f"{{{tmp_path / 'nan.safetensors'}: 1}}": "has NaN or infinity in it",
            f"{{{tmp_path / 'sdxl.safetensors'}: 1}}": "which SDXL's two text encoders read",
            f"{{{tmp_path / 'long.safetensors'}: 1}}": "has 23 vectors, but text_encoder reads texts of 22 tokens",
            f"{{{tmp_path / 'cut.safetensors'}: 1}}": "cannot be read",
            f"{{{tmp_path / 'code.pt'}: 1}}": "no code of this file was run",
            f'{{"<toy>={good}": 0.5}}': "its strength is 1, not 0.5",
            f'{{"a={good}": 1}}': "is a token already",
            f'{{"<toy>={good}": 1, "{folder / "toy"}": 1}}': "two files have a token <toy>",
        }
    for use, said in cases.items():
        size = [f"height={PX}", f"width={PX}", "training.device=cpu", f"out={tmp_path / 'no'}", "prompt=a"]
        assert generate(folder / "base", *GIVEN, *size, f"use={use}") == errors.REFUSED, use
        assert said in " ".join(capsys.readouterr().err.split()), use
