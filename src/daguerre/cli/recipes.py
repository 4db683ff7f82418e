"""List the shipped recipes, print one, or an annotated template.

usage: daguerre recipes [NAME] [--json] | [--cards | --schema | --template [section=plug-in ...]]

  daguerre recipes                      the shipped recipes and what each is for
  daguerre recipes quickstart           print one, to read it or to start from it:
  daguerre recipes quickstart > my.yaml
  daguerre recipes --json               the list for programs (docs/json.md); with NAME all settings of one
  daguerre recipes --cards              what each trains, and on which card, as tables (docs/recipes.md)
  daguerre recipes --template           an annotated recipe with every setting and its default
  daguerre recipes --template objective=flow data=shapes
  daguerre recipes --schema             JSON Schema for editors:
  daguerre recipes --schema > recipe.schema.json
      and as the first line of a recipe:  # yaml-language-server: $schema=recipe.schema.json

docs/config.md says how recipes and overrides work.
"""

import json
import sys
from pathlib import Path

from daguerre import plugins
from daguerre.cli.parts import output
from daguerre.config import cards, fields, overrides, recipe, schema
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.formatting import Verbatim, beside

PREFERRED = {"families": "sd", "objectives": "v", "adapters": "full", "sources": "folder", "optimizers": "adamw"}
"""The plug-ins of the template, where they exist and nothing else was asked for."""


def run(arguments: list[str]) -> int:
    """Exit code 0; UserError for a recipe or plug-in that does not exist."""
    given = overrides.split(arguments, flags=("--cards", "--schema", "--template", output.FLAG))
    others = given.flags - {output.FLAG}
    if len(others) + bool(given.recipe) > 1:
        raise UserError("give one of NAME, --cards, --schema and --template at a time", code="conflict")
    if others and output.FLAG in given.flags:
        raise UserError(
            f"--json prints recipes, with the cards of each: it has no effect on {min(others)}", code="conflict"
        )
    if given.overrides and "--template" not in given.flags:
        raise UserError(
            f"only --template takes {given.overrides[0]}: a recipe is printed as its file has it", code="unused"
        )
    if output.FLAG in given.flags:
        output.write(output.Recipes(recipes=_parts(given.recipe)))
    elif "--cards" in given.flags:
        sys.stdout.write(Verbatim(f"{cards.tables()}\n"))
    elif "--schema" in given.flags:
        sys.stdout.write(Verbatim(f"{json.dumps(schema.json_schema(), indent=2, ensure_ascii=False)}\n"))
    elif "--template" in given.flags:
        sys.stdout.write(Verbatim(schema.template(_choices(given.overrides))))
    elif given.recipe:
        sys.stdout.write(Verbatim(recipe.locate(given.recipe).read_text(encoding="utf-8")))
    else:
        _list()
    return 0


def _choices(given: tuple[str, ...]) -> dict[str, str]:
    """The plug-in of each section: the given one, the preferred one, or the first."""
    sections = fields.plugin_sections(Config, {"adapters": {"adapter": {}}, "data": {"sources": {"data": {}}}})
    sections = {section.rpartition(".")[2]: plugin for section, plugin in sections.items()}
    asked = dict(overrides.pair(override) for override in given)
    for section, name in asked.items():
        if section not in sections:
            allowed = ", ".join(f"{s}=NAME" for s in sections)
            raise UserError(f"--template takes {allowed}; you gave {section}={name}", code="unknown", setting=section)
        plugins.check(sections[section].kind, name)
    usual = {section: PREFERRED[plugin.kind] for section, plugin in sections.items()}
    existing = {section: plugins.names(plugin.kind) for section, plugin in sections.items()}
    return {s: asked.get(s, usual[s] if usual[s] in existing[s] else existing[s][0]) for s in sections}


def _parts(name: str) -> list[output.Recipe]:
    """The recipe of this name, or all shipped ones, for programs."""
    found: dict[str, Path] = {name: recipe.locate(name)} if name else recipe.shipped()
    return [
        output.Recipe(
            name=each,
            description=" ".join(header(path)),
            cards=[output.Card(**card._asdict()) for card in cards.options(path)],
            **({"settings": recipe.tree(name)} if name else {}),
        )
        for each, path in found.items()
    ]


def _list() -> None:
    found = recipe.shipped()
    width = max(map(len, found), default=0)
    for name, path in found.items():
        print("\n".join(beside(f"{name:<{width}}  ", " ".join(header(path)), sys.stdout.isatty())))
    print("\ndaguerre recipes NAME prints one; daguerre train NAME trains it.")


def header(path: Path) -> list[str]:
    """The comment lines at the top of a recipe, up to the first empty one."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or line.strip() == "#":
            break
        lines.append(line.lstrip("#").strip())
    return lines
