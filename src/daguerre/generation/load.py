"""What `generate` draws with: a run's checkpoint, the pretrained networks of a recipe as they are, or a pipeline.

Nothing stands in for another in silence: which of them it is, is asked for or said.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from daguerre.build import base_digests
from daguerre.build.parts import Parts, build
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.checkpoint.store import Checkpoint, Store
from daguerre.config import config as configs
from daguerre.config import recipe
from daguerre.config.config import Config
from daguerre.config.errors import ConfigError
from daguerre.config_import import in_memory
from daguerre.errors import UserError
from daguerre.families import catalogue
from daguerre.models.settings import BASE, SINGLE_FILES
from daguerre.models.single_file import load as single_file_load
from daguerre.remote import local_copy
from daguerre.storage import address
from daguerre.training.state import load_weights

_OBJECTIVES = {"epsilon": "eps", "v_prediction": "v", "sample": "x0"}


@dataclass(frozen=True)
class Model:
    """Networks that can be asked for, and what is known of them before any weight is read."""

    kind: str
    """`run`, `base` or `pipeline`."""
    name: str
    """What it was called on the command line."""
    source: str | recipe.Tree
    """What `config.load` takes (a run folder, a recipe), or the recipe itself."""
    home: Path
    """Folder for pictures where the command names none."""
    defaults: tuple[str, ...] = ()
    """Settings that the source lacks, as overrides."""
    run: RunFolder | None = None
    trained: Config | None = None
    """Of a run: its config, without what the command says."""

    def config(self, given: Sequence[str]) -> configs.Loaded:
        """The config with the command's settings."""
        if isinstance(self.source, str):
            return in_memory.load(self.source, [*self.defaults, *given])
        with tempfile.TemporaryDirectory(prefix="daguerre-generate-") as folder:
            path = Path(folder) / "pipeline.yaml"
            path.write_text(json.dumps(self.source), encoding="utf-8")
            try:
                return configs.load(str(path), given)
            except ConfigError as error:  # the file that was just written tells nobody anything
                raise ConfigError(error.problems, self.name) from None


@dataclass(frozen=True)
class Loading:
    """Weights that were chosen."""

    said: str
    """For people."""
    made_with: dict[str, Any]
    """For the JSON of each picture, and for telling one request from another."""
    parts: Callable[[], Parts]


def find(target: str, place: Sequence[str], base: bool) -> Model:
    """What is meant by the command's bare word. UserError where there is nothing to draw with."""
    if not target:
        known = ", ".join(recipe.shipped())
        raise UserError(f"which run? Give a run folder, such as runs/quickstart, or a recipe ({known})")
    folder = local_copy.located(target)
    if folder.is_file() and folder.suffix in SINGLE_FILES:
        return _of_file(target, folder, place)
    if not folder.is_dir() or target in recipe.shipped():
        return _of_recipe(target, place, base)
    if place:
        raise UserError(f"{target} is a folder: {' '.join(place)} would have no effect, leave it out")
    if (folder / "config.yaml").is_file():
        return _base(target, str(folder), folder) if base else _of_run(target, RunFolder(folder))
    if (folder / "model_index.json").is_file():
        return _of_pipeline(target, folder, folder.resolve().name)
    raise UserError(
        f"{target} is no run folder (it has no config.yaml) and no pipeline (no model_index.json): give a run's "
        "folder, a diffusers pipeline or a recipe"
    )


def _of_recipe(target: str, place: Sequence[str], base: bool) -> Model:
    try:
        output_dir, run_name = in_memory.peek(target, place)
    except ConfigError:
        if not base:
            raise
        output_dir, run_name = in_memory.peek(target, [*place, f"run_name={Path(target).stem}"])
    if address.is_far(output_dir) and base:  # pictures are written to this machine
        output_dir = "runs"
    folder = RunFolder(local_copy.located(f"{output_dir.rstrip('/')}/{run_name}"))
    if folder.config.is_file() and not base:
        return _of_run(target, folder)
    # A recipe whose run takes no updates is there for drawing with the networks as they are.
    if not base and not _trains_nothing(target):
        raise UserError(
            f"there is no run in {folder.path}: train one with `daguerre train {target}`, give the folder of another, "
            "or say base=true to draw with the pretrained networks as they are"
        )
    return _base(target, target, Path(output_dir) / run_name, (f"output_dir={output_dir}", f"run_name={run_name}"))


