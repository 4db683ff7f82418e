"""Drafts of runs, as the page sends them: a recipe or a run, and overrides as YAML, turned into what `train` takes."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from daguerre import documents, trees, yaml_text
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.config import config as configs
from daguerre.config import place, recipe, short_forms
from daguerre.config.errors import Problem
from daguerre.errors import UserError
from daguerre.report.run import MOST_BYTES as MOST_CONFIG_BYTES
from daguerre.serve.bounds import check_file
from daguerre.serve.catalog import is_run
from daguerre.serve.queueing.schema import Setting
from daguerre.serve.settings_shown import flat
from daguerre.serve.site import Site

MOST_BYTES = 256 << 10
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w<>-]+)*")
_MOST = 2000
_OWN = ("config", "devices", "queue", "extends")
"""Words that mean something else than a setting on a command line."""


class Draft(BaseModel):
    """Message of a page."""

    model_config = ConfigDict(extra="forbid")

    recipe: str = Field("", max_length=200)
    """Name of a shipped recipe, or of a file in the folder of the page; empty with `run`."""
    run: str = Field("", max_length=64)
    """Id of a run whose recipe is taken; empty with `recipe`."""
    goes_on: bool = False
    """Whether that run itself goes on, in its folder."""
    yaml: str = Field("", max_length=MOST_BYTES)
    """Overrides."""
    change: dict[str, str] = Field({}, max_length=50)
    """Settings that were changed in the form, by path, with their new text; "" takes an override back."""
    devices: int = Field(1, ge=1, le=1024)


@dataclass(frozen=True)
class Meant:
    """The training that a draft means."""

    devices: int
    words: list[str]
    """Recipe and overrides, for `daguerre train`."""
    overrides: dict[str, Any]
    """By dotted path."""
    tree: trees.Tree
    """Values of the whole recipe, unchecked."""
    base: trees.Tree
    """The same without the overrides."""
    problems: tuple[Problem, ...]


def read(given: bytes) -> Draft:
    """The message. UserError for something else."""
    return documents.sent(Draft.model_validate_json, given, "the page sent no draft of a run")


def overrides(text: str, may_extend: bool = False) -> dict[str, Any]:
    """Overrides by dotted path of a YAML text. UserError for what is no YAML, or no mapping, or means anything else."""
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise UserError("the YAML has a reference (*name): write the value itself")
    except yaml.MarkedYAMLError:
        pass  # the next says it, with the line
    found = flat(yaml_text.parse(text, Path("the overrides")))
    if len(found) > _MOST:
        raise UserError(f"{len(found):,} settings are given, more than {_MOST:,}")
    for path in found:
        if not _KEY.fullmatch(path) or (path in _OWN and not (may_extend and path == "extends")):
            raise UserError(f"{path!r} is no setting that can be given here")
    return found


def as_text(value: Any) -> str:
    """A value as it is written behind `key=`."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_yaml(found: Mapping[str, Any]) -> str:
    """Overrides as YAML, in groups."""
    tree: trees.Tree = {}
    for path, value in found.items():
        tree = trees.merge(tree, trees.nested(path, value))
    return configs.as_yaml(tree, [value for value in found.values() if isinstance(value, str)]) if tree else ""


