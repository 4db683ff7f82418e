"""DreamBooth by the recipe of any base: objective and resolution are the base's, all else DreamBooth's own."""

import json

import numpy as np
import pytest
from PIL import Image
from tiny_models import write_sd, write_sdxl

from daguerre import errors
from daguerre.cli import main
from daguerre.config import config, recipe
from daguerre.config.errors import ConfigError

BASES = {
    # recipe: (objective, resolution, learning rate)
    "sd14": ("eps", 512, 5e-6),
    "sd15": ("eps", 512, 5e-6),
    "sd2_base": ("eps", 512, 5e-6),
    "sd21": ("v", 768, 5e-6),
    "sdxl": ("eps", 1024, 2e-6),
}
SETS = ["instance_data_dir=my dog", "instance_prompt=a photo of sks dog"]
SHORT = [
    "data.resolution=16",
    "num_class_images=3",
    "sampling.num_inference_steps=2",
    "sampling.num_images=0",
    "training.duration=1 steps",
    "checkpoint.export=false",
    "loader.num_workers=0",
    "logging.tensorboard=false",
]


def tiny(name, place):
    """A tiny base of the kind of a recipe's."""
    write = write_sdxl if name == "sdxl" else write_sd
    return write(place / "base", **({"version": 2} if name == "sd21" else {}))


@pytest.fixture
def given(tmp_path):
    (tmp_path / "instance").mkdir()
    for i in range(2):
        pixels = np.random.default_rng(i).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "instance" / f"{i}.png")
    return [f"instance_data_dir={tmp_path / 'instance'}", SETS[1], f"output_dir={tmp_path / 'out'}", *SHORT]


@pytest.mark.parametrize("name", BASES)
def test_objective_and_resolution_are_the_recipes_and_the_rest_is_dreambooths(name):
    loaded = config.load(name, SETS)
    own, plain = loaded.config, config.load(name).config
    family = config.load("sdxl_dreambooth" if name == "sdxl" else "sd15_dreambooth").config
    assert (own.objective.name, own.data.resolution, own.optimizer.learning_rate) == BASES[name]
    assert (own.model, own.objective) == (plain.model, plain.objective)
    assert (own.training, own.sampling.sampler, own.ema) == (family.training, family.sampling.sampler, family.ema)
    instance, others = own.data.sources.values()
    assert (instance.path, instance.captions.text) == ("my dog", "a photo of sks dog")
    assert others.path == f"runs/class_images/{name}/a photo of a dog/200"
    assert (own.run_name, config.peek(name, SETS)[1]) == (f"{name}_dreambooth",) * 2
    assert any(f"instance_data_dir: this is DreamBooth, so the recipe {'sdxl' if name == 'sdxl' else 'sd15'}" in line
               for line in loaded.notices)  # fmt: skip


@pytest.mark.long  # of the quick tests, test_class_images.py draws, ../test_recipes_train.py trains
@pytest.mark.parametrize("name", BASES)
def test_it_trains(name, given, tmp_path):
    base = tiny(name, tmp_path)
    command = ["train", name, *given, f"pretrained_model_name_or_path={base}"]
    assert main.run(command) == errors.DONE
    run = config.load(str(tmp_path / "out" / f"{name}_dreambooth")).config
    assert (run.objective.name, run.model.pretrained_model_name_or_path) == (BASES[name][0], str(base))
    assert len(list((tmp_path / "out" / "class_images" / name).rglob("*.png"))) == 3
    assert main.run([*command, "training.duration=2 steps"]) == errors.DONE, "the same command goes on"


@pytest.mark.parametrize("dry", [pytest.param([], marks=pytest.mark.long), ["--dry-run"]])
def test_a_base_that_predicts_something_else_is_refused_unless_nothing_is_compared(given, tmp_path, capsys, dry):
    """With class images at hand, too: nothing has to be drawn then, and the weights are as wrong."""
    place = tmp_path / "class"
    place.mkdir()
    for i in range(3):
        Image.new("RGB", (16, 16), (i, 0, 0)).save(place / f"{i}.png")
    base = tiny("sd21", tmp_path)
    command = ["train", "sd2_base", *given, f"pretrained_model_name_or_path={base}", f"class_data_dir={place}", *dry]
    assert main.run(command) == errors.REFUSED
    said = " ".join(capsys.readouterr().err.split())
    assert "the pretrained network predicts v_prediction (objective.name=v), this recipe trains eps" in said
    assert "objective of the base model, as in brackets, or set model.scheduler=null" in said
    assert main.run([*command, "model.scheduler=null"]) == errors.DONE
    if dry:  # what it trains otherwise, no run needs to show
        assert main.run([*command, "objective.name=v", "run_name=other"]) == errors.DONE


def test_other_recipes_are_left_alone(tmp_path):
    assert config.load("sd15_dreambooth", SETS).config.run_name == "sd15_dreambooth"
    mixed = ["data.source=mix", "data.resolution=64", "data.sources.instance.source=folder"]
    assert config.load("quickstart", [*mixed, "data.sources.instance.path=DIR"]).config.run_name == "quickstart"
    for name in ("quickstart", "sdxl_lightning", "quickstart_vae"):
        with pytest.raises(ConfigError, match="the sets `instance` and `class` are in sd15_dreambooth"):
            config.load(name, SETS)
    trained = tmp_path / "run" / recipe.FOLDER.name
    trained.mkdir(parents=True)
    (trained / "config.yaml").write_text(config.dump(config.load("sd14").config))
    with pytest.raises(ConfigError, match="the sets `instance` and `class`"):
        config.load(str(trained), SETS)


@pytest.mark.parametrize("name", ["sd15_lora", "sdxl_lora"])
def test_a_lora_keeps_what_it_is_trained_with(name):
    """The learning rate of all weights would teach it nothing, and its base need not be stored in 32 bits."""
    loaded = config.load(name, SETS)
    own, plain = loaded.config, config.load(name).config
    assert own.adapters == plain.adapters
    assert own.optimizer.learning_rate == plain.optimizer.learning_rate == 1e-4
    for setting in ("weights_dtype", "frozen_precision", "per_device_batch_size"):
        assert getattr(own.training, setting) == getattr(plain.training, setting)
    assert (own.training.duration, own.training.global_batch_size) == ("800 steps", 2)
    assert any("the adapters, their learning rate and the resolution of" in line for line in loaded.notices)


def test_a_recipe_of_ones_own_says_base_and_name(tmp_path):
    mine = {"extends": "sd21", "run_name": "mine", "seed": 7, "optimizer": {"learning_rate": 1}}
    (tmp_path / "my.yaml").write_text(json.dumps(mine))
    own = config.load(str(tmp_path / "my.yaml"), [*SETS, "optimizer.learning_rate=2e-6"]).config
    assert (own.run_name, own.seed, own.objective.name, own.data.resolution) == ("mine_dreambooth", 7, "v", 768)
    assert own.optimizer.learning_rate == 2e-6
    assert own.data.sources["class"].path.startswith("runs/class_images/my/")
