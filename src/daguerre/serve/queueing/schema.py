"""The settings that a form shows, from the JSON Schema of recipes, which a process of its own makes once a version.

Making it imports all plug-ins, and so torch; what is kept of it is a file in the user's cache.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import daguerre
from daguerre import documents, plugins, user_cache
from daguerre.checkpoint.atomic import make_folder, write_json_atomically
from daguerre.errors import UserError

Node = Mapping[str, Any]
_PACKAGE = Path(daguerre.__file__).parent
_HIDDEN = ("extends", "output_dir", "plugins")
"""Settings that the page or the run gives itself."""


@dataclass(frozen=True)
class Setting:
    """One setting of the form."""

    path: str
    about: str
    kinds: frozenset[str]
    """Types of JSON that it takes."""
    choices: tuple[str, ...] = ()
    """All values that it takes, where these are few."""
    default: Any = None


@dataclass
class Schema:
    """The schema, made when it is first asked for. Threads may ask."""

    _document: Node | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def document(self) -> Node:
        """The whole schema. UserError if it cannot be made."""
        with self._lock:
            if self._document is None:
                self._document = _kept() or _made()
            return self._document

    def settings(self, tree: Mapping[str, Any]) -> list[Setting]:
        """Every setting of a recipe with these values, in the order of their sections."""
        document = self.document()
        walk = _Walk(document["$defs"])
        top = {name: node for name, node in document["properties"].items() if name not in _HIDDEN}
        return [each for name, node in top.items() for each in walk.settings(name, node, tree.get(name))]


class _Walk:
    """Finds the settings below nodes of a schema, as the values of a recipe choose plug-ins and name members."""

    def __init__(self, definitions: Node) -> None:
        self.definitions = definitions

    def settings(self, path: str, node: Node, value: Any) -> Iterator[Setting]:
        node = self._whole(node)
        members = [self._whole(each) for each in node.get("anyOf", [node])]
        groups = [each for each in members if "properties" in each]
        inner = next((each["additionalProperties"] for each in members if _maps(each)), None)
        if inner is not None and any("properties" in self._whole(each) for each in inner.get("anyOf", [inner])):
            named = value if isinstance(value, dict) else node.get("default") or {}
            for name, own in named.items():
                if own is not None:
                    yield from self.settings(f"{path}.{name}", inner, own)
        elif len(groups) > 1:
            yield from self._chosen(path, node, groups, value)
        elif groups:
            yield from self._group(path, groups[0], value)
        else:
            yield _leaf(path, node, members)

    def _chosen(self, path: str, node: Node, groups: Sequence[Node], value: Any) -> Iterator[Setting]:
        """A section that one of several plug-ins defines."""
        key = next(name for name, own in groups[0]["properties"].items() if "const" in own)
        by_name = {str(each["properties"][key]["const"]): each for each in groups}
        default = node.get("default")
        given = value if isinstance(value, dict) else default if isinstance(default, dict) else None
        if given is None:  # none is there yet
            yield Setting(path, node.get("description", ""), frozenset({"string"}), (*by_name, "null"))
            return
        chosen = str(given.get(key, (default or {}).get(key)))
        about = node.get("description") or groups[0]["properties"][key].get("description", "")
        yield Setting(f"{path}.{key}", about, frozenset({"string"}), tuple(by_name))
        if chosen in by_name:
            yield from (each for each in self._group(path, by_name[chosen], given) if each.path != f"{path}.{key}")

    def _group(self, path: str, node: Node, value: Any) -> Iterator[Setting]:
        for name, own in node["properties"].items():
            yield from self.settings(f"{path}.{name}", own, value.get(name) if isinstance(value, dict) else None)

    def _whole(self, node: Node) -> Node:
        """A node with what it refers to; what stands next to the reference holds."""
        while "$ref" in node:
            own = {key: value for key, value in node.items() if key != "$ref"}
            node = {**self.definitions[node["$ref"].rpartition("/")[2]], **own}
        return node


def _maps(node: Node) -> bool:
    return isinstance(node.get("additionalProperties"), dict)


def _leaf(path: str, node: Node, members: Sequence[Node]) -> Setting:
    kinds = [kind for each in members for kind in ([each["type"]] if isinstance(each.get("type"), str) else [])]
    choices = [value for each in members for value in each.get("enum", [each["const"]] if "const" in each else [])]
    is_closed = all("enum" in each or "const" in each or each.get("type") in ("null", "boolean") for each in members)
    choices += ["true", "false"] * ("boolean" in kinds) + ["null"] * ("null" in kinds)
    about = node.get("description", "")
    few = tuple(map(str, choices)) if is_closed else ()
    return Setting(path, about, frozenset(kinds or ["any"]), few, node.get("default"))


def _place() -> Path:
    """The file in which the schema of this code is kept."""
    files = sorted(_PACKAGE.rglob("*.py"))
    stamps = [(str(path.relative_to(_PACKAGE)), path.stat().st_mtime_ns, path.stat().st_size) for path in files]
    outside = [plugins.digest(each) for kind in plugins.FOLDERS for each in plugins.outside(kind).values()]
    mark = sha256(json.dumps([daguerre.__version__, sys.version, stamps, outside]).encode()).hexdigest()[:16]
    return user_cache.folder() / "schema" / f"{mark}.json"


def _kept() -> Node | None:
    try:
        found: Node = documents.undigested(_place())
    except (OSError, ValueError):
        return None
    return found


def _made() -> Node:
    command = [sys.executable, "-m", "daguerre", "recipes", "--schema"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    try:
        found: Node = json.loads(done.stdout)
    except ValueError:
        raise UserError(f"the form cannot be made: {done.stderr.strip()[-2000:]}", code="failed") from None
    path = _place()
    try:
        make_folder(path.parent)
        for old in path.parent.glob("*.json"):
            os.unlink(old)
        write_json_atomically(path, documents.digested(found))
    except OSError:
        pass  # it is made again by the next server
    return found
