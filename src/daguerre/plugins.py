"""Plug-ins by name: a file in a plug-in folder is a choice, and its name is the name in the recipe.

Adding a file to a folder of the package adds the choice; nothing is registered. Outside of the package, plug-ins are
the entry points `daguerre.KIND` of installed packages, and the files KIND/NAME.py of the folders that `daguerre
--plugins DIR` or DAGUERRE_PLUGINS names. Nothing else is ever imported: a recipe, a run folder, a data set or the page
names a plug-in, and never says where its code is.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from daguerre.errors import UserError

FOLDERS = {
    "families": "families",
    "objectives": "objectives",
    "adapters": "adapters",
    "sources": "data/sources",
    "samplers": "samplers",
    "metrics": "evaluation/metrics",
    "optimizers": "training/optimizers",
    "conditions": "conditions",
    "trackers": "tracking/trackers",
    "captioners": "captioning",
}
"""Plug-in kinds and their folders in the package. A module is a plug-in when it defines `Settings`
(families, objectives, adapters, sources, optimizers, conditions, metrics, trackers, captioners) or `sample`
(samplers)."""
VARIABLE = "DAGUERRE_PLUGINS"
"""The environment variable that names folders of plug-ins, with ":" between them (";" on Windows)."""

_MARKS = {"samplers": "def sample("}
_PACKAGE = Path(__file__).parent
_OUTSIDE = "daguerre.outside"
_MANY = 1000
"""Modules: torch alone has as many."""
_TAKEN = "{place}: there is a plug-in {name!r} of {kind} already; give this one another name"


class Outside(NamedTuple):
    """A plug-in from outside of the package."""

    module: str
    """The name by which it is imported."""
    path: Path
    root: Path
    """The folder of plug-ins, or the package, in which the file lies; of a module that is a file, the file."""
    package: str | None = None
    """The name of the installed package; None in a folder."""
    version: str | None = None

    @property
    def place(self) -> str:
        """The package and its version, or the file, for messages."""
        return f"{self.package} {self.version}" if self.package else str(self.path)


@cache
def _own(kind: str) -> tuple[str, ...]:
    return tuple(sorted(_in_folder(_PACKAGE / FOLDERS[kind], kind)))


def _in_folder(folder: Path, kind: str) -> list[str]:
    """The plug-ins of a folder, found by reading it (nothing is imported)."""
    mark = _MARKS.get(kind, "\nclass Settings(")
    return [p.stem for p in folder.glob("[!_]*.py") if mark in p.read_text(encoding="utf-8")]


def names(kind: str) -> tuple[str, ...]:
    """All choices of one kind, sorted. Nothing is imported."""
    return tuple(sorted({*_own(kind), *outside(kind)}))


def is_own(kind: str, name: Any) -> bool:
    """True if a plug-in is a file of the package."""
    return isinstance(name, str) and name in _own(kind)


def exists(kind: str, name: Any) -> bool:
    """True if there is a plug-in of this name, which a recipe may give in another form. Installed packages are looked
    through only for one that is not ours."""
    return isinstance(name, str) and (name in _own(kind) or name in outside(kind))


def check(kind: str, name: str, meant: str = "") -> None:
    """UserError if there is no plug-in `name`: lists what exists, and proposes `meant` or the nearest name. Nothing is
    imported."""
    if not exists(kind, name):
        import difflib  # for a wrong name alone

        near = [meant] if meant else [repr(n) for n in difflib.get_close_matches(str(name), names(kind), n=1)]
        hint = f". Did you mean {near[0]}? There are" if near else "; there are"
        raise UserError(f"there is no {name!r} in {kind}{hint}: {', '.join(names(kind))}", code="unknown")


def declared(kind: str, name: str) -> tuple[Any, ...]:
    """All that plug-ins of a kind have under `name` in their modules, each object once: what shared code must know of
    some of them, without naming one."""
    found = [getattr(find(kind, each), name, None) for each in names(kind)]
    return tuple({id(each): each for each in found if each is not None}.values())


def module(kind: str, name: str) -> str:
    """The name by which a plug-in that exists is imported."""
    if name in _own(kind):
        return f"daguerre.{FOLDERS[kind].replace('/', '.')}.{name}"
    return outside(kind)[name].module


def find(kind: str, name: str) -> ModuleType:
    """The module of the plug-in `name`. UserError as from `check`, and for one from outside that cannot be imported."""
    check(kind, name)
    if name in _own(kind):
        if _may_be_installed(tuple(sys.path)):
            outside(kind)  # refuses another one of this name
        with uncollected():
            return import_module(module(kind, name))
    there = outside(kind)[name]
    try:
        found = import_module(there.module)
    except (ImportError, SyntaxError) as error:
        raise UserError(f"the plug-in {name!r} of {kind} ({there.place}) cannot be imported: {error}") from error
    wanted = "sample" if kind in _MARKS else "Settings"
    if not hasattr(found, wanted):
        raise UserError(f"the plug-in {name!r} of {kind} ({there.place}) has no `{wanted}`: docs/extending.md")
    key = {"families": "family", "sources": "source"}.get(kind, "name")
    field = getattr(getattr(found, "Settings", None), "model_fields", {}).get(key)
    if field is not None and field.default != name:
        raise UserError(
            f"the plug-in {name!r} of {kind} ({there.place}) has {key}={field.default!r} in its Settings: write "
            f'{key}: Literal["{name}"] = "{name}"'
        )
    return found


@contextmanager
def uncollected() -> Iterator[None]:
    """Imports without the garbage collector, which looks through all modules again and again while more are loaded: a
    sixth of the start of a command. What many modules have made is never looked at later, either: it is no garbage."""
    was, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) - before > _MANY:
            gc.freeze()
        if was:
            gc.enable()


def file_of(module: str) -> Path | None:
    """The file of a module of ours or of a plug-in. Neither the module nor a package above it is imported."""
    top, *parts = module.split(".")
    if module.startswith(f"{_OUTSIDE}."):
        places, parts = [*map(str, folders())], parts[1:]
    elif top == "daguerre":
        places = [str(_PACKAGE)]
    else:
        from importlib.util import find_spec  # for plug-ins of installed packages alone

        spec = find_spec(top)
        places = [*(spec.submodule_search_locations or ())] if spec else []
        if spec and spec.origin and not parts:
            return Path(spec.origin)
    found = [each for p in places for each in (Path(p, *parts, "__init__.py"), Path(p, *parts).with_suffix(".py"))]
    return next((path for path in found if path.is_file()), None)


# ---- outside of the package


def folders() -> tuple[Path, ...]:
    """The folders of plug-ins that the command line or the environment names. UserError for one that is not there."""
    return _checked(os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=8)
def _checked(given: str) -> tuple[Path, ...]:
    found = tuple(Path(each).expanduser().absolute() for each in given.split(os.pathsep) if each)
    for folder in found:
        if not folder.is_dir():
            raise UserError(f"{folder}: a folder of plug-ins (--plugins, {VARIABLE}) is not there", code="missing")
        for inner in sorted(each for each in folder.glob("[!_.]*") if each.name not in FOLDERS):
            if inner.suffix == ".py" or (inner.is_dir() and any(inner.glob("*.py"))):
                import difflib  # for a wrong name alone

                near = difflib.get_close_matches(inner.stem, FOLDERS, n=1)
                hint = f"did you mean {near[0]}/? " if near else ""
                raise UserError(
                    f"{inner}: {hint}A folder of plug-ins holds KIND/NAME.py, of these kinds: {', '.join(FOLDERS)}. "
                    "Begin the name of a file or a folder that plug-ins share with _",
                    code="unknown",
                )
    return found


def check_folders() -> None:
    """UserError for a folder of plug-ins that is not there, and for names in it that are taken."""
    for kind in FOLDERS:
        found: set[str] = {*_own(kind)}
        for name, there in _of_folders(kind, folders()):
            if name in found:
                raise UserError(_TAKEN.format(place=there.place, name=name, kind=kind), code="conflict")
            found.add(name)


def outside(kind: str) -> dict[str, Outside]:
    """The plug-ins of a kind from outside of the package, by name. UserError where two have one name."""
    return _outside(kind, folders())


@lru_cache(maxsize=len(FOLDERS))
def _outside(kind: str, given: tuple[Path, ...]) -> dict[str, Outside]:
    found: dict[str, Outside] = {}
    for name, there in (*_of_folders(kind, given), *_installed(kind)):
        if name in _own(kind) or name in found:
            raise UserError(_TAKEN.format(place=there.place, name=name, kind=kind), code="conflict")
        found[name] = there
    return found


def _of_folders(kind: str, given: tuple[Path, ...]) -> Iterator[tuple[str, Outside]]:
    for folder in given:
        for name in sorted(_in_folder(folder / kind, kind)):
            yield name, Outside(f"{_OUTSIDE}.{kind}.{name}", folder / kind / f"{name}.py", folder)


def _installed(kind: str) -> Iterator[tuple[str, Outside]]:
    if not _may_be_installed(tuple(sys.path)):
        return
    from importlib.metadata import entry_points  # takes longer than all that a short command does

    for point in entry_points(group=f"daguerre.{kind}"):
        package, version = (point.dist.name, point.dist.version) if point.dist else (None, None)
        path = file_of(point.value)
        if path is None:
            raise UserError(
                f"{package} {version} has a plug-in {point.name!r} of {kind} in {point.value!r}, which is no module of "
                "an installed package: an entry point names the module alone, such as 'my_package.my_module'",
                code="missing",
            )
        top = file_of(point.module.partition(".")[0])
        root = top.parent if top and top.name == "__init__.py" else path
        yield point.name, Outside(point.module, path, root, package, version)


@lru_cache(maxsize=1)
def _may_be_installed(places: tuple[str, ...]) -> bool:
    """False where no package in these places has an entry point of ours; True where that is not known, as of an
    archive."""
    for place in map(Path, places):
        if place.is_file():
            return True
        for path in place.glob("*-info/entry_points.txt"):
            with suppress(OSError):
                if b"[daguerre." in path.read_bytes():
                    return True
    return False


def digest(plugin: Outside) -> str:
    """SHA-256 of a plug-in's code: its file, and all files of its folder or package that it imports, or may import.

    A file may be imported where its name stands in an import. Code of other packages is not in it.
    """
    from daguerre import digests  # for who has plug-ins alone

    every = [plugin.path] if plugin.root.is_file() else sorted(plugin.root.rglob("*.py"))
    found, new = set[Path](), {plugin.path}
    while new:
        found |= new
        words = {word for path in new for word in _imported(path)}
        new = {path for path in every if path.stem in words or path.name == "__init__.py"} - found
    return digests.sha256([path for path in every if path in found])


def parsed(path: Path) -> Any:
    """The syntax tree of a file. UserError for one that is no Python, as a plug-in from outside may be."""
    import ast  # as in `digest`

    try:
        return ast.parse(path.read_text(encoding="utf-8"), path.name)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as Python: {error}") from error


def _imported(path: Path) -> Iterator[str]:
    """The words of a file's imports."""
    import ast  # as in `digest`

    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (getattr(node, "module", None) or "").split(".")
            yield from (word for alias in node.names for word in alias.name.split("."))
