"""The command line of `evaluate` and `reference`: a protocol's file, and settings over it."""

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from daguerre import trees, yaml_text
from daguerre.cli.options import generate_options
from daguerre.config import config as configs
from daguerre.config import fields, options, overrides
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.evaluation.settings import PROTOCOLS, EvaluationSettings
from daguerre.generation.load import Model
from daguerre.regular import check_regular
from daguerre.remote import local_copy
from daguerre.samplers.settings import SamplingSettings
from daguerre.settings import ADDRESS, Settings
from daguerre.trees import Tree

FOLLOW, JSON = FLAGS = ("--follow", "--json")


class Options(EvaluationSettings):
    """An evaluation, and where and when it is made."""

    out: Annotated[str | None, ADDRESS] = None
    """Folder of the results, or file of a reference."""
    shard: str | None = None
    """Part I/N of the images."""
    base: bool = False
    """The pretrained networks of a recipe."""
    ledger: bool = False
    """The loss of each trained picture, in place of metrics."""
    follow: Literal["newest", "all"] | None = None
    """Follows a run: takes the newest checkpoint when behind, or every one."""
    every_seconds: float = Field(10.0, gt=0)
    """With follow: how often new checkpoints are looked for."""
    patience_seconds: float = Field(600.0, ge=0)
    """With follow: ends when nobody has trained for so long."""


@dataclass(frozen=True)
class Arguments:
    """A command line that was read."""

    words: tuple[str, ...]
    """Models, folders or runs."""
    options: Options
    rest: tuple[str, ...]
    """Other settings: of sampling, of the model, of the data."""
    given: frozenset[str]
    """Options that the command line names."""
    json: bool
    """True if a document is asked for."""

    def refuse(self, names: Collection[str], what: str) -> None:
        """UserError for one of these options, if it was given: it has no effect on `what`."""
        if odd := sorted(self.given & {*names}):
            raise UserError(f"{odd[0]} has no effect on {what}: remove it", code="conflict", setting=odd[0])


def read(arguments: Sequence[str]) -> Arguments:
    """Sorts the arguments. UserError or ConfigError for what cannot be used."""
    follows, as_json = FOLLOW in arguments, JSON in arguments
    found = options.split([word for word in arguments if word not in FLAGS])
    tree: Tree = {}
    rest: list[str] = []
    for override in found.overrides:
        key, text = overrides.pair(override)
        if key == "protocol":
            own, sampling = protocol(text)
            tree, rest = trees.merge(own, tree), [*sampling, *rest]
    for override in found.overrides:
        key, text = overrides.pair(override)
        if key.partition(".")[0] in Options.model_fields:
            tree = trees.merge(tree, value(key, text, Options))
        elif key != "protocol":
            _refuse_misspelt(key)
            rest.append(override)
    if follows:
        tree = trees.merge({"follow": "newest"}, tree)
    given = {overrides.pair(override)[0].partition(".")[0] for override in found.overrides}
    given = (given & {*Options.model_fields}) | ({"follow"} if follows else set())
    checked = configs.checked(Options, tree, [], [], "the command")
    return Arguments(found.bare, checked, tuple(rest), frozenset(given), as_json)


def protocol(name: str) -> tuple[Tree, list[str]]:
    """The settings of a protocol (a shipped name or a YAML file), and its `sampling` settings as overrides. UserError
    for a file that cannot be read."""
    path = PROTOCOLS / f"{name}.yaml"
    path = path if path.is_file() else Path(name).expanduser()
    try:
        check_regular(path)
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        shipped = ", ".join(sorted(each.stem for each in PROTOCOLS.glob("*.yaml")))
        raise UserError(
            f"protocol={name} cannot be read ({error}): give a YAML file, or one of {shipped}",
            code="missing",
            setting="protocol",
        ) from error
    if not isinstance(tree, dict):
        raise UserError(f"protocol={name} is no mapping of settings", setting="protocol")
    sampling = tree.pop("sampling", None) or {}
    return tree, [f"sampling.{key}={'null' if value is None else value}" for key, value in sampling.items()]


def value(key: str, text: str, kind: type[Settings], plain: Collection[str] = ("metrics",)) -> Tree:
    """The tree of one override of settings of this `kind`. What is `plain` is YAML, networks are places; the rest is
    typed by its field."""
    head, _, inner = key.partition(".")
    if head == "networks" and inner:
        return trees.nested(key if "." in inner else f"{key}.path", text)
    if head not in (*plain, "networks"):
        return trees.nested(key, overrides.typed(text, fields.leaves(kind)[key].field.annotation))
    found: Any = yaml_text.value(text)
    names = [found] if isinstance(found, str) else found
    if head == "metrics" and not inner and isinstance(names, list):
        found = {str(name): {} for name in names}
    return trees.nested(key, found)


def config_of(model: Model, given: Sequence[str], verb: str = "evaluate", options: type[Settings] = Options) -> Config:
    """The model's config with the settings of sampling that are given, and an image for each prompt. UserError for
    settings that a model which is there does not take, with those that the verb takes."""
    notices: list[str] = []
    plain = model.trained or model.config(()).config
    changes = generate_options.changes_of(model, plain, [overrides.pair(each) for each in given], notices, options)
    loaded = model.config([*changes, "sampling.num_images=1"])
    generate_options.check_changes(model, plain, loaded.config, verb, options)
    for notice in notices:
        print(notice)
    return loaded.config


def root_of(model: Model) -> Path:
    """The folder of a model's evaluations: in its run, where that is on this machine."""
    if model.run is not None and local_copy.origin(model.run.path) is None:
        return model.run.evaluations
    return model.home.parent.parent / "evaluations" / Path(model.name.rstrip("/")).name


def _refuse_misspelt(key: str) -> None:
    near = difflib.get_close_matches(key, Options.model_fields, n=1, cutoff=0.8)
    if near and "." not in key and key not in SamplingSettings.model_fields:
        raise UserError(f"there is no option {key}; did you mean {near[0]}?", code="unknown")
