"""The Config tree: every setting of a run, from recipe and overrides to a checked, frozen object and back.

Holds the tree, load, dump and diff. Reading files is in `recipe`, `key=value` in `command`, layers over one another in
`merge`, the checks that span sections in `checks`, the texts of errors in `errors`. Imports no plug-in before one is
named.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin

import yaml
from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from daguerre import trees, yaml_text
from daguerre.adapters.settings import AdapterSettings
from daguerre.checkpoint.settings import CheckpointSettings
from daguerre.config import (
    checks,
    command,
    converted,
    dreambooth,
    fields,
    merge,
    outline,
    outside,
    overrides,
    recipe,
    renamed,
    roots,
    short_forms,
)
from daguerre.config.errors import ConfigError, Problem, missing, translate, unknown
from daguerre.config.fields import Leaf
from daguerre.config.recipe import Layer
from daguerre.credentials import scrub
from daguerre.data.cached.settings import CacheSettings
from daguerre.data.settings import DataSettings, LoaderSettings
from daguerre.distributed.settings import DistributedSettings, MeshSettings
from daguerre.errors import UserError
from daguerre.foreign.names import lookup
from daguerre.formatting import counted
from daguerre.models.settings import FamilySettings
from daguerre.objectives.settings import ObjectiveSettings
from daguerre.samplers.settings import SamplingSettings
from daguerre.settings import ADDRESS, FREE, Plugin, Settings
from daguerre.storage import address
from daguerre.tracking.settings import DEFAULT, LoggingSettings
from daguerre.training.settings import (
    EMASettings,
    LRSchedulerSettings,
    OptimizerSettings,
    ProfilerSettings,
    TrainingSettings,
    ValidationSettings,
)
from daguerre.trees import Tree


class Config(Settings):
    """All settings of a run."""

    run_name: str = Field(json_schema_extra=FREE)
    """Name of the run and of its folder in `output_dir`."""
    output_dir: Annotated[str, ADDRESS] = Field("runs", min_length=1, json_schema_extra=FREE)
    """Folder that holds the run folders: of this machine, or `s3://BUCKET/FOLDER`, `gs://BUCKET/FOLDER`."""
    description: Annotated[str | None, ADDRESS] = Field(None, json_schema_extra=FREE)
    """A line about the run, for people; shown in the report."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """All random numbers of the run follow from this and the samples' ids."""
    init_from: Annotated[str | None, ADDRESS] = Field(None, min_length=1)
    """Run folder whose newest weights (the averaged ones, if it keeps them) a new run starts from; for an adapter also
    a file of its kind, such as a LoRA."""
    resume_from_checkpoint: str = Field("latest", json_schema_extra=FREE)
    """Where a run that has checkpoints goes on: `latest`, or the name of one, such as `step-00001000`. `never`: a run
    that was begun before is refused."""
    allow_change: list[str] = Field([], json_schema_extra=FREE)
    """Settings that may differ from those that this run was begun with (`optimizer.learning_rate`, or a whole section
    such as `optimizer`), although they change what is learnt."""
    model: Annotated[SerializeAsAny[FamilySettings], Plugin("families", "family", FamilySettings)]
    """The networks."""
    objective: Annotated[SerializeAsAny[ObjectiveSettings], Plugin("objectives", "name", ObjectiveSettings)]
    """What the network learns to predict."""
    adapters: dict[str, Annotated[SerializeAsAny[AdapterSettings], Plugin("adapters", "name", AdapterSettings)]] = (
        Field(
            {"full": {"name": "full"}},  # type: ignore[dict-item]  # a mapping, so that nothing is imported here
            min_length=1,
        )
    )
    """What is trained of the networks, or added to them and trained: adapters by a name of your own, each with the
    settings of its kind; one alone may be written as `adapter`."""
    data: DataSettings
    """What is trained on."""
    loader: LoaderSettings = LoaderSettings()
    """How batches are made ahead of the loop."""
    cache: CacheSettings = CacheSettings()
    """Encoded images and captions that are kept."""
    training: TrainingSettings
    """Length, batches, precision and guards."""
    optimizer: Annotated[
        SerializeAsAny[OptimizerSettings], Plugin("optimizers", "name", OptimizerSettings, default="adamw")
    ] = Field({"name": "adamw"})  # type: ignore[assignment]  # a mapping, as above
    """The optimizer."""
    lr_scheduler: LRSchedulerSettings = LRSchedulerSettings()
    """Learning rate over the run."""
    ema: EMASettings = EMASettings()
    """Averaged weights."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """When the run is saved."""
    validation: ValidationSettings = ValidationSettings()
    """Loss on held-out samples."""
    sampling: SamplingSettings = SamplingSettings()
    """How images are generated."""
    logging: LoggingSettings = LoggingSettings()
    """How often numbers are written, and where to."""
    profiler: ProfilerSettings = ProfilerSettings()
    """Which updates are recorded with all their operators."""
    mesh: MeshSettings = MeshSettings()
    """How the devices of a run share the work."""
    distributed: DistributedSettings = DistributedSettings()
    """How the processes of a run meet and watch one another."""
    plugins: outside.Record = Field({}, json_schema_extra=FREE)
    """Written by a run: package, version and digest of each plug-in from outside of the package. It names no code that
    is loaded; a run is not continued with another digest."""

    @field_validator("run_name")
    @classmethod
    def _names_a_folder(cls, run_name: str) -> str:
        if not run_name.strip() or run_name in (".", "..") or set(run_name) & set("/\\\0"):
            raise ValueError(
                "it is the name of a folder: at least one letter, no slash (output_dir is the parent folder)"
            )
        return run_name

    @field_validator("output_dir")
    @classmethod
    def _can_hold_runs(cls, output_dir: str) -> str:
        return address.checked(output_dir) if address.is_remote(output_dir) else output_dir

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        problems = checks.problems(dict(self))
        if problems:
            text = "; ".join(f"{problem.path} {problem.text}" for problem in problems)
            raise PydanticCustomError("problems", "{text}", {"text": text, "problems": problems})
        return self


@dataclass(frozen=True)
class Loaded:
    """A checked config, and one line for each thing that a user should know about how it came to be."""

    config: Config
    notices: tuple[str, ...]
    typed: frozenset[str] = frozenset()
    """Paths of the settings that the command line gives."""
    chosen: frozenset[str] = frozenset()
    """Of those that the command line or a file of the user's own gives: all but what shipped recipes say."""
    recorded: outside.Record | None = None
    """`plugins` as the recipe has them; those of `config` are the ones that are used here."""


