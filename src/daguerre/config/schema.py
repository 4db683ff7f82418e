"""The settings as documents: one JSON Schema for editors, and an annotated recipe to start from.

Both are made from the settings classes and their documentation; nothing about a single setting is written here.
"""

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic.json_schema import JsonSchemaValue, models_json_schema
from pydantic_core import to_jsonable_python

from daguerre import plugins, trees
from daguerre.config import fields, short_forms
from daguerre.config.config import Config
from daguerre.config.fields import Leaf, Section
from daguerre.config.short_forms import MAPPINGS
from daguerre.settings import Plugin, Settings, documentation

WIDTH = 100


def json_schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) of recipes: every setting with its documentation, all plug-ins as alternatives.

    Nothing is required in it, because a recipe may leave to the one that it extends, or to the command line, what it
    does not say.
    """
    named = {f"{path}.NAME": path for path in MAPPINGS}
    tree: dict[str, Any] = {}
    for path in named:
        tree = trees.merge(tree, trees.nested(path, {}))
    kinds = fields.plugin_sections(Config, tree)
    choices = {section: _classes(plugin) for section, plugin in kinds.items()}
    classes = [cls for group in choices.values() for cls in group]
    inside = {plugin.base: plugin for cls in classes for plugin in fields.optional_plugins(cls, {}).values()}
    chosen = {base: _classes(plugin) for base, plugin in inside.items()}
    every = [(cls, "validation") for cls in [Config, *classes, *(cls for group in chosen.values() for cls in group)]]
    references, document = models_json_schema(every, ref_template="#/$defs/{model}")  # type: ignore[arg-type]
    definitions = document["$defs"]
    whole = definitions.pop(_name(references[Config, "validation"]))
    for cls in classes:  # what stands in the section around them
        for name in cls.around:
            definitions[_name(references[cls, "validation"])]["properties"].pop(name, None)
    for base, group in chosen.items():
        names = {"enum": list(plugins.names(inside[base].kind))}
        definitions[base.__name__] = {"anyOf": [names, *(references[cls, "validation"] for cls in group)]}
    for section, group in choices.items():
        alternatives = [references[cls, "validation"] for cls in group]
        definitions.pop(kinds[section].base.__name__, None)
        if section not in named:
            about, usual = documentation(Config)[section], kinds[section].default
            default = {"default": {kinds[section].key: usual}} if usual else {}
            whole["properties"][section] = {"description": about, "anyOf": alternatives, **default}
            continue
        above, _, mapping = named[section].rpartition(".")
        owner = definitions[_name(whole["properties"][above])] if above else whole
        owner["properties"][mapping] |= {"additionalProperties": {"anyOf": [*alternatives, {"type": "null"}]}}
    about = "Shipped name or path of the recipe that this one starts from."
    whole["properties"]["extends"] = {"description": about, "type": "string"}
    whole |= {"title": "A Daguerre recipe", "$defs": definitions}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_for_recipes(whole)}


def _classes(plugin: Plugin) -> list[type[Settings]]:
    return [plugin.settings_class(name) for name in plugins.names(plugin.kind)]


def _name(reference: JsonSchemaValue) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _for_recipes(schema: Any) -> Any:
    """Without what holds for finished configs only (required keys), and without our own marks."""
    if isinstance(schema, list):
        return [_for_recipes(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    dropped = {"required"} if "properties" in schema else {"resume"} if isinstance(schema.get("resume"), str) else set()
    return {key: _for_recipes(value) for key, value in schema.items() if key not in dropped}


def template(choices: dict[str, str]) -> str:
    """An annotated recipe with every setting; `choices` names a plug-in for each section that needs one.

    What has a default is commented out and shows it; what must be given says `???`.
    """
    tree: dict[str, Any] = {}
    for section, plugin in fields.plugin_sections(Config).items():
        tree[section] = {plugin.key: choices[section]}
    tree["adapters"] = {choices["adapter"]: {"name": choices["adapter"]}}
    tree["data"] = {"sources": {short_forms.NAMELESS: {"source": choices["data"]}}}
    return "\n".join([*_head(choices), *_lines(tree)]) + "\n"


def _head(choices: dict[str, str]) -> Iterator[str]:
    yield "# A recipe with every setting. Lines that are commented out show the default."
    yield '# Durations are "20k steps", "1.5M samples" or "3 epochs"; ${path.of.a.key} stands for that key\'s value.'
    chosen = ", ".join(f"{section} {name}" for section, name in choices.items())
    yield f"# Written for {chosen}."
    yield "# extends: name-or-path   (start from another recipe and say only what differs)"
    yield ""


def _lines(tree: dict[str, Any]) -> Iterator[str]:
    absent = " "  # start of the paths in a group that is null by default: all of its lines are comments
    for found in fields.walk(Config, tree):
        if isinstance(found, Section) and found.optional and not found.plugin:
            absent = f"{found.path}."
        depth, mark = "  " * found.path.count("."), "# " * f"{found.path}.".startswith(absent)
        if isinstance(found, Leaf) and found.path not in ("adapters", "data.sources"):
            yield from _leaf_lines(found, depth, mark, tree)
        elif isinstance(found, Leaf) or not found.named:
            yield from ([""] if "." not in found.path else [])
            yield from _comment(found.doc, depth)
            yield f"{depth}{mark}{found.path.rpartition('.')[2]}:"
        else:
            yield f"{depth}{found.path.rpartition('.')[2]}:"


def _leaf_lines(leaf: Leaf, depth: str, mark: str, tree: dict[str, Any]) -> Iterator[str]:
    accepted = fields.allowed(leaf).replace(" such as '20k steps', '1.5M samples' or '3 epochs'", "")
    yield from _comment(f"{leaf.doc.strip()} [{accepted}]", depth)
    name = leaf.path.rpartition(".")[2]
    if leaf.plugin:
        yield f"{depth}{mark}{name}: {trees.get(tree, leaf.path)}"
    elif leaf.required:
        yield f"{depth}{mark}{name}:" + ("" if mark else " ???")
    else:
        value = yaml.safe_dump(to_jsonable_python(leaf.default), default_flow_style=True, width=1 << 20)
        yield f"{depth}# {name}: {value.splitlines()[0]}"


def _comment(text: str, depth: str) -> Iterator[str]:
    for line in textwrap.wrap(" ".join(text.split()), WIDTH - len(depth) - 2):
        yield f"{depth}# {line}"
