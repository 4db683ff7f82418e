"""The model that `generate` uses: a run's checkpoint, the pretrained networks of a recipe as they are, or a pipeline.

None stands in for another in silence: the command asks for one, or a notice says which it is.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from daguerre import deferred, trees
from daguerre.assembly import base_digests, roles
from daguerre.assembly.parts import Components, build, outline
from daguerre.assembly.parts import load as load_networks
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.checkpoint.store import Checkpoint, Found, Store
from daguerre.config import config as configs
from daguerre.config import converted, overrides, recipe, renamed, short_forms
from daguerre.config.config import Config
from daguerre.config.errors import ConfigError
from daguerre.errors import UserError, named
from daguerre.generation import hub_models, pipelines
from daguerre.models.family import Family
from daguerre.models.settings import ASSISTANT, BASE, GGUF, SINGLE_FILES, PretrainedSettings
from daguerre.models.weights import index, single_files, unfilled
from daguerre.models.weights.resolve import Options
from daguerre.objectives.settings import ObjectiveSettings
from daguerre.remote import local_copy
from daguerre.storage import address
from daguerre.training.state import load_weights


@dataclass(frozen=True)
class Model:
    """Networks that can be asked for, before any weight is read."""

    kind: str
    """`run`, `base` or `pipeline`."""
    name: str
    """Its name on the command line."""
    source: str | trees.Tree
    """A run folder or recipe for `config.load`, or the recipe itself."""
    home: Path
    """Default folder for the images."""
    defaults: tuple[str, ...] = ()
    """Settings that the source lacks, as overrides."""
    run: RunFolder | None = None
    trained: Config | None = None
    """Of a run: its config, without the command's settings."""
    notices: tuple[str, ...] = ()
    """Messages of what its files ask for otherwise."""

    def config(self, given: Sequence[str]) -> configs.Loaded:
        """The config with the command's settings."""
        if isinstance(self.source, str):
            return configs.load(self.source, [*self.defaults, *given])
        with tempfile.TemporaryDirectory(prefix="daguerre-generate-") as folder:
            path = Path(folder) / "pipeline.yaml"
            path.write_text(json.dumps(self.source), encoding="utf-8")
            try:
                return configs.load(str(path), given)
            except ConfigError as error:  # the name of the file just written would help nobody
                raise ConfigError(error.problems, self.name) from None


@dataclass(frozen=True)
class Loading:
    """Weights that were chosen."""

    description: str
    """For people."""
    provenance: dict[str, Any]
    """For the JSON of each image, and for telling one request from another."""
    parts: Callable[[], Components]
    """For generation, without the networks that only a loss needs."""
    with_loss: Callable[[], Components] | None = None
    """Of a run: the same with all networks of its loss, as it validates; None for other models."""


def find(target: str, place: Sequence[str], base: bool, given: Sequence[str] = (), planned: bool = False) -> Model:
    """The model that the command's bare word means. UserError without one. Of the overrides that are `given`, it
    reads how a single file is to be opened. Where it is only `planned`, a recipe whose run is not there yet stands for
    that run."""
    if not target:
        known = ", ".join(recipe.shipped())
        raise UserError(
            f"no run given. Pass a run folder, such as runs/quickstart, or a recipe ({known})", code="missing"
        )
    folder = local_copy.located(hub_models.place(target) if hub_models.known(target) else target)
    if folder.is_file() and folder.suffix in (*SINGLE_FILES, GGUF):
        return _of_file(target, folder, place, _opening(given))
    if not folder.is_dir() or target in recipe.shipped():
        other = _namesake(target, folder)
        found = _of_recipe(target, place, base, planned, other)
        return replace(found, notices=(*found.notices, other)) if other else found
    _check_unplaced(target, place, "folder")
    if (folder / "config.yaml").is_file():
        return _base(target, str(folder), folder) if base else _of_run(target, RunFolder(folder))
    if index.find(folder) is not None:
        return _of_pipeline(target, folder, Path(target).resolve().name)
    raise UserError(
        f"{target} is neither a run folder (no config.yaml) nor a pipeline (no model_index.json): give a run's "
        "folder, a diffusers pipeline or a recipe",
        code="missing",
    )


def _namesake(target: str, folder: Path) -> str:
    """A line on a model whose folder is called as a shipped recipe, which the name means; "" without one."""
    there = folder.is_dir() and ((folder / "config.yaml").is_file() or index.find(folder) is not None)
    return f"{target} is the shipped recipe here; the folder of that name is ./{target}" if there else ""


