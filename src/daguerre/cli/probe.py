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

from daguerre.config import overrides
from daguerre.config.config import Config
from daguerre.data.dataset import open_dataset
from daguerre.errors import DONE, UserError
from daguerre.generation import hub_models, load
from daguerre.models.settings import ProbedSettings
from daguerre.remote import local_copy
from daguerre.run import probe

_DATA = ("data.path", "data.source", "data.name", "path", "source")


def run(arguments: list[str]) -> int:
    """Exit code 0, also where the kind is not clear. UserError for what cannot be looked at."""
    given = overrides.split(arguments)
    if not given.recipe:
        raise UserError("give a model: a folder, a file, OWNER/NAME of the hub, or a recipe", code="missing")
    place = hub_models.place(given.recipe)
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


def _check(config: Config) -> None:
    """UserError for a family whose weights all predict the same."""
    if not isinstance(config.model, ProbedSettings):
        raise UserError(
            f"published weights of model.family={config.model.family} all predict the same: there is nothing to tell",
            code="unsupported",
            setting="model.family",
        )
