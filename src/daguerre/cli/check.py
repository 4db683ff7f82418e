"""Check a plug-in against the contract of its kind.

usage: daguerre check NAME [key=value ...]

Runs the tests that Daguerre's own plug-ins of the kind must pass, with pytest. NAME is a plug-in's name, or
KIND.NAME where several kinds have one. key=value are settings that it does not work without, or that make it small:
a family and a captioner are loaded for it.

  daguerre --plugins my_plugins check difference
  daguerre --plugins my_plugins check sources.stripes widest_px=4
  daguerre --plugins my_plugins check families.pixels 'channels=[8,16]'
  daguerre check objectives.v

docs/plugins.md says more.
"""

import difflib
from importlib.util import find_spec
from typing import Any

from daguerre import errors, plugins, trees
from daguerre.config import overrides
from daguerre.errors import UserError


def run(arguments: list[str]) -> int:
    """0 if the plug-in keeps its contract."""
    given = overrides.split(arguments, flags=())
    kind, name = _named(given.recipe)
    plugins.find(kind, name)
    values: dict[str, Any] = {}
    for key, text in map(overrides.pair, given.overrides):
        values = trees.merge(values, trees.nested(key, overrides.typed(text, Any)))
    if find_spec("pytest") is None:
        raise UserError(f"the contracts are tests: {errors.install('pytest')}", code="missing")
    from daguerre.contracts import run as contract  # it needs pytest

    return errors.DONE if contract.kept(kind, name, values) else errors.FAILED


def _named(word: str) -> tuple[str, str]:
    """Kind and name of a plug-in."""
    kind, _, name = word.rpartition(".")
    if kind:
        if kind not in plugins.FOLDERS:
            raise UserError(f"{kind} is no kind of plug-ins; there are {', '.join(plugins.FOLDERS)}", code="unknown")
        return kind, name
    kinds = [each for each in plugins.FOLDERS if plugins.exists(each, name)]
    if len(kinds) == 1:
        return kinds[0], name
    if kinds:
        every = ", ".join(f"{kind}.{name}" for kind in kinds)
        raise UserError(f"several kinds have a plug-in {name}: choose one of {every}", code="unknown")
    near = difflib.get_close_matches(name, [n for each in plugins.FOLDERS for n in plugins.names(each)], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"there is no plug-in {name}{hint} (docs/plugins.md: where they are looked for)", code="unknown")
