"""Look at what a checkpoint predicts: noise, velocity, speed or EDM's F.

usage: daguerre probe MODEL [key=value ...]

Gives 16 images with known noise to the denoiser of a model, as each kind of training would, and compares how well it
finds the images again. `train` does the same before its first update where no file says what the weights predict.

  daguerre probe model.safetensors data.path=my_images
  daguerre probe Laxhar/noobai-XL-Vpred-1.0 data.path=my_images
  daguerre probe noobai_v data.source=folder data.path=my_images

MODEL is a pipeline's folder, a single-file checkpoint, a model of the hub (OWNER/NAME or OWNER/NAME/FILE.safetensors),
or a recipe, whose base is looked at. A run's folder stands for its newest checkpoint. Images are best of the kind that
the model knows, with captions. Settings of a recipe may be given, such as data.resolution.

error: squared error of the denoised image, in units of that of a denoiser which only scales and shifts. A kind that is
not the model's has 1 and more, and so has one with random weights. docs/sdxl-descendants.md says more.
"""

from pathlib import Path

from daguerre.config import overrides, recipe
from daguerre.config.config import Config
from daguerre.data.dataset import open_dataset
from daguerre.errors import DONE, UserError
from daguerre.families.pretrained import catalogue
from daguerre.generation import load
from daguerre.models.components import ComponentLoader
from daguerre.models.settings import SINGLE_FILES, ProbedSettings
from daguerre.models.weights import index, resolve
from daguerre.models.weights.files import read_json
from daguerre.remote import local_copy
from daguerre.run import probe

_DATA = ("data.path", "data.source", "data.name", "path", "source")


def run(arguments: list[str]) -> int:
    """Exit code 0, also where the kind is not clear. UserError for what cannot be looked at."""
    given = overrides.split(arguments)
    if not given.recipe:
        raise UserError("give a model: a folder, a file, OWNER/NAME of the hub, or a recipe", code="missing")
    place = _place(given.recipe)
    is_run = (local_copy.located(place) / "config.yaml").is_file()
    model = load.find(place, [], base=not is_run, given=given.overrides)
    named = {overrides.pair(each)[0] for each in given.overrides}
    if model.kind == "pipeline" and not named & {*_DATA}:
        raise UserError(
            "give images of the kind that the model knows: data.path=FOLDER, captions in NAME.txt for NAME.jpg",
            code="missing",
            setting="data.path",
        )
    loaded = model.config(given.overrides)
    config = loaded.config
    _check(config)
    chosen = load.choose(model, config, None)
    for notice in loaded.notices:
        print(notice)
    parts = chosen.parts()
    dataset = open_dataset(config.data, "train", parts.images, parts.columns)
    found = probe.of_dataset(config, parts, dataset)
    if found is None:
        raise UserError(f"{probe.TOO_FEW}: give more images", code="empty")
    levels = ", ".join(map(str, probe.LEVELS))
    print(f"{chosen.description}: {found.images} images, each at the noise levels s/a of {levels}\n")
    print("\n".join([*found.lines(), "", found.verdict()]))
    return DONE


def _place(target: str) -> str:
    """A recipe, or a path on this machine: what is of the hub is downloaded, unless it is in the local cache."""
    if target in recipe.shipped() or Path(target).exists() or target.endswith((".yaml", ".yml")):
        return target
    if target.endswith(SINGLE_FILES):
        return str(resolve.file(target, resolve.Options()))
    folder = resolve.locate(target, {}, resolve.Options())
    told = index.find(folder)
    family = catalogue.pipelines().get(str(read_json(told).get("_class_name"))) if told else None
    if family is None:
        raise UserError(
            f"{target} is no pipeline of a family that is known here: give one of its files", code="unknown"
        )
    settings = catalogue.pretrained()[family].model_validate(
        {"family": family, "pretrained_model_name_or_path": target}
    )
    return str(resolve.locate(target, ComponentLoader(settings, 0).of_base(), resolve.Options()))


def _check(config: Config) -> None:
    """UserError for a family whose weights all predict the same."""
    if not isinstance(config.model, ProbedSettings):
        raise UserError(
            f"published weights of model.family={config.model.family} all predict the same: there is nothing to tell",
            code="unsupported",
            setting="model.family",
        )
