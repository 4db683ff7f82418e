"""The record of plug-ins from outside of the package that a config names: `plugins` in a run's config.yaml.

It says what code a run was trained with. It is never read to find code.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from daguerre import plugins, trees
from daguerre.config import fields
from daguerre.config.errors import Problem
from daguerre.settings import Settings
from daguerre.trees import Tree

Record = dict[str, dict[str, dict[str, str | None]]]
"""`package`, `version` and `digest` by kind and name; package and version are None of a file in a folder."""


def used(config: Settings) -> Record:
    """The record of the plug-ins that a config names."""
    found: Record = {}
    for kind, name, _ in _named(config):
        if not plugins.is_own(kind, name):
            there = plugins.outside(kind)[name]
            record = {"package": there.package, "version": there.version, "digest": plugins.digest(there)}
            found.setdefault(kind, {})[name] = record
    return found


def other_code(recorded: Record, config: Settings) -> Iterator[tuple[tuple[str, str], str, str]]:
    """Kind and name of each plug-in that decides what is learnt and has other code than that of the record, with both
    digests. Whether it may be another plug-in, its name's own setting says."""
    here = used(config)
    for kind, name in dict.fromkeys((kind, name) for kind, name, resume in _named(config) if resume == "identity"):
        before, now = (each.get(kind, {}).get(name, {}).get("digest") for each in (recorded, here))
        if before and now and before != now:
            yield (kind, name), before, now


def _named(config: Settings) -> Iterator[tuple[str, str, str]]:
    """Kind, name and class of resume of every plug-in of a config."""
    tree = config.model_dump(mode="json")
    for path, leaf in fields.leaves(type(config), tree).items():
        kind = leaf.plugin.kind if leaf.plugin else fields.named_kind(leaf.field)
        if kind and isinstance(name := trees.get(tree, path), str):
            yield kind, name, leaf.resume


def problems(tree: Tree, typed: Collection[str]) -> Iterator[Problem]:
    """Problems of the record in a recipe: its plug-ins are not here, or the command line gives it."""
    if any(path.partition(".")[0] == "plugins" for path in typed):
        yield Problem("plugins", "is written by a run: name the plug-in in its section, such as objective.name=NAME")
    recorded = tree.get("plugins")
    kinds = {kind: own for kind, own in recorded.items() if isinstance(own, dict)} if isinstance(recorded, dict) else {}
    if away := [f"{n} of {kind}" for kind, own in kinds.items() for n in own if not _is_here(kind, n)]:
        yield Problem(
            "plugins",
            f"these plug-ins are not here: {', '.join(away)}. Install their package, or name their folder before the "
            "verb: daguerre --plugins DIR VERB ...",
        )


def _is_here(kind: str, name: str) -> bool:
    return kind in plugins.FOLDERS and plugins.exists(kind, name)


def differences(recorded: Mapping[str, Any], here: Record) -> list[str]:
    """A line for each plug-in whose code is another one than that of the record."""
    return [
        f"the plug-in {name} of {kind} is not the one that this was made with: {_text(known)} then, "
        f"{_text(here[kind][name])} now"
        for kind, own in recorded.items()
        for name, known in own.items()
        if name in here.get(kind, {}) and here[kind][name]["digest"] != known.get("digest")
    ]


def _text(record: Mapping[str, str | None]) -> str:
    digest = (record.get("digest") or "")[:12]
    return f"{record['package']} {record['version']} ({digest})" if record.get("package") else f"digest {digest}"
