"""`daguerre generate`: draws pictures from prompts with the newest weights of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from daguerre import config as configs
from daguerre import overrides
from daguerre.checkpoint.run_folder import RunFolder
from daguerre.checkpoint.store import Checkpoint, Store
from daguerre.commands import pictures
from daguerre.commands.parts import Parts, build
from daguerre.config import Config
from daguerre.errors import UserError
from daguerre.recipe import shipped
from daguerre.samplers.settings import SamplingSettings
from daguerre.training.state import load_weights

SUMMARY = "draw pictures from prompts with a trained run"
HELP = """\
usage: daguerre generate RUN prompt="..." [key=value ...]

Draws pictures with the newest checkpoint of a run, by its averaged weights if it keeps them. RUN is a run folder; a
recipe stands for the run that `daguerre train` makes of it (output_dir= and run_name= as there).

  daguerre generate runs/quickstart prompt="a small green star on a white background" num_images=4 seed=7
  daguerre generate runs/quickstart prompts_file=prompts.txt out=pictures sampler=dpmpp_2m num_inference_steps=20
  daguerre generate quickstart run_name=mine prompt="a large red circle on a blue background"

  prompt=TEXT            what to draw
  prompts_file=FILE      UTF-8 text with one prompt a line; without prompts, those of the recipe are drawn
  negative_prompt=TEXT   what to lead away from
  num_images=N           pictures of each prompt (1)
  seed=N                 picture i of all starts from the noise of seed + i alone, whatever the batch size
  out=FOLDER             a new or empty folder (default: RUN/generated/PROMPT)
  sampler, num_inference_steps, guidance_scale, guidance_rescale, eta, timestep_spacing, batch_size
                         as the run's recipe has them in `sampling`
  resume_from_checkpoint=NAME    another checkpoint than the newest, such as step-00001000
  training.device=cpu            where to compute

