"""The settings that exist: a walk over the settings classes, given the plug-ins that a tree of values names.

Holds `Leaf`, one setting with its path, type and documentation. Values are read, checked and changed elsewhere.
"""

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from daguerre import plugins
from daguerre.data.filters.filter import Filters
from daguerre.settings import Duration, Named, Plugin, Settings, documentation


@dataclass(frozen=True)
class Leaf:
    """One setting: a field that is no group of settings itself."""

    path: str
    field: FieldInfo
    resume: str
    """`identity`, `elastic` or `free`: whether it may change when a run is resumed."""
    plugin: Plugin | None = None
    """Set where the setting is the name of a plug-in."""
    of: type[Settings] | None = None
    """The class whose field it is; None of what stands in a mapping."""

    @property
    def doc(self) -> str:
        return documentation(self.of).get(self.path.rpartition(".")[2], "") if self.of else ""

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @property
    def default(self) -> Any:
        """The default value, `PydanticUndefined` without one."""
        return self.field.get_default(call_default_factory=True) if not self.required else PydanticUndefined


@dataclass(frozen=True)
class Section:
    """A group of settings."""

    path: str
    cls: type[Settings]
    field: Leaf
    """The field that it is, or the mapping whose member it is."""
    plugin: Plugin | None = None
    """Set where a plug-in defines it."""
    named: bool = False
    """Whether it is a member of a mapping, under a name of the recipe's own; null takes such a one out."""
    optional: bool = False
    """Whether it may be null: a group that a recipe may do without."""

    @property
    def doc(self) -> str:
        return self.field.doc


def plugin_of(field: FieldInfo) -> Plugin | None:
    """The plug-in mark of a section, if it has one."""
    for mark in field.metadata:
        if isinstance(mark, Plugin):
            return mark
    return None


def named_kind(field: FieldInfo) -> str | None:
    """The kind of plug-ins of which a setting is a bare name."""
    return next((mark.kind for mark in field.metadata if isinstance(mark, Named)), None)


def plugin_inside(field: FieldInfo) -> Plugin | None:
    """The mark of a mapping's values, if they are sections of plug-ins."""
    mappings = [a for a in alternatives(field.annotation) if get_origin(a) is dict]
    return next((mark for a in mappings for mark in get_args(get_args(a)[1]) if isinstance(mark, Plugin)), None)


def plugin_sections(root: type[Settings], tree: Any = None) -> dict[str, Plugin]:
    """The sections whose settings a plug-in defines, those in mappings as `tree` names them."""
    return {s.path: s.plugin for s in walk(root, tree) if isinstance(s, Section) and s.plugin}


def optional_plugins(root: type[Settings], tree: Any) -> dict[str, Plugin]:
    """The sections that a plug-in may define and a recipe may do without, those in mappings as `tree` names them."""
    found = {each.path: optional_plugin(each) for each in walk(root, tree)}
    return {path: plugin for path, plugin in found.items() if plugin is not None}


def optional_plugin(found: Leaf | Section) -> Plugin | None:
    """The mark of a section that a plug-in may define and a recipe may do without; None of all others."""
    if isinstance(found, Leaf):
        return plugin_of(found.field)
    return found.plugin if found.optional else None


def section_class(field: FieldInfo, given: Any = None) -> type[Settings] | None:
    """The settings class of a section, None if the field is a leaf. A plug-in's name is taken from `given`."""
    if plugin := plugin_of(field):
        values = given if isinstance(given, dict) else field.default if isinstance(field.default, dict) else {}
        return _chosen(plugin, values)
    return next((a for a in alternatives(field.annotation) if isinstance(a, type) and issubclass(a, Settings)), None)


def inside(field: FieldInfo, given: Any) -> dict[str, type[Settings]]:
    """The settings classes of the members of a mapping whose values are sections of plug-ins."""
    plugin = plugin_inside(field)
    if plugin is None or not isinstance(given, dict):
        return {}
    return {name: _chosen(plugin, own) for name, own in given.items() if isinstance(own, dict)}