def _check_unplaced(target: str, place: Sequence[str], kind: str) -> None:
    """UserError for output_dir and run_name together with a path, which is the place."""
    if place:
        raise UserError(f"{target} is a {kind}: {' '.join(place)} would have no effect, remove it", code="unused")


def _of_recipe(target: str, place: Sequence[str], base: bool, planned: bool, other: str) -> Model:
    try:
        output_dir, run_name = configs.peek(target, place)
    except ConfigError:
        if not (base or planned):
            raise
        output_dir, run_name = configs.peek(target, [*place, f"run_name={Path(target).stem}"])
    if address.is_remote(output_dir) and base:  # images are written to this machine
        output_dir = "runs"
    folder = RunFolder(local_copy.located(f"{output_dir.rstrip('/')}/{run_name}"))
    if folder.config.is_file() and not base:
        return _of_run(target, folder)
    # A recipe whose run takes no updates is there for generating with the networks as they are.
    trains = not base and not _trains_nothing(target)
    if trains and not planned:
        raise UserError(
            f"there is no run in {folder.path}: train one with `daguerre train {target}`, give the folder of another "
            f"run, or set base=true to generate with the pretrained networks{other and '. '}{other}",
            code="missing",
        )
    defaults = [f"output_dir={output_dir}", f"run_name={run_name}"]
    sources = trees.get(_tree(target), "data.sources") or {}
    unset = [name for name, own in sources.items() if isinstance(own, dict) and own.get("path") == "???"]
    defaults += [f"data.sources.{name}.path=none" for name in unset]  # they are for training, and nothing reads them
    found = _base(target, target, Path(output_dir) / run_name, tuple(defaults))
    return replace(found, kind="run", trained=found.config(()).config) if trains else found


def _trains_nothing(target: str) -> bool:
    return str(trees.get(_tree(target), "training.duration")).split()[:1] == ["0"]


def _tree(target: str) -> trees.Tree:
    """The settings of a recipe, or of a config of another trainer."""
    theirs = converted.of(Config, target, (), may_lose=True)
    tree: trees.Tree = {} if theirs is None else theirs.tree
    for layer in [] if theirs is not None else recipe.layers(target):
        tree = trees.merge(tree, short_forms.layer(tree, renamed.layer(layer.tree, [], []), []))
    return tree


def _of_run(target: str, folder: RunFolder) -> Model:
    trained = configs.load(str(folder.path)).config
    run = local_copy.origin(folder.path)
    home = folder.path / "generated" if run is None else Path("runs") / "generated" / run.last
    return Model("run", target, str(folder.path), home, (), folder, trained)


def _base(target: str, source: str, folder: Path, defaults: tuple[str, ...] = ()) -> Model:
    return Model("base", target, source, folder.parent / "generated" / folder.name, defaults)


def _opening(given: Sequence[str]) -> Options:
    """The way that overrides say to open files of weights."""
    texts = {key.removeprefix("model."): text for key, text in map(overrides.pair, given)}
    fields = {name: PretrainedSettings.model_fields[name].annotation for name in ("pickled_weights", "ignore_tensors")}
    told = {name: overrides.typed(texts[name], kind) for name, kind in fields.items() if name in texts}
    ignored = told.get("ignore_tensors")
    return Options(
        pickled=told.get("pickled_weights") is True, ignored=tuple(ignored) if isinstance(ignored, list) else ()
    )


def _of_file(target: str, file: Path, place: Sequence[str], options: Options) -> Model:
    """A single-file checkpoint, converted to a pipeline once."""
    _check_unplaced(target, place, "file")
    folder = single_files.reader().folder(file, options.pickled, options.ignored)
    if index.find(folder) is None:
        held = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise UserError(
            f"{target} holds {held} only: give a recipe for the other networks, such as `daguerre generate sd15 "
            f"base=true model.{held.partition(',')[0]}={target}`",
            code="missing",
        )
    return _of_pipeline(target, folder, file.stem)


def _of_pipeline(target: str, folder: Path, name: str) -> Model:
    """A pipeline in diffusers' layout: its scheduler says what the network predicts, and at which noise levels."""
    above = RunFolder(folder.resolve().parent)
    if above.config.is_file():
        raise UserError(
            f"{target} is the pipeline of a run: give the run itself, {local_copy.display_name(above.path)}, whose "
            "recipe says how to generate",
            code="conflict",
        )
    tree, notices = pipelines.recipe(target, folder, name)
    return Model("pipeline", target, tree, Path("runs") / "generated" / name, notices=notices)