def _trains_nothing(target: str) -> bool:
    tree: recipe.Tree = {}
    for layer in [] if in_memory.is_one(target) else recipe.layers(target):
        tree = recipe.merge(tree, layer.tree)
    return str(recipe.get(tree, "training.duration")).split()[:1] == ["0"]


def _of_run(target: str, folder: RunFolder) -> Model:
    trained = configs.load(str(folder.path)).config
    run = local_copy.origin(folder.path)
    home = folder.path / "generated" if run is None else Path("runs") / "generated" / run.last
    return Model("run", target, str(folder.path), home, (), folder, trained)


def _base(target: str, source: str, folder: Path, defaults: tuple[str, ...] = ()) -> Model:
    return Model("base", target, source, folder.parent / "generated" / folder.name, defaults)


def _of_file(target: str, file: Path, place: Sequence[str]) -> Model:
    """A single-file checkpoint, as the pipeline that it is made into once. A pickled one is not read without being
    asked for: a recipe says model.pickled_weights."""
    if place:
        raise UserError(f"{target} is a file: {' '.join(place)} would have no effect, leave it out")
    folder = single_file_load.folder(file, pickled=False)
    if not (folder / "model_index.json").is_file():
        held = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise UserError(
            f"{target} holds {held} alone: give a recipe for the rest, such as `daguerre generate sd15 base=true "
            f"model.{held.partition(',')[0]}={target}`"
        )
    return _of_pipeline(target, folder, file.stem)


def _of_pipeline(target: str, folder: Path, name: str) -> Model:
    """A pipeline in diffusers' layout: its scheduler says what the network predicts, and at which noise levels."""
    above = RunFolder(folder.resolve().parent)
    if above.config.is_file():
        raise UserError(
            f"{target} is the pipeline of a run: give the run, {local_copy.shown(above.path)}, whose recipe knows how "
            "to draw"
        )
    class_name = _json(folder / "model_index.json").get("_class_name")
    families = catalogue.pipelines()
    if class_name not in families:
        raise UserError(f"{target} is a {class_name}; what is drawn with: {', '.join(families)}")
    family = catalogue.pretrained()[families[class_name]]
    (denoiser,), (autoencoder,) = (
        [_json(folder / name / "config.json") for name in family.networks(role)] for role in ("denoiser", "autoencoder")
    )
    factor = 2 ** (len(autoencoder.get("block_out_channels", [0] * 4)) - 1)
    tree = {
        "run_name": name,
        "model": {"family": families[class_name], "pretrained_model_name_or_path": str(folder.resolve())},
        "objective": _objective(target, _json(folder / "scheduler" / "scheduler_config.json")),
        "data": {"source": "folder", "path": str(folder), "resolution": denoiser.get("sample_size", 64) * factor},
        "training": {"duration": "0 steps", "global_batch_size": 1},
        "lr_scheduler": {"warmup": "0 steps"},
    }
    home = Path("runs") / "generated" / name
    return Model("pipeline", target, tree, home)


