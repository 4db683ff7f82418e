"""What mypy leaves unread of large packages (pyproject.toml) holds nothing that is taken from them here: its types
would be lost without a word."""

import ast
import inspect
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("diffusers", "transformers")


def taken(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Module and name of what a file takes from the packages."""
    own: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            own |= {each.asname or each.name: each.name for each in node.names if each.name.startswith(PACKAGES)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGES):
            yield from ((str(node.module), each.name) for each in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in own:
            yield own[node.value.id], node.attr


def places(module: str, name: str) -> set[str]:
    """Modules in which a thing stands, and all that a class inherits."""
    thing = getattr(import_module(module), name, None)
    if thing is None or inspect.ismodule(thing):
        return {f"{module}.{name}"}
    classes = inspect.getmro(thing) if inspect.isclass(thing) else (thing,)
    return {getattr(each, "__module__", module) for each in classes}


@pytest.mark.filterwarnings("ignore")  # of the packages
def test_mypy_reads_what_is_taken_from_others():
    written = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["overrides"]
    follows = {name: each["follow_imports"] for each in written if "follow_imports" in each for name in each["module"]}
    assert follows
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        code = path.read_text(encoding="utf-8")
        for module, name in taken(ast.parse(code)) if any(package in code for package in PACKAGES) else ():
            found |= places(module, name)
    assert {"transformers.models.clip.modeling_clip", "transformers.modeling_utils"} <= found

    def unread(module: str) -> bool:
        """As mypy decides: by the name itself, or the longest pattern that fits."""
        fitting = [name for name in follows if name == module or fnmatchcase(f"{module}.", name)]
        return bool(fitting) and follows[max(fitting, key=lambda name: (name == module, len(name)))] == "skip"

    assert unread("transformers.models.bert.modeling_bert")
    # Of a module in a package that is not read mypy knows nothing, either.
    above = {module[:end] for module in found for end, letter in enumerate(f"{module}.") if letter == "."}
    assert {module for module in above if unread(module)} == set()