def changed(found: Mapping[str, Any], change: Mapping[str, str], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Overrides with what was changed in the form, each text as its setting takes it."""
    result = dict(found)
    for path, text in change.items():
        if not _KEY.fullmatch(path):
            raise UserError(f"{path!r} is no setting")
        setting = settings.get(path)
        if not text.strip():
            result.pop(path, None)
        elif (
            setting is not None
            and "string" in setting.kinds
            and text.strip() != "null"
            and text.lstrip()[:1] not in "[{"
        ):
            result[path] = text
        else:
            result[path] = yaml_text.value(text.strip().replace("\n", " "))
    return result


@dataclass(frozen=True)
class Base:
    """The recipe or run that a draft begins with."""

    word: str
    """The recipe on a command line."""
    name: str
    """The shipped recipe that is read here; `whole` is in its place where there is one."""
    given: list[str] = field(default_factory=list)
    """What a file gives over it."""
    whole: trees.Tree | None = None


def own_recipes(folder: Path) -> dict[str, Path]:
    """Recipes as files in the folder of the page, by their names."""
    return {path.name: path for path in sorted(folder.glob("*.yaml")) if path.is_file()}


def base_of(site: Site, draft: Draft) -> Base:
    """The recipe or run of a draft. Nothing is read here but shipped recipes, and files of recipes and runs by
    `overrides`. UserError for another."""
    folder = site.catalog.at(draft.run) if draft.run else None
    files = own_recipes(site.catalog.folder)
    if draft.run and folder is None:
        raise UserError("there is no such run: it may have been moved", code="missing")
    if folder is None and draft.recipe in recipe.shipped():
        return Base(draft.recipe, draft.recipe)
    if folder is None and draft.recipe not in files:
        raise UserError(f"there is no recipe {draft.recipe!r}: choose one of the list", code="missing")
    path = files[draft.recipe] if folder is None else RunFolder(folder).config
    check_file(path, site.catalog.roots, MOST_CONFIG_BYTES)
    found = overrides(path.read_text(encoding="utf-8"), may_extend=folder is None)
    word, above = str(folder or path), as_text(found.pop("extends", ""))
    if above:
        if above not in recipe.shipped():
            raise UserError(f"{path.name} extends {above!r}, and here only shipped recipes can be extended")
        return Base(word, above, [f"{key}={as_text(value)}" for key, value in found.items()])
    tree: trees.Tree = {}
    for key, value in found.items():
        tree = trees.merge(tree, trees.nested(key, value))
    return Base(word, word, whole=tree)


def mean(site: Site, draft: Draft, found: dict[str, Any]) -> Meant:
    """The training that a draft with these overrides means. UserError for one that cannot be."""
    base, own = base_of(site, draft), dict(found)
    if draft.goes_on and not draft.run:
        raise UserError("only a run goes on")
    if draft.goes_on and (named := [name for name in ("run_name", "output_dir") if name in own]):
        raise UserError(f"{', '.join(named)}: this run goes on where it is; copy it for a new one", code="conflict")
    if not draft.goes_on:
        own["output_dir"] = str(_below(site.catalog.folder, str(own.get("output_dir", "."))))
    given = [f"{path}={as_text(value)}" for path, value in own.items()]
    if any("\0" in text for text in given):
        raise UserError("a value has a zero byte")
    shipped = base.whole is None and not base.given
    before = _shipped(base.name) if shipped else configs.sketch(base.name, base.given, base.whole).tree
    sketch = configs.sketch(base.name, [*base.given, *given], base.whole)
    return Meant(draft.devices, [base.word, *given], found, sketch.tree, before, sketch.problems)


@lru_cache(maxsize=32)
def _shipped(name: str) -> trees.Tree:
    """The values of a shipped recipe."""
    return configs.sketch(name, []).tree


def place_of(site: Site, meant: Meant) -> tuple[str, Path]:
    """The place of the run, and the folder in which it would work. UserError for one outside of the page's folder."""
    where, works_in = place.of(meant.words[0], meant.words[1:])
    if site.catalog.folder not in Path(where).resolve().parents:
        raise UserError(f"{where} is outside of {site.catalog.folder}, below which this page writes runs")
    folder = Path(where)
    if folder.is_dir() and not is_run(folder) and any(folder.iterdir()):
        raise UserError(
            f"run_name: {folder.name} is a folder with other files, such as pictures: choose another name for the run"
        )
    return where, works_in


def shortened(path: str, tree: trees.Tree) -> str:
    """The path of a setting as people write it."""
    return short_forms.short(path, tree)


def _below(folder: Path, text: str) -> Path:
    """A folder for runs, from the folder of the page. UserError for one outside."""
    found = (folder / Path(text).expanduser()).resolve()
    if found != folder and folder not in found.parents:
        raise UserError(f"output_dir: {found} is outside of {folder}, below which this page writes runs")
    return found