def _objective(target: str, scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """The objective that a scheduler's config means. UserError for one that has none here."""
    prediction = scheduler.get("prediction_type", "epsilon")
    betas = scheduler.get("beta_schedule", "linear")
    if prediction not in _OBJECTIVES or betas != "scaled_linear" or scheduler.get("trained_betas") is not None:
        raise UserError(
            f"{target}: its scheduler predicts {prediction} on a {betas} schedule of its own, for which there is no "
            f"objective here; known are {', '.join(_OBJECTIVES)} on scaled_linear. Give the recipe or run that it is of"
        )
    schedule = {
        name: scheduler[name] for name in ("beta_start", "beta_end", "num_train_timesteps") if name in scheduler
    }
    if scheduler.get("rescale_betas_zero_snr"):
        schedule["zero_terminal_snr"] = True
    return {"name": _OBJECTIVES[prediction], "schedule": schedule}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no object")
    return found


def choose(model: Model, config: Config, weights: str | None) -> Loading:
    """The weights that are drawn with: of a run, those of a checkpoint. UserError where there are none."""
    if model.run is None:
        if weights is not None:
            raise UserError(
                f"weights={weights} is for the checkpoint of a run: leave it out, a {model.kind} has one set"
            )
        _refuse_random(model, config)
        place = str(getattr(config.model, "pretrained_model_name_or_path", model.name))
        settings = config.model.model_dump(mode="json", exclude_defaults=True)
        place = model.name if model.kind == "pipeline" else place
        made_with = {model.kind: place, "model": settings, "objective": config.objective.model_dump(mode="json")}
        return Loading(_said(model, config), made_with, partial(_as_they_are, config))
    checkpoint, place = newest(model.run, config.resume_from_checkpoint), local_copy.shown(model.run.path)
    averaged = "ema" in checkpoint.tensors
    if weights == "ema" and not averaged:
        raise UserError(f"weights=ema: {checkpoint.name} of {place} keeps no averages; leave it out")
    raw = weights == "raw" or not averaged
    made_with = {"run": place, "checkpoint": checkpoint.name}
    made_with |= {"step": checkpoint.documents["state"]["step"], "weights": "raw" if raw else "ema"}
    said = f"{checkpoint.name} of {place} ({'raw' if raw else 'averaged'} weights)"
    return Loading(said, made_with, partial(load, config, checkpoint, raw))


def _said(model: Model, config: Config) -> str:
    place = getattr(config.model, "pretrained_model_name_or_path", "")
    if model.kind == "pipeline":
        return f"the pipeline {model.name}"
    other = [
        f"{name} from {value}"
        for name, value in config.model.places.items()
        if isinstance(value, str) and value != BASE
    ]
    return f"the pretrained networks of {', '.join([place, *other])} as they are: nothing was trained"


def _refuse_random(model: Model, config: Config) -> None:
    """UserError where a network would start from random weights: its pictures are noise."""
    random = [name for name, place in config.model.places.items() if not isinstance(place, str)]
    if random or not config.model.places:
        what = ", ".join(f"model.{name}" for name in random) or f"the family {config.model.family}"
        raise UserError(
            f"{model.name}: {what} starts from random weights, so there is no base model to draw with: train it first "
            f"(`daguerre train {model.name}`), or give a place for it"
        )


def _built(config: Config) -> Parts:
    """The parts as they draw: what only serves gradients is left out, and kernels are those of this device."""
    training = config.training
    kernels = "plain" if training.kernels == "plain" else "auto"
    drawing = training.model_copy(update={"compile": False, "kernels": kernels, "gradient_checkpointing": False})
    return build(config.model_copy(update={"training": drawing}))


def _as_they_are(config: Config) -> Parts:
    parts = _built(config)
    parts.net.eval()
    return parts


def newest(folder: RunFolder, name: str) -> Checkpoint:
    """The newest checkpoint whose every byte is as saved, or the one of this name, without the optimizer's tensors.
    UserError if there is none."""
    store, place = Store(folder.checkpoints), local_copy.shown(folder.path)
    for notice in local_copy.bring(folder.path, name):
        print(notice)
    if name != "latest":
        if name not in store.names():
            raise UserError(f"{place} has no checkpoint {name!r}; it has: {', '.join(store.names()) or 'none yet'}")
        return _without_optimizer(store, folder.checkpoints / name)
    found = store.newest_verified()
    for notice in found.notices:
        print(notice)
    if found.path is None:
        raise UserError(
            f"{place} has no checkpoint yet: wait for its first save, or go on with `daguerre train {place}`"
        )
    return _without_optimizer(store, found.path)


def _without_optimizer(store: Store, path: Path) -> Checkpoint:
    there = store.groups(path)
    kept = [name for name in ("model", "ema", "objective") if name in there]
    return store.load(path, only=kept)


def load(config: Config, checkpoint: Checkpoint, raw: bool = False) -> Parts:
    """The parts with the checkpoint's weights, the averaged ones where it has them, ready to draw."""
    parts = _built(config)
    averages = {} if raw else checkpoint.tensors.get("ema", {})
    base_digests.refuse_another(checkpoint.documents.get("base"), base_digests.of(config, parts), checkpoint.name)
    load_weights(parts.net, checkpoint.tensors["model"] | averages, saved=parts.attached.names)
    parts.objective.learnt.load_state(checkpoint.tensors.get("objective", {}))
    parts.net.eval()
    return parts
