"""The settings of plug-ins by their names alone, read off the source: importing most plug-ins loads torch, which takes
seconds, and a misspelt name is refused before that.

`of(Config)` is a class like another, in which the sections of plug-ins have every setting that the plug-ins' own files
give them, of unknown type. It finds settings and their names; values are checked by the plug-ins themselves.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import resolve_name
from typing import Annotated, Any, NamedTuple

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from daguerre import plugins
from daguerre.config import fields
from daguerre.settings import Plugin, Settings

_BASE = (Settings.__module__, Settings.__name__)
_Class = tuple[str, str]
"""A class by its module and its name."""


@dataclass(frozen=True)
class _Outlined(Plugin):
    """The mark of a section whose plug-ins are not imported, but for those from outside that are not read whole."""

    def settings_class(self, name: Any) -> type[Settings]:
        self.check(name)
        cls = self._class(name)
        return _outline(cls) if _is_read_whole(cls) else self._settings(name)

    def able(self) -> list[str]:
        base = self.base.__module__, self.base.__name__
        return [name for name in plugins.names(self.kind) if base in self._starts(name)]

    def _starts(self, name: str) -> list[_Class]:
        """The classes that the settings of a plug-in start from."""
        cls = self._class(name)
        if _is_read_whole(cls):
            return [*_ancestors(cls)]
        return [(each.__module__, each.__name__) for each in self._settings(name).__mro__]

    def _class(self, name: str) -> _Class:
        cls = plugins.module(self.kind, name), "Settings"
        return _origin(*cls) or cls


@cache
def of(root: type[Settings]) -> type[Settings]:
    """The class with outlines in place of its sections that plug-ins define."""
    marked: dict[str, Any] = {name: _marked(field) for name, field in root.model_fields.items()}
    return create_model(root.__name__, __base__=Settings, __module__=root.__module__, **marked)


def _marked(field: FieldInfo) -> tuple[Any, Any]:
    """A field's type and value."""
    plugin = fields.plugin_of(field) or fields.plugin_inside(field)
    if plugin is None:
        return field.annotation, field
    section: Any = Annotated[Settings, _Outlined(plugin.kind, plugin.key, plugin.base, plugin.default)]
    default = ... if field.is_required() else field.default
    return section if fields.plugin_of(field) else dict[str, section], Field(default)


@cache
def _outline(cls: _Class) -> type[Settings]:
    """A settings class as its source describes it: sections of sections, and settings that take any value."""
    return create_model(cls[1], __base__=Settings, __module__=cls[0], **_fields(cls))


def _fields(cls: _Class) -> dict[str, Any]:
    """The fields of a class and of those that it starts from, theirs first."""
    module, node = cls[0], _node(cls)
    found: dict[str, Any] = {}
    for base in reversed(node.bases):
        if isinstance(base, ast.Name) and (origin := _origin(module, base.id)) not in (None, _BASE):
            found |= _fields(origin)
    for line in node.body:
        if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
            continue
        if (kind := _type(module, line.annotation)) is not None:
            found[line.target.id] = (kind, Field(_default(line.value), validate_default=False))
    return found


def _default(value: ast.expr | None) -> Any:
    """The default of a field: itself if it is written out, else its expression as a text; `...` without one."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
        named = [each.value for each in value.keywords if each.arg in ("default", "default_factory")]
        value = next(iter([*value.args, *named]), None)
    if value is None:
        return ...
    try:
        return ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value)


def _type(module: str, annotation: ast.expr) -> Any:
    """The type of a field: a section of a plug-in, one of another class, or anything; None for a ClassVar."""
    while isinstance(annotation, ast.Name) and (alias := _alias(module, annotation.id)):
        module, annotation = alias
    nodes = [*ast.walk(annotation)]
    words = [node.id for node in nodes if isinstance(node, ast.Name)]
    if "ClassVar" in words:
        return None
    mark = next((node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "Plugin"), None)
    if mark is not None:
        values = [arg.value for arg in (*mark.args, *(k.value for k in mark.keywords)) if isinstance(arg, ast.Constant)]
        kind, key, default = (*map(str, values), None)[:3]
        starts = _origin(module, ast.unparse(mark.args[2])) or _BASE
        outlined = _Outlined(str(kind), str(key), _outline(starts), default)
        optional = "None" in ast.unparse(annotation)
        return Annotated[Settings | None, outlined] if optional else Annotated[Settings, outlined]
    several = {"dict", "list"} & {*words}
    if not several and (section := next(filter(None, (_section(module, word) for word in words)), None)):
        return section | None
    return dict[str, Any] | Any  # names inside a mapping are the recipe's own; a list is given as a whole


def _section(module: str, word: str) -> type[Settings] | None:
    """The outline of the settings class that a name stands for; None of all others."""
    cls = _origin(module, word)
    return _outline(cls) if cls and _BASE in _ancestors(cls) else None


@cache
def _is_read_whole(cls: _Class) -> bool:
    """False for a class with a base that is not found in files of ours or of the plug-in's own folder or package."""
    if _origin(*cls) != cls:
        return False
    origins = [_origin(cls[0], base.id) if isinstance(base, ast.Name) else None for base in _node(cls).bases]
    return all(origin is not None and (origin == _BASE or _is_read_whole(origin)) for origin in origins)


def _node(cls: _Class) -> ast.ClassDef:
    """The lines of a class."""
    return _names(cls[0]).classes[cls[1]]


def _ancestors(cls: _Class) -> Iterator[_Class]:
    for base in _node(cls).bases:
        if isinstance(base, ast.Name) and (origin := _origin(cls[0], base.id)):
            yield origin
            yield from _ancestors(origin)


def _origin(module: str, name: str) -> _Class | None:
    """The class of ours that a name of a module stands for; None of what is no such class."""
    names = _names(module)
    if name in names.classes:
        return module, name
    return _origin(names.imported[name], name) if name in names.imported else None


def _alias(module: str, name: str) -> tuple[str, ast.expr] | None:
    """The module and the expression of a type that has a name of its own."""
    names = _names(module)
    if name in names.values:
        return module, names.values[name]
    return _alias(names.imported[name], name) if name in names.imported else None


class _Names(NamedTuple):
    """The names of a module of ours, by kind."""

    classes: dict[str, ast.ClassDef]
    values: dict[str, ast.expr]
    imported: dict[str, str]
    """The modules, of ours or of the same folder or package, from which it has them."""


@cache
def _names(module: str) -> _Names:
    """A module's names, read from its file."""
    if (file := plugins.file_of(module)) is None:  # of an extension in another language
        return _Names({}, {}, {})
    tree, package = plugins.parsed(file), module.rpartition(".")[0]
    package = module if file.name == "__init__.py" else package
    found = _Names({}, {}, {})
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found.classes[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.values[node.targets[0].id] = node.value
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            if source.startswith(("daguerre.", f"{module.partition('.')[0]}.")):
                found.imported.update({alias.name: source for alias in node.names if alias.asname is None})
    return found