def load(name: str, given: Sequence[str] = (), whole: Tree | None = None) -> Loaded:
    """The config of a recipe (shipped name, YAML file or run folder), or of a config of another trainer, with
    `key=value` overrides. Where the recipe itself is at hand, as `whole`, `name` is what it is called.

    ConfigError lists every problem; UserError where the recipe cannot be read at all.
    """
    if whole is None and (theirs := converted.of(Config, name, given)) is not None:
        loaded = load(name, theirs.rest, theirs.tree)
        return replace(loaded, notices=(*theirs.notices, *loaded.notices))
    stand_in = recipe.stand_in(name) if whole is None else None
    notices = [f"{name} is not a file here: the shipped recipe {stand_in} is used in its place"] if stand_in else []
    found = _gathered(Config, name, given, whole, notices)
    notices += dreambooth.notices(found.tree, found.chosen)
    problems = [*found.problems, *outside.problems(found.tree, found.typed)]
    config = checked(Config, merge.finished(found.tree), found.absent, problems, found.source)
    _refuse(roots.problems(config), found.tree, found.source)
    here = outside.used(config)
    notices += outside.differences(config.plugins, here)
    said = tuple(scrub(short_forms.short(notice, found.merged)) for notice in notices)
    return Loaded(config.model_copy(update={"plugins": here}), said, found.typed, found.chosen, config.plugins)


@dataclass(frozen=True)
class Sketch:
    """A recipe with overrides, before any plug-in says what it may hold."""

    tree: Tree
    problems: tuple[Problem, ...]
    """Mistakes that are seen by now."""


def check_soon(name: str, given: Sequence[str] = (), whole: Tree | None = None) -> None:
    """ConfigError for settings that do not exist, and for values of sections that no plug-in defines, of the recipe and
    the overrides, before any plug-in is imported.

    Other mistakes are left for `load`, which tells all at once. So are these where another one is seen here, too.
    """
    root = outline.of(Config)
    if whole is None and (theirs := converted.of(root, name, given, may_lose=True)) is not None:
        check_soon(name, theirs.rest, theirs.tree)
        return
    found = _gathered(root, name, given, whole, [])
    tree = merge.finished(found.tree)
    _refuse(_misnamed(root, found, tree) or _misvalued(root, found, tree), tree, found.source)