def _chosen(plugin: Plugin, values: Mapping[str, Any]) -> type[Settings]:
    name = values.get(plugin.key, plugin.default)
    return plugin.settings_class(name) if plugins.exists(plugin.kind, name) else plugin.base


class _Shape(NamedTuple):
    """A field of a settings class, without what a recipe chooses."""

    name: str
    field: FieldInfo
    plugin: Plugin | None
    inside: Plugin | None
    """The mark of a mapping's values, if they are sections of plug-ins."""
    section: type[Settings] | None
    """The class of a section that no plug-in defines."""
    nullable: bool
    resume: str | None


@cache
def _shapes(cls: type[Settings]) -> tuple[_Shape, ...]:
    found = []
    for name, field in cls.model_fields.items():
        if name not in cls.around:
            extra = field.json_schema_extra
            resume = str(extra["resume"]) if isinstance(extra, dict) and "resume" in extra else None
            plugin = plugin_of(field)
            section = None if plugin else section_class(field)
            nullable = type(None) in alternatives(field.annotation)
            found.append(_Shape(name, field, plugin, plugin_inside(field), section, nullable, resume))
    return tuple(found)


def walk(
    cls: type[Settings], tree: Any = None, prefix: str = "", resume: str = "identity", plugin: Plugin | None = None
) -> Iterable[Leaf | Section]:
    """All settings and sections under a class, in their order; plug-ins, and members of mappings, as `tree` has
    them. `plugin` is the mark of the section, where a plug-in defines it."""
    return _walk(cls, tree, prefix, resume, plugin) if _depends_on_tree(cls) else _walked(cls, prefix, resume, plugin)


@cache
def _depends_on_tree(cls: type[Settings]) -> bool:
    """True if a recipe chooses plug-ins or members of mappings below a class."""
    return any(s.plugin or s.inside or (s.section and _depends_on_tree(s.section)) for s in _shapes(cls))


@lru_cache(maxsize=1024)
def _walked(cls: type[Settings], prefix: str, resume: str, plugin: Plugin | None) -> tuple[Leaf | Section, ...]:
    return tuple(_walk(cls, None, prefix, resume, plugin))


@lru_cache(maxsize=1024)
def _placed(cls: type[Settings], prefix: str, resume: str, plugin: Plugin | None) -> tuple[tuple[_Shape, Leaf], ...]:
    """The fields of a class, each with the setting that it is where it is no section."""
    key = plugin.key if plugin else ""
    return tuple(
        (s, Leaf(f"{prefix}{s.name}", s.field, s.resume or resume, plugin if s.name == key else None, cls))
        for s in _shapes(cls)
    )


def _walk(cls: type[Settings], tree: Any, prefix: str, resume: str, plugin: Plugin | None) -> Iterator[Leaf | Section]:
    for shape, leaf in _placed(cls, prefix, resume, plugin):
        field, path, marked = shape.field, leaf.path, leaf.resume
        given = tree.get(shape.name) if isinstance(tree, dict) else None
        inner = section_class(field, given) if shape.plugin else shape.section
        if inner is not None and (isinstance(given, dict) or not (shape.plugin and shape.nullable)):
            section = Section(path, inner, leaf, shape.plugin, optional=shape.nullable)
            yield from _walk_section(section, given, marked)
            continue
        yield leaf
        for member, own in (inside(field, given) if shape.inside else {}).items():
            section = Section(f"{path}.{member}", own, leaf, shape.inside, named=True)
            yield from _walk_section(section, given and given[member], marked)


def _walk_section(section: Section, given: Any, resume: str) -> Iterator[Leaf | Section]:
    yield section
    yield from walk(section.cls, given, f"{section.path}.", resume, section.plugin)


def leaves(cls: type[Settings], tree: Any = None) -> dict[str, Leaf]:
    """Every setting by its path; sections of plug-ins are those that `tree` names."""
    return {found.path: found for found in walk(cls, tree) if isinstance(found, Leaf)}


def sections(cls: type[Settings], tree: Any = None) -> dict[str, Section]:
    """Every group of settings by its path."""
    return {found.path: found for found in walk(cls, tree) if isinstance(found, Section)}