def choose(model: Model, config: Config, weights: str | None) -> Loading:
    """The weights to generate with: of a run, those of a checkpoint. UserError if there are none."""
    if model.run is None:
        if weights is not None:
            raise UserError(
                f"weights={weights} is for the checkpoint of a run: remove it, because a {model.kind} has only one set",
                code="unused",
                setting="weights",
            )
        _check_pretrained(model, config)
        base = str(getattr(config.model, "pretrained_model_name_or_path", model.name))
        provenance = {
            model.kind: model.name if model.kind == "pipeline" else base,
            "model": config.model.model_dump(mode="json", exclude_defaults=True),
            "objective": config.objective.model_dump(mode="json"),
        }
        places = [f"{name} from {value}" for name, value in config.model.places.items() if value not in (BASE, None)]
        description = f"the pretrained networks of {', '.join([base, *places])} without training"
        if model.kind == "pipeline":
            description = f"the pipeline {model.name}"
        own = _untrained(config)
        provenance |= _of_few_bits(config)
        if own.adapters:
            provenance["adapters"] = {name: each.model_dump(mode="json") for name, each in own.adapters.items()}
            description += f", with {', '.join(own.adapters)}"
        return Loading(description, provenance, partial(_build, own))
    return of_checkpoint(newest(model.run, config.resume_from_checkpoint), model.run, config, weights)


def of_checkpoint(checkpoint: Checkpoint, folder: RunFolder, config: Config, weights: str | None) -> Loading:
    """The weights of a checkpoint of a run. UserError for averages that it has not."""
    raw, description = weights_of(checkpoint, folder, weights)
    provenance: dict[str, Any] = {"run": local_copy.display_name(folder.path), "checkpoint": checkpoint.name}
    provenance |= {"step": checkpoint.documents["state"]["step"], "weights": "raw" if raw else "ema"}
    decoding = {*config.model.decoding}  # which may be others than those of the run
    provenance |= _of_few_bits(config)
    if config.training.base_precision != "no":
        description += f", with the base in {config.training.base_precision}"
    if decoded := config.model.model_dump(mode="json", include=decoding, exclude_defaults=True):
        provenance["model"] = decoded
    loads = partial(load, config, checkpoint, raw)
    return Loading(description, provenance, loads, partial(loads, for_loss=True))


def _of_few_bits(config: Config) -> dict[str, str]:
    """The form of the base's layers, which images depend on; nothing for the weights as they are."""
    form = config.training.base_precision
    return {} if form == "no" else {"base_precision": form}


def weights_of(checkpoint: Checkpoint, folder: RunFolder, weights: str | None) -> tuple[bool, str]:
    """True for the trained weights, False for their averages (the default where there are some); and what they are, for
    people. UserError for averages that the checkpoint has not."""
    run, averaged = local_copy.display_name(folder.path), "ema" in checkpoint.tensors
    if weights == "ema" and not averaged:
        raise UserError(
            f"weights=ema: {checkpoint.name} of {run} has no averaged weights; remove it",
            code="missing",
            setting="weights",
        )
    raw = weights == "raw" or not averaged
    return raw, f"{checkpoint.name} of {run} ({'raw' if raw else 'averaged'} weights)"


def _check_pretrained(model: Model, config: Config) -> None:
    """UserError if a network would start from random weights: its images are noise."""
    random = [name for name, place in config.model.places.items() if not isinstance(place, str)]
    if random or not config.model.places:
        what = ", ".join(f"model.{name}" for name in random) or f"the family {config.model.family}"
        raise UserError(
            f"{model.name}: {what} starts from random weights, so there is no base model to generate with: train it "
            f"first (`daguerre train {model.name}`), or set where its weights are",
            code="missing",
        )


def _build(config: Config) -> Components:
    """The parts for generation."""
    own = _in_use(config, config.objective.in_use())
    networks = load_networks(own, defers=True)
    _freeze(networks[0])
    parts = build(own, networks=networks)
    parts.net.eval()
    return parts


def outlined(model: Model, config: Config, raw: bool = False) -> tuple[Config, Components]:
    """The config that acts where images are generated, and the parts without memory and weights, with which the trained
    weights (`raw`) or their averages are used."""
    own = _in_use(config if model.trained else _untrained(config), config.objective.in_use())
    with unfilled.outlining():
        networks = load_networks(own)
    _freeze(networks[0])
    averaged = config.ema.enabled and model.trained is not None and not raw
    parts = outline(own, networks, float32=networks[1].names if averaged else ())
    parts.net.eval()
    return own, parts