def _misnamed(root: type[Settings], found: "_Gathered", tree: Tree) -> list[Problem]:
    """Problems with names, and with what the command line says; none where another mistake is seen, too."""
    leaves, sections = fields.leaves_and_sections(root, tree)
    problems, rest = list(found.problems), tree
    for path, _ in trees.paths(tree):
        above = [name for name in reversed(_ancestors(path)) if name not in sections]  # the first is no section
        if above and above[0] not in leaves:
            problems.append(unknown(above[0], trees.get(tree, above[0]), leaves, [*sections]))
            rest = trees.without(rest, above[0])
    if not problems or found.absent or _kinds(rest, leaves) or not _seems_sound(root, rest):
        return []
    return problems


def _misvalued(root: type[Settings], found: "_Gathered", tree: Tree) -> list[Problem]:
    """Problems with values of sections that no plug-in defines; none where a plug-in may have more to say: another
    problem, or a setting of the command line, is in its section, or what is wrong is seen in several sections alone."""
    plugged = {n for n, field in root.model_fields.items() if fields.plugin_of(field) or fields.plugin_inside(field)}
    settings, wrong = _examined(root, tree, found.absent, outside.problems(tree, found.typed))
    paths = {*found.typed, *(problem.path for problem in wrong)}
    asks = settings is not None or found.problems or any(path.partition(".")[0] in plugged for path in paths)
    return [] if asks else wrong


def sketch(name: str, given: Sequence[str], whole: Tree | None = None) -> Sketch:
    """The values of a recipe with overrides as they would be checked, found without any plug-in. UserError where the
    recipe cannot be read at all."""
    root = outline.of(Config)
    found = _gathered(root, name, given, whole, [])
    tree = merge.finished(found.tree)
    return Sketch(tree, tuple(_short(_misnamed(root, found, tree) or found.problems, tree)))


def _seems_sound(root: type[Settings], tree: Tree) -> bool:
    """True if nothing is wrong with these values, as far as that is seen in the outlines of plug-ins."""
    try:
        settings = root.model_validate(tree)
    except ValidationError:
        return False
    found: list[Problem] = []
    for needed, check in checks.CHECKS.items():
        with suppress(AttributeError, TypeError, ValueError):  # it asks for what an outline lacks
            found += check(*(getattr(settings, name) for name in needed))
    return not found


@dataclass(frozen=True)
class _Gathered:
    """The values of a recipe and its overrides, unchecked, and how they came to be; as in `Loaded`."""

    tree: Tree
    merged: Tree
    """The same, with references as they are written."""
    absent: Sequence[str]
    problems: Sequence[Problem]
    typed: frozenset[str]
    chosen: frozenset[str]
    source: str


def _gathered(
    root: type[Settings], name: str, given: Sequence[str], whole: Tree | None, notices: list[str]
) -> _Gathered:
    """The layers of a recipe laid over one another, and the overrides over them."""
    layers = _layers(name, given, whole, notices)
    tree: Tree = {} if layers[-1].is_of_a_run else {"logging": {"trackers": DEFAULT}}
    own: Tree = {}
    problems: list[Problem] = []
    for layer in layers:  # what drops out of a shipped recipe is meant
        over = renamed.layer(layer.tree, notices, problems)
        tree = merge.lay_over(root, tree, over, [] if layer.is_shipped else notices, problems)
        own = own if layer.is_shipped else trees.merge(own, over)
    values, wrong = command.values(root, tree, renamed.given(given, notices, problems), notices)
    tree = merge.lay_over(root, tree, values, notices, problems)
    # A place is what the command itself gives a run folder that stands for a recipe.
    asked = [one for one in given if overrides.pair(one)[0] not in ("output_dir", "run_name")]
    source = f"{name} with {counted(len(asked), 'override')}" if asked else name
    if only := short_forms.only(tree):
        tree = short_forms.with_long_references(tree, only)
    resolved, absent = yaml_text.resolve(tree, merge.kept(values), source)
    typed = frozenset(path for path, _ in trees.paths(values))
    chosen = typed | {path for path, _ in trees.paths(own)}
    return _Gathered(resolved, tree, absent, problems + wrong, typed, chosen, source)


