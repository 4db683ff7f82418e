"""Runs, recipes and pipelines as models: load, generate, train, plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from daguerre.assembly.parts import Components
from daguerre.checkpoint.store import Checkpoint
from daguerre.cli import generate as command
from daguerre.cli import plan as planning
from daguerre.cli import train as training
from daguerre.cli.options import generate_options
from daguerre.config import config as configs
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.generation import generate as images
from daguerre.generation import load as loading
from daguerre.generation import prompts as texts
from daguerre.library.runs import folder_of

_OF_FILES = ("prompt", "prompts_file", "out", "format", "quality", "shard", "shard_image", "shard_samples")
_OF_LOADING = ("base", "use", "controlnets", "weights", "resume_from_checkpoint", "output_dir", "run_name")
_OF_LOADING_SECTIONS = ("training.", "model.", "objective.")


@dataclass(frozen=True)
class Model:
    """Networks of a run, of a recipe's base or of a pipeline, ready to generate with. `load` makes it."""

    place: str
    """What was given to `load`."""
    settings: tuple[str, ...]
    """The settings that were given with it."""
    config: Config
    """All settings, checked: `model.config.objective.name`."""
    description: str
    """The checkpoint and its weights, for people."""
    parts: Components
    """The networks as the rest of the code has them; not promised."""

    def generate(self, prompts: str | Sequence[str], *settings: str) -> list[Image.Image]:
        """The images of each prompt, [H, W] RGB, in their order.

        `settings` are those of `daguerre generate` that say what an image is of or how it is sampled: "num_images=4",
        "seed=7", "sampler=heun", "guidance_scale=3", "image=car.png" ... Image i of all starts from the noise of
        seed + i alone. UserError for settings that `load` takes, for files, and for what the model cannot.
        """
        asked = generate_options.read([self.place, *self.settings, *settings])
        for name in {setting.partition("=")[0] for setting in settings}:
            if name in _OF_FILES or name in _OF_LOADING or name.startswith(_OF_LOADING_SECTIONS):
                where = "is for the command" if name in _OF_FILES else "is for daguerre.load"
                raise UserError(f"{name} {where}: Model.generate takes how images are sampled", code="unused")
        listed = [prompts] if isinstance(prompts, str) else [*prompts]
        given = texts.inline(listed, asked.options.interpolate_to)
        requests = command.requests_of(asked, given)
        survey = requests.survey()
        steering = command.steering_of(asked, survey, self.parts)
        made = images.generate(self.parts, asked.config.sampling, requests, steering=steering)
        found = {image.request.number: Image.fromarray(image.pixels_HWC) for image in made}
        return [found[number] for number in sorted(found)]


def load(place: str | Path, *settings: str) -> Model:
    """The model of a run folder, a recipe, a pipeline or OWNER/NAME of the hub, as `daguerre generate` reads it.

    `settings` are those that say which weights and where: "weights=raw", "resume_from_checkpoint=step-00001000",
    "use={style.safetensors: 0.8}", "training.device=cpu". UserError for what is not there.
    """
    asked = generate_options.read([str(place), *settings])
    chosen = command.chosen(asked)
    return Model(str(place), settings, asked.config, chosen.description, chosen.parts())


def train(recipe: str | Path, *settings: str) -> Path:
    """Trains a recipe as `daguerre train` does, and gives the run's folder. The same call continues a run that was
    stopped. Progress is printed; interrupting (a notebook's stop button) saves, and is a UserError that says so."""
    config = configs.load(str(recipe), settings).config
    if code := training.run([str(recipe), *settings]):
        raise UserError(f"the training ended with exit code {code}; the same call continues it")
    return Path(config.output_dir) / config.run_name


def plan(recipe: str | Path, *settings: str) -> dict[str, Any]:
    """The memory of each device in training, in bytes, as `daguerre plan RECIPE --json` prints it (docs/json.md).

    `settings` are those of the recipe and of the command: "card=24GB", "devices=8". No device is needed. UserError.
    """
    return planning.document(str(recipe), settings)


def read_checkpoint(run: str | Path, name: str = "latest") -> Checkpoint:
    """A checkpoint of a run, every byte verified: `documents` by name (`state` has the step) and `tensors` by group
    (`model`, `ema`) and name. `latest` is the newest one that is as it was saved. UserError."""
    return loading.newest(folder_of(run), name)
