"""`daguerre init`: what it says of a folder, and the recipe that it writes."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from daguerre.cli import init, main
from daguerre.cli.parts import own_base
from daguerre.config import config as configs
from daguerre.config import recipe
from daguerre.data.tools import duplicates

BASE = """
extends: sd15_lora
model: {{pretrained_model_name_or_path: {model}}}
data: {{resolution: 32}}
training: {{weights_dtype: float32, frozen_precision: "no"}}
"""


def picture(seed: int, side_px: int = 96) -> Image.Image:
    """Smooth spots of colour, as a photograph has."""
    spots_HWC = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(spots_HWC).resize((side_px, side_px), Image.Resampling.BICUBIC)


@pytest.fixture
def place(tmp_path, monkeypatch, tiny_sd) -> Path:
    """A folder `dogs` of ten images, of which two are nearly the same, and a recipe `tiny.yaml` of a tiny model."""
    monkeypatch.chdir(tmp_path)
    Path("dogs").mkdir()
    for i in range(9):
        picture(i).save(f"dogs/{i}.png")
        Path(f"dogs/{i}.txt").write_text(f"a photo of sks dog{['', ' running', ' on grass'][i % 3]}")
    picture(4).resize((48, 48)).save("dogs/copy.jpg", quality=60)
    Path("dogs/copy.txt").write_text("a photo of sks dog")
    Path("tiny.yaml").write_text(BASE.format(model=tiny_sd))
    return tmp_path


def refused(capsys, *arguments: str) -> str:
    assert main.run([*arguments]) == 2
    return capsys.readouterr().err


def test_a_recipe_is_written_that_trains(place, capsys):
    assert main.run(["init", "dogs", "base=./tiny.yaml", "optimizer.learning_rate=2e-4"]) == 0
    said = capsys.readouterr().out
    assert "10 images, 1 of them held out" in said
    assert "nearly the same, which is learnt as often as it is there: 4.png, copy.jpg" in said
    assert "225 updates of 4: 9 images 100 times each" in said
    assert "of this machine's memory, and 700 MB for the programs, computed" in said
    assert said.splitlines()[-1].strip() == "daguerre train dogs.yaml"
    written = Path("dogs.yaml").read_text()
    assert "learning_rate: 0.0002  # Peak learning rate" in written
    config = configs.load("dogs.yaml").config
    shipped = configs.load("./tiny.yaml", ["data.source=folder", "data.path=dogs", "run_name=dogs"]).config
    changed = {change.path: change.new for change in configs.diff(shipped, config)}
    prompts = changed.pop("sampling.prompts")
    drawn = {"sampling.num_images": 8, "validation.compared_images": 20}
    assert changed == {"optimizer.learning_rate": 2e-4, "checkpoint.keep": 5, **drawn}
    assert len({*prompts}) == 8
    assert {"a photo of sks dog", "a photo of sks dog running", "a photo of sks dog, on a beach"} <= {*prompts}
    assert main.run(["train", "dogs.yaml", "--dry-run"]) == 0
    assert "900 samples" in capsys.readouterr().out


def test_what_cannot_be_is_refused_and_nothing_is_written(place, capsys):
    Path("mine.yaml").write_text("run_name: mine")
    assert "mine.yaml exists and is left as it is" in refused(capsys, "init", "dogs", "-o", "mine.yaml")
    assert Path("mine.yaml").read_text() == "run_name: mine"
    assert "one folder of images, you gave dogs cats" in refused(capsys, "init", "dogs", "cats")
    assert "there is nothing at 'cats'" in refused(capsys, "init", "cats")
    said = refused(capsys, "init", "dogs", "base=sdxl")
    assert "base=sdxl is no recipe of a LoRA for own images: give one of sdxl_lora," in said
    assert "or the folder of a run that trained a whole network" in said
    for path in Path("dogs").glob("*.txt"):
        path.unlink()
    assert "one caption for all images: data.captions.text=" in refused(capsys, "init", "dogs", "base=./tiny.yaml")
    assert sorted(Path().glob("*.yaml")) == [Path("mine.yaml"), Path("tiny.yaml")]
    assert "is a folder of images: `daguerre init dogs`" in refused(capsys, "train", "dogs")


def test_a_run_of_ones_own_is_the_base(place, capsys, tiny_sd, monkeypatch):
    given = ["data.source=folder", "data.path=dogs", "training.duration=1 steps", "data.resolution=32", "run_name=own"]
    quick = ["loader.num_workers=0", "lr_scheduler.warmup=0 steps", "sampling.num_images=0"]
    given += [*quick, "training.global_batch_size=4", "training.weights_dtype=float32"]
    given += ["objective.name=v", "objective.schedule.zero_terminal_snr=true", "sampling.guidance_scale=3.5"]
    given += ['sampling.prompts=["a red car", "a photo of sks dog"]']
    model = f"model.pretrained_model_name_or_path={tiny_sd}"
    assert main.run(["train", "sd15", model, *given]) == 0
    assert main.run(["init", "dogs", "base=runs/own", "optimizer.learning_rate=3e-4"]) == 0
    said = capsys.readouterr().out
    assert "runs/own/pipeline, by the settings of the recipe sd15_lora; as the model is small, rate," in said
    assert "downloads" not in said
    config = configs.load("dogs.yaml").config
    assert config.model.pretrained_model_name_or_path == "runs/own/pipeline"
    assert (config.objective.name, config.objective.schedule.zero_terminal_snr) == ("v", True)
    assert (config.data.resolution, config.sampling.guidance_scale) == (32, 3.5)
    assert (config.training.weights_dtype, config.optimizer.learning_rate) == ("float32", 3e-4)
    assert (config.loader.num_workers, config.training.per_device_batch_size) == (0, None), "as the base was trained"
    assert config.sampling.prompts[-1] == "a red car", "what the base knows, and no scene or caption twice"
    assert len({*config.sampling.prompts}) == len(config.sampling.prompts) > 2
    assert "teach blur" not in said
    assert [*config.adapters] == ["lora"]
    (lora,), batch = config.adapters.values(), config.training.global_batch_size
    assert (lora.targets, lora.rank, batch, config.ema.enabled) == ("attention+ff+conv", 16, 16, True)
    assert (config.lr_scheduler.name, config.ema.decay, config.data.random_flip) == ("linear", 0.98, True)
    measured = configs.load("emoji_lora", ["data.font=x"]).config
    assert (measured.adapters["lora"].targets, measured.ema.decay) == (lora.targets, config.ema.decay)
    monkeypatch.setattr(own_base, "_SMALL_BYTES", 0)
    assert main.run(["init", "dogs", "base=runs/own", "-o", "large.yaml"]) == 0
    assert "recipe sd15_lora\n" in capsys.readouterr().out
    large = configs.load("large.yaml").config
    assert (large.optimizer.learning_rate, large.training.per_device_batch_size) == (1e-4, None), "as the base was"
    once = ["training.duration=1 steps", "validation.compared_images=0"]
    assert main.run(["train", "dogs.yaml", *quick, *once]) == 0
    assert "base=runs/dogs has no pipeline/ to train a LoRA on" in refused(
        capsys, "init", "dogs", "base=runs/dogs", "-o", "again.yaml"
    )


def test_a_pipeline_is_the_base(place, capsys, tiny_sd):
    assert main.run(["init", "dogs", f"base={tiny_sd}", "data.resolution=32", "-o", "pipe.yaml"]) == 0
    assert "teach blur" not in capsys.readouterr().out, "96 px at 32"
    assert main.run(["init", "dogs", f"base={tiny_sd}", "data.resolution=192", "-o", "large.yaml"]) == 0
    assert "half of them have the area of 96 x 96 px or less, and data.resolution=192 is trained: enlarged so much" in (
        capsys.readouterr().out
    )
    config = configs.load("pipe.yaml").config
    assert config.model.pretrained_model_name_or_path == str(tiny_sd)
    assert config.objective.name == "eps"


def test_the_base_is_one_that_is_on_this_machine(monkeypatch):
    monkeypatch.setattr(init.resolve, "here", lambda place, options: None)
    places = init._bases()
    assert init._chosen(None, places, init._here(places)) == init.USUAL
    there = {places["z_image_lora"], places["krea2_lora"]}
    monkeypatch.setattr(init.resolve, "here", lambda place, options: Path() if place in there else None)
    here = init._here(places)
    chosen = init._chosen(None, places, here)
    lines = init._about_base(chosen, places[chosen], places, here, False)
    assert (chosen, lines[-1]) == ("krea2_lora", "also on this machine: base=z_image_lora")


def test_bases_are_loras_of_own_images_alone():
    suitable = [*init._bases()]
    assert suitable[0] == init.USUAL
    assert {"sd15_lora", "z_image_lora", "anima_lora", "cascade_c_lora"} <= {*suitable} <= {*recipe.shipped()}
    assert not {"sdxl_lcm_lora", "sd15_dpo_lora", "flux2_klein_edit_lora", "quickstart_lora", "sdxl"} & {*suitable}


def test_prompts_of_many_captions_share_few_words():
    captions = [
        f"{animal} {place}" for animal in ("cat", "dog", "cow", "owl") for place in ("at home", "in a wood", "")
    ]
    prompts = init.sample_prompts(captions)
    assert len({*prompts}) == 8
    assert {word for prompt in prompts for word in prompt.split()} >= {"cat", "dog", "cow", "owl", "home", "wood"}


def changed(image: Image.Image) -> list[Image.Image]:
    """The image as other programs and cameras would save it again."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=40)
    lighter = ImageEnhance.Brightness(image).enhance(1.15)
    side_px = image.width
    moved = image.crop((1, 1, side_px, side_px))
    return [Image.open(buffer), image.resize((side_px // 3, side_px // 3)), lighter, moved]


def test_near_duplicates_are_found_and_others_are_not():
    images = [picture(seed) for seed in range(300)]
    images += [other for image in images[:3] for other in changed(image)]
    images += [Image.new("RGB", (50, 50), color) for color in ("red", "blue", "gray", "white")]
    copies = np.stack([duplicates.small_copy(np.asarray(image.convert("RGB"))) for image in images])
    assert duplicates.groups(copies) == [[i, *range(300 + 4 * i, 304 + 4 * i)] for i in range(3)]