def _untrained(config: Config) -> Config:
    """The config with the adapters that act where nothing was trained: another, which has learnt nothing, would only
    ask for its control images or tokens."""
    generates_only = config.training.duration.number == 0
    learnt = {name: own for name, own in config.adapters.items() if own.learnt and generates_only}
    return config.model_copy(update={"adapters": learnt})


def _take(net: nn.Module, names: frozenset[str], checkpoint: Checkpoint, averages: Mapping[str, Tensor]) -> None:
    """Puts a checkpoint's weights of these names, or their averages, into the net."""
    for name, p in net.named_parameters():
        if name in names:
            deferred.forget(p)
    with named(checkpoint.name):
        load_weights(net, {**checkpoint.tensors["model"], **averages}, saved=names)


def _freeze(family: Family) -> None:
    """No weight of a denoiser is trained from here on: all of them may have few bits, and wait in the host's memory."""
    for network in family.networks.values():
        if network.denoises:
            network.module.requires_grad_(False)


def _in_use(config: Config, objective: ObjectiveSettings, for_loss: bool = False) -> Config:
    """The config with this objective, without what only serves gradients or losses, with the kernels of this device."""
    kernels = "plain" if config.training.kernels == "plain" else "auto"
    settings = {"compile": False, "kernels": kernels, "gradient_checkpointing": False, "offload_activations": False}
    training = config.training.model_copy(update=settings | {"float8": "no"})
    model = config.model
    if not for_loss and getattr(model, ASSISTANT, None) is not None:
        model = model.model_copy(update={ASSISTANT: None})
    return config.model_copy(update={"training": training, "objective": objective, "model": model})


def newest(folder: RunFolder, name: str) -> Checkpoint:
    """The newest checkpoint whose every byte is as saved, or the one of this name, without the optimizer's tensors.
    UserError without one."""
    store, place = Store(folder.checkpoints), local_copy.display_name(folder.path)
    notices, path = local_copy.fetch(folder.path, name), folder.checkpoints / name
    found = store.newest_verified() if name == "latest" else Found(path, [])
    for notice in [*notices, *found.notices]:
        print(notice)
    if name != "latest" and name not in store.names():
        raise UserError(
            f"{place} has no checkpoint {name!r}; it has: {', '.join(store.names()) or 'none yet'}",
            code="unknown",
            setting="resume_from_checkpoint",
        )
    if found.path is None:
        raise UserError(
            f"{place} has no checkpoint yet: wait for its first save, or continue with `daguerre train {place}`",
            code="missing",
        )
    return read(store, found.path)


def read(store: Store, path: Path) -> Checkpoint:
    """A checkpoint without the optimizer's tensors. CheckpointError for a damaged one."""
    groups = store.groups(path)
    return store.load(path, only=[name for name in ("model", "ema", "objective") if name in groups])


def load(config: Config, checkpoint: Checkpoint, raw: bool = False, for_loss: bool = False) -> Components:
    """The parts with the checkpoint's weights, the averaged ones if it has them, ready to generate with, or to compute
    the loss with."""
    own = _in_use(config, config.objective if for_loss else config.objective.in_use(), for_loss)
    networks = load_networks(own, defers=True)
    averages = {} if raw else checkpoint.tensors.get("ema", {})
    digests = base_digests.begun(own, *networks)
    recorded = checkpoint.documents.get("base")
    if recorded is not None:
        unused = config.objective.networks.keys() - own.objective.networks.keys()
        unused |= set() if for_loss else {ASSISTANT}
        recorded = {name: each for name, each in recorded.items() if name not in unused}
    base_digests.check_components(recorded, digests.places, checkpoint.name)
    if not for_loss:
        # Before they change their type and place: of a network that was trained whole, too, they may have few bits.
        _take(networks[1].net, networks[1].names, checkpoint, averages)
        _freeze(networks[0])
    # Weights are stored as in training, so that they are the same to the bit. Averages are float32 whatever type that
    # is, in a run's validation, too.
    parts = build(own, networks=networks, trains=for_loss, float32=averages.keys())
    base_digests.check_same_base(recorded, digests.ended(), checkpoint.name)
    parts.net.eval()
    if for_loss:
        parts = roles.of_checkpoint(parts, config, recorded or {}, checkpoint.name)
        _take(parts.net, parts.attached.names, checkpoint, averages)
    with named(checkpoint.name):
        parts.objective.learnt.load_state(checkpoint.tensors.get("objective", {}))
    return parts