def leaves_and_sections(cls: type[Settings], tree: Any = None) -> tuple[dict[str, Leaf], dict[str, Section]]:
    """Both by their paths, from one walk."""
    found = [*walk(cls, tree)]
    sections = {each.path: each for each in found if isinstance(each, Section)}
    return {each.path: each for each in found if isinstance(each, Leaf)}, sections


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone, without annotations; `Literal` stays whole."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(a for member in get_args(annotation) for a in alternatives(member))
    return (annotation,)


def member(leaf: Leaf, name: str) -> Leaf | None:
    """The setting that a key of a mapping is; None of a mapping whose values may be anything, and of what is not a
    mapping."""
    inner = next((get_args(a) for a in alternatives(leaf.field.annotation) if get_origin(a) is dict), ())
    known = len(inner) == 2 and inner[1] is not Any
    own = FieldInfo.from_annotation(inner[1]) if known else None
    return replace(leaf, path=f"{leaf.path}.{name}", field=own, of=None) if own else None


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    Duration: "a duration such as '20k steps', '1.5M samples', '3 epochs' or '100 epochs up to 64k samples'",
    Filters: "an expression, {field: comparison} or a list of pairs",
}


def allowed(leaf: Leaf) -> str:
    """The values that a setting accepts, in words."""
    if plugin := leaf.plugin or plugin_of(leaf.field):
        return ", ".join(plugins.names(plugin.kind)) + (" or null" if leaf.plugin is None else "")
    if named := named_kind(leaf.field):
        return ", ".join(plugins.names(named))
    words = _in_words(leaf.field.annotation)
    bounds = [getattr(m, name) for m in leaf.field.metadata for cls, name, _ in _BOUNDS if isinstance(m, cls)]
    if len(bounds) == 2 and bounds[0] == bounds[1]:
        return str(bounds[0])
    return _limited(words, leaf.field.metadata)


def _limited(words: str, metadata: Iterable[Any]) -> str:
    """The words for a number, with its limits."""
    limits = _limits(metadata)
    return words.replace("number", f"number {limits}", 1) if limits and "number" in words else words


def _in_words(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        return _limited(_in_words(kind), [m for own in metadata for m in getattr(own, "metadata", [own])])
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(map(_in_words, get_args(annotation)))
    if annotation in _WORDS:
        return _WORDS[annotation]
    if get_origin(annotation) is Literal:
        return ", ".join(str(a).lower() if isinstance(a, bool) else str(a) for a in get_args(annotation))
    if get_origin(annotation) in (list, tuple):
        members = [a for a in get_args(annotation) if a is not Ellipsis]
        of = f" of {_in_words(members[0])}".replace("a whole number", "whole numbers") if members else ""
        return f"a list [..., ...]{of.replace('of a number', 'of numbers')}"
    if get_origin(annotation) is dict or annotation is dict:
        words = [_WORDS.get(member, "value") for member in get_args(annotation)[1:]]
        return f"a group of keys {{key: {words[0] if words else 'value'}}}"
    return getattr(annotation, "__name__", str(annotation))


def _limits(metadata: Iterable[Any]) -> str:
    words = []
    for limit in metadata:
        for cls, name, word in _BOUNDS:
            if isinstance(limit, cls):
                value = getattr(limit, name)
                words.append(f"{word} {value if isinstance(value, int) else format(value, 'g')}")
    return " ".join(words).replace(" below", ", below") if len(words) > 1 else " ".join(words)


_BOUNDS: tuple[tuple[type, str, str], ...] = (
    (Gt, "gt", "above"),
    (Ge, "ge", "from"),
    (Le, "le", "to"),
    (Lt, "lt", "below"),
)


def summary(doc: str) -> str:
    """The first sentence of a documentation string, on one line."""
    line = " ".join(doc.split())
    end = next((i for i in range(len(line)) if line[i] == "." and line[i + 1 : i + 2] in ("", " ")), len(line))
    return line[:end]