Writes 000.png, 001.png ... and samples.json, which says how each was made.
"""

_OWN = ("prompt", "prompts_file", "out")
_PLACE = ("output_dir", "run_name")
_SAMPLING = tuple(name for name in SamplingSettings.model_fields if name != "prompts")
_MAY_CHANGE = ("sampling.", "training.device", "training.mixed_precision", "resume_from_checkpoint")


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    folder: RunFolder
    config: Config
    notices: Sequence[str]
    prompts: list[str]
    """One a picture."""
    out: Path


def run(arguments: list[str]) -> int:
    """Draws what the command line asks for; 0, or a UserError."""
    request = read(arguments)
    for notice in request.notices:
        print(notice)
    checkpoint = newest(request.folder, request.config.resume_from_checkpoint)
    parts = load(request.config, checkpoint)
    sampling, resolution = request.config.sampling, request.config.data.resolution
    made_with = {"checkpoint": checkpoint.name, "step": checkpoint.documents["state"]["step"]}
    made_with |= {"run": str(request.folder.path)}
    count = len(request.prompts)
    print(f"drawing {count} picture{'s' * (count != 1)} of {resolution}x{resolution} px with {checkpoint.name}")
    paths = pictures.write_pictures(parts, resolution, sampling, request.prompts, request.out, made_with)
    for index, how in parts.family.cut(request.prompts).items():
        print(f"picture {index}: its prompt is {how}")
    print(f"{paths[0]}" + (f" ... {paths[-1].name}" if count > 1 else "") + f", {pictures.LISTING} beside")
    return 0


def read(arguments: Sequence[str]) -> Request:
    """The run, its config with the sampling settings that were asked for, the prompts and the place for pictures."""
    given = overrides.split(arguments)
    pairs = [overrides.pair(override) for override in given.overrides]
    own = {key: text for key, text in pairs if key in _OWN}
    folder = find_run(given.recipe, [f"{key}={text}" for key, text in pairs if key in _PLACE])
    changes = [
        f"sampling.{key}={text}" if key in _SAMPLING else f"{key}={text}"
        for key, text in pairs
        if key not in _OWN + _PLACE
    ]
    asked = {key.removeprefix("sampling.") for key, _ in pairs}
    if "num_images" not in asked:
        changes.append("sampling.num_images=1")
    loaded = configs.load(str(folder.path), changes)
    refuse_other_changes(folder, loaded.config)
    prompts = read_prompts(own, loaded.config.sampling)
    sampling = loaded.config.sampling
    each = [prompt for prompt in prompts for _ in range(sampling.num_images)]
    if not each:
        raise UserError("num_images=0: there is nothing to draw")
    name = Path(own["prompts_file"]).stem if "prompts_file" in own else prompts[0]
    return Request(folder, loaded.config, loaded.notices, each, place(own.get("out"), folder, name))


def find_run(target: str, place_of_run: Sequence[str]) -> RunFolder:
    """The folder of the run that is meant. UserError if no run was begun there."""
    known = ", ".join(shipped())
    if not target:
        raise UserError(f"which run? Give a run folder, such as runs/quickstart, or a recipe ({known})")
    if Path(target).is_dir() and target not in shipped():
        if place_of_run:
            raise UserError(f"{target} is a run folder: {' '.join(place_of_run)} would have no effect, leave it out")
        folder = RunFolder(Path(target))
        if not folder.config.is_file():
            raise UserError(f"{target} is no run folder: it has no config.yaml. {_instead_of(folder.path)}")
        return folder
    output_dir, run_name = configs.peek(target, place_of_run)
    folder = RunFolder(Path(output_dir) / run_name)
    if not folder.config.is_file():
        raise UserError(
            f"there is no run in {folder.path}: train one with `daguerre train {target}`, or give its folder"
        )
    return folder


def _instead_of(path: Path) -> str:
    if not (path / "model_index.json").is_file():
        return "Give a run's folder or a recipe"
    if RunFolder(path.resolve().parent).config.is_file():
        return f"It is the pipeline of a run: give the run, {path.resolve().parent}"
    return "It is a diffusers pipeline: open it with StableDiffusionPipeline.from_pretrained, its README.md says how"


def refuse_other_changes(folder: RunFolder, config: Config) -> None:
    """UserError for settings that were given but are fixed by the run, or mean nothing here."""
    trained = configs.load(str(folder.path)).config
    paths = [change.path for change in configs.diff(trained, config) if not change.path.startswith(_MAY_CHANGE)]
    if paths:
        raise UserError(
            f"{', '.join(paths)}: fixed when {folder.path} was trained, or without effect on pictures; `generate` "
            f"takes {', '.join([*_OWN, *_SAMPLING, *_MAY_CHANGE[1:]])}"
        )


def read_prompts(own: dict[str, str], sampling: SamplingSettings) -> list[str]:
    """The prompts of the command line, of the file that it names, or of the recipe."""
    if "prompt" in own and "prompts_file" in own:
        raise UserError("prompt and prompts_file were both given: choose one")
    if "prompt" in own:
        return [own["prompt"]]
    if "prompts_file" not in own:
        if not sampling.prompts:
            raise UserError('what shall be drawn? Give prompt="..." or prompts_file=FILE (one prompt a line)')
        return sampling.prompts
    path = Path(own["prompts_file"])
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts_file={path} cannot be read as UTF-8 text: {error}") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"prompts_file={path} holds no prompt: write one a line")
    return prompts


def place(out: str | None, folder: RunFolder, name: str) -> Path:
    """A folder that holds nothing yet: the one that was asked for, or a new one in the run, named after the prompt."""
    if out is not None:
        path = Path(out)
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise UserError(
                f"out={out} exists and is not an empty folder; pictures are never overwritten: choose another"
            )
        return path
    slug = re.sub(r"\W+", "-", name.lower()).strip("-")[:60].strip("-") or "empty"
    base, number = folder.path / "generated", 1
    while (path := base / (slug if number == 1 else f"{slug}-{number}")).exists():
        number += 1
    return path


def newest(folder: RunFolder, name: str) -> Checkpoint:
    """The newest checkpoint whose every byte is as saved, or the one of this name. UserError if there is none."""
    store = Store(folder.checkpoints)
    if name != "latest":
        if name not in store.names():
            raise UserError(
                f"{folder.path} has no checkpoint {name!r}; it has: {', '.join(store.names()) or 'none yet'}"
            )
        return store.load(folder.checkpoints / name)
    found = store.newest_verified()
    for notice in found.notices:
        print(notice)
    if found.path is None:
        raise UserError(
            f"{folder.path} has no checkpoint yet: wait for its first save, or go on with "
            f"`daguerre train {folder.path}`"
        )
    return store.load(found.path)


def load(config: Config, checkpoint: Checkpoint) -> Parts:
    """The parts with the checkpoint's weights, the averaged ones where it has them, ready to draw."""
    parts = build(config)
    weights = checkpoint.tensors["model"] | checkpoint.tensors.get("ema", {})
    load_weights(parts.net, weights)
    parts.objective.load_state(checkpoint.tensors.get("objective", {}))
    parts.net.eval()
    return parts