def _layers(name: str, given: Sequence[str], whole: Tree | None, notices: list[str]) -> list[Layer]:
    """The files of a recipe, the lowest first."""
    return dreambooth.layers(name, given, notices) if whole is None else [Layer(Path(name), whole)]


def peek(name: str, given: Sequence[str] = (), whole: Tree | None = None) -> tuple[str, str]:
    """(output_dir, run_name) of a recipe with overrides, before anything else is checked and without any plug-in.

    UserError if the recipe cannot be read, ConfigError if there is no run_name; other mistakes are left for `load`.
    """
    if whole is None and (theirs := converted.of(Config, name, given, may_lose=True)) is not None:
        return peek(name, theirs.rest, theirs.tree)
    tree: Tree = {}
    problems: list[Problem] = []
    for layer in _layers(name, given, whole, []):
        tree = trees.merge(tree, renamed.layer(layer.tree, [], problems))
    values: Tree = {}
    for override in renamed.given(given, [], problems):
        try:
            meaning = lookup.translate(*overrides.pair(override))
        except UserError:
            continue
        values |= {path: text for path, text in meaning.values if path in ("output_dir", "run_name")}
    resolved, _ = yaml_text.resolve(tree, values, name)
    run_name = resolved.get("run_name")
    if not isinstance(run_name, str):
        raise ConfigError([*problems, missing("run_name", fields.leaves(Config))], name)
    return str(resolved.get("output_dir", Config.model_fields["output_dir"].default)), run_name


Checked = TypeVar("Checked", bound=Settings)


def checked(cls: type[Checked], tree: Tree, absent: Sequence[str], problems: Sequence[Problem], source: str) -> Checked:
    """The settings of resolved values; ConfigError with the problems so far and all that the settings classes find."""
    settings, found = _examined(cls, tree, absent, problems)
    _refuse(found, tree, source)
    assert settings is not None
    return settings


def _examined(
    cls: type[Checked], tree: Tree, absent: Sequence[str], problems: Iterable[Problem]
) -> tuple[Checked | None, list[Problem]]:
    """The settings of resolved values, None of faulty ones, and the problems so far with all that are found."""
    leaves, sections = fields.leaves_and_sections(cls, tree)
    found = [*problems, *_kinds(tree, leaves)]
    settings = None
    try:
        settings = cls.model_validate(tree)
    except ValidationError as error:
        found += [p for e in error.errors(include_url=False) for p in translate(e, "", leaves, [*sections])]
        found += checks.problems(_sound(cls, tree))
    return settings, found + [missing(path, leaves) for path in absent]


def _refuse(problems: Sequence[Problem], tree: Tree, source: str) -> None:
    """ConfigError with the first problem of each setting, in short names; nothing without any."""
    if short := _short(problems, tree):
        raise ConfigError(short, source)


def _short(problems: Sequence[Problem], tree: Tree) -> list[Problem]:
    """The first problem of each setting, in short names."""
    short = [replace(p, path=short_forms.short(p.path, tree), text=short_forms.short(p.text, tree)) for p in problems]
    return [*{problem.path: problem for problem in reversed(short)}.values()][::-1]


def _sound(root: type[Settings], tree: Tree) -> dict[str, Settings]:
    """The sections that are faultless by themselves, those of plug-ins aside."""
    sound = {}
    for name, field in root.model_fields.items():
        cls = fields.section_class(field)
        if cls is not None and fields.plugin_of(field) is None:
            with suppress(ValidationError):
                sound[name] = cls.model_validate(tree.get(name, {}))
    return sound


def _kinds(tree: Tree, leaves: dict[str, Leaf]) -> list[Problem]:
    """Values that pydantic would turn into another kind: true for a number, quoted text for a number or a switch."""
    problems = []
    for path, value in trees.paths(tree):
        leaf = leaves.get(path)
        if leaf is None:
            continue
        members = fields.alternatives(leaf.field.annotation)
        numeric = set(members) <= {int, float, bool, type(None)}
        if numeric and (isinstance(value, str) or (isinstance(value, bool) != (bool in members) and value is not None)):
            problems.append(Problem(path, f"allowed: {fields.allowed(leaf)}", value))
    return problems


def dump(config: Config) -> str:
    """YAML that loads back as an equal config: every setting that has an effect, defaults included."""
    return as_yaml(config.model_dump(mode="json"))


