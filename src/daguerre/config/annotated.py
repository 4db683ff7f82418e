"""Recipes as text to read and change, with the meaning of each setting next to its value."""

from collections.abc import Iterator, Sequence

from daguerre.config import config as configs
from daguerre.config import fields
from daguerre.config.config import Config
from daguerre.formatting import wrapped
from daguerre.trees import Tree

_COLUMNS = 120


def text(head: Sequence[str], tree: Tree) -> str:
    """YAML of the settings of a tree, each with the first sentence of its documentation; `head` are the lines of a
    comment above, wrapped."""
    comment = [f"# {line}".rstrip() for given in head for line in wrapped(given, _COLUMNS - 2) or [""]]
    return "\n".join([*comment, *_lines(tree)]) + "\n"


def _lines(tree: Tree) -> Iterator[str]:
    leaves, above = fields.leaves(Config, tree), list[str]()
    for line in configs.as_yaml(tree).splitlines():
        words = line.lstrip()
        depth = (len(line) - len(words)) // 2
        name, colon, _ = words.partition(":")
        if not colon or words.startswith(("-", '"')):
            yield line
            continue
        above = [*above[:depth], name]
        leaf = leaves.get(".".join(above))
        about = fields.summary(leaf.doc).rstrip(":") if leaf is not None else ""
        if about and len(line) + len(about) + 4 > _COLUMNS:
            yield from (f"{' ' * 2 * depth}# {part}" for part in wrapped(about, _COLUMNS - 2 * depth - 2))
            yield line
        else:
            yield f"{line}  # {about}" if about else line