def as_yaml(tree: Tree, references: Collection[str] = ()) -> str:
    """Values as YAML that is read back as the same ones; `references` are texts that stay interpolations."""
    text = yaml_text.escaped(tree, references)
    return yaml.dump(text, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)


class _Dumper(yaml.SafeDumper):
    """Writes words bare and every other text in double quotes, so that no reader takes it for another type."""


_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_NOT_TEXT = {"true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan", "inf"}


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    bare = _WORD.fullmatch(text) and text.lower() not in _NOT_TEXT
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if bare else '"')


def _write_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.SequenceNode:
    flat = all(isinstance(value, (bool, int, float)) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=flat)


_Dumper.add_representer(str, _write_text)
_Dumper.add_representer(list, _write_list)


def differing(config: Config) -> Tree:
    """The settings whose values are not the defaults, and the names of the plug-ins that these belong to."""
    return _differing(config, config.model_dump(mode="json"), None, needed=True)


def _differing(settings: Settings, tree: Tree, default: Any, needed: bool) -> Tree:
    """Of one group; `default` is the group as it would be, None for what its class says. A group that is `needed` names
    its plug-in in any case."""
    found = {}
    for name, field in type(settings).model_fields.items():
        value, usual = getattr(settings, name), getattr(default, name, field.get_default(call_default_factory=True))
        if name not in tree or value == usual:
            continue
        if isinstance(value, Settings):
            own_default = usual if isinstance(usual, type(value)) else None
            found[name] = _differing(value, tree[name], own_default, needed=field.is_required() or usual is None)
        elif isinstance(value, dict) and all(isinstance(inner, Settings) for inner in value.values()):
            usual = usual if isinstance(usual, dict) and usual.keys() == value.keys() else {}
            inner = {key: _differing(own, tree[name][key], None, key not in usual) for key, own in value.items()}
            if any(inner.values()) or not usual:
                found[name] = {key: {**_named(own), **inner[key]} for key, own in value.items()}
        else:
            found[name] = tree[name]
    names = _named(settings)
    found = {name: value for name, value in found.items() if value != {} or tree[name] == {}}
    return {**names, **found} if found or needed else {}


def _named(settings: Settings) -> Tree:
    """The name of the plug-in that a group of settings belongs to, if it is one's."""
    literals = {n: f.annotation for n, f in type(settings).model_fields.items() if get_origin(f.annotation) is Literal}
    return {name: getattr(settings, name) for name, kind in literals.items() if len(get_args(kind)) == 1}


@dataclass(frozen=True)
class Change:
    """A setting that differs between two configs; None also stands for a setting that one of them lacks."""

    path: str
    old: Any
    new: Any
    resume: str
    """`identity`: may not change when a run is resumed; `elastic`: only who computes changes; `free`: may change."""


def diff(old: Config, new: Config) -> list[Change]:
    """The differences, in the order of the settings; settings of the only source as `data` has them."""
    both = [config.model_dump(mode="json") for config in (old, new)]
    known = fields.leaves(Config, both[0]) | fields.leaves(Config, both[1])
    before, after = _side_by_side(*both)
    names = {short_forms.only(tree) for tree in both}
    changes = []
    for path in dict.fromkeys([*before, *after]):
        if before.get(path) != after.get(path):
            owner = next((known[p] for p in _ancestors(path) if p in known), None)  # the innermost
            shown = short_forms.short(path, both[0]) if len(names) == 1 else path
            changes.append(Change(shown, before.get(path), after.get(path), owner.resume if owner else "identity"))
    return changes


def _side_by_side(*given: Tree) -> list[dict[str, Any]]:
    """Values by path; what is a mapping in one tree and a plain value in another is one value in both."""
    flat = [dict(trees.paths(tree)) for tree in given]
    inner = {above for values in flat for path in values for above in _ancestors(path)[1:]}
    plain = {path for values in flat for path in values if path in inner}
    for tree, values in zip(given, flat, strict=True):
        for path in plain:
            for below in [name for name in values if name.startswith(f"{path}.")]:
                del values[below]
            if (whole := trees.get(tree, path)) is not trees.ABSENT:
                values[path] = whole
    return flat


def _ancestors(path: str) -> list[str]:
    names = path.split(".")
    return [".".join(names[:i]) for i in range(len(names), 0, -1)]
