"""The settings as documents: one JSON Schema for editors, and an annotated recipe to start from.

Both are made from the settings classes and their documentation; nothing about a single setting is written here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import yaml
from pydantic.json_schema import JsonSchemaValue, models_json_schema
from pydantic_core import to_jsonable_python

from daguerre import plugins
from daguerre.config import fields, recipe
from daguerre.config.config import Config
from daguerre.config.fields import Leaf

WIDTH = 100
_ADAPTERS = fields.plugin_members(Config, {"adapters": {"full": {}}})["adapters.full"]


def json_schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) of recipes: every setting with its documentation, all plug-ins as alternatives.

    Nothing is required in it, because a recipe may leave to the one that it extends, or to the command line, what it
    does not say.
    """
    kinds = fields.plugin_sections(Config)
    choices = {
        section: [plugin.settings_class(name) for name in plugins.names(plugin.kind)]
        for section, plugin in kinds.items()
    }
    attachable = [_ADAPTERS.settings_class(name) for name in plugins.names(_ADAPTERS.kind)]
    choices_of = {**choices, "adapter": attachable}
    every = [(cls, "validation") for cls in [Config, *(cls for group in choices_of.values() for cls in group)]]
    references, document = models_json_schema(every, ref_template="#/$defs/{model}")  # type: ignore[arg-type]
    definitions = document["$defs"]
    whole = definitions.pop(_name(references[Config, "validation"]))
    for section, group in choices.items():
        about = Config.model_fields[section].description
        alternatives = [references[cls, "validation"] for cls in group]
        whole["properties"][section] = {"description": about, "anyOf": alternatives}
        definitions.pop(kinds[section].base.__name__, None)
    adapters = {"anyOf": [references[cls, "validation"] for cls in attachable]}
    whole["properties"]["adapters"] |= {"additionalProperties": {"anyOf": [*adapters["anyOf"], {"type": "null"}]}}
    whole["properties"]["adapter"] = {"description": "One adapter: a mapping `adapters` of one.", **adapters}
    definitions.pop(_ADAPTERS.base.__name__, None)
    about = "Shipped name or path of the recipe that this one starts from."
    whole["properties"]["extends"] = {"description": about, "type": "string"}
    whole |= {"title": "A Daguerre recipe", "$defs": definitions}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_for_recipes(whole)}


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
    sections = fields.plugin_sections(Config)
    tree: dict[str, Any] = {section: {plugin.key: choices[section]} for section, plugin in sections.items()}
    tree["adapters"] = {choices["adapter"]: {_ADAPTERS.key: choices["adapter"]}}
    return "\n".join([*_head(choices), *_lines(tree)]) + "\n"


def _head(choices: dict[str, str]) -> Iterator[str]:
    yield "# A recipe with every setting. Lines that are commented out show the default."
    yield '# Durations are "20k steps", "1.5M samples" or "3 epochs"; ${path.of.a.key} stands for that key\'s value.'
    chosen = ", ".join(f"{section} {name}" for section, name in choices.items())
    yield f"# Written for {chosen}."
    yield "# extends: name-or-path   (start from another recipe and say only what differs)"
    yield ""


def _lines(tree: dict[str, Any]) -> Iterator[str]:
    for found in _walk(tree):
        depth = "  " * found.path.count(".")
        if isinstance(found, Leaf) and found.path == "adapters":
            yield from _comment(found.doc, depth)
            yield "adapters:"
        elif isinstance(found, Leaf):
            yield from _leaf_lines(found, depth, tree)
        else:
            yield from ([""] if "." not in found.path else [])
            yield from _comment(found.doc, depth)
            yield f"{depth}{found.path.rpartition('.')[2]}:"


def _walk(tree: dict[str, Any]) -> Iterator[Leaf | fields.Section]:
    """All settings, the adapters' behind `adapters`."""
    for found in fields.walk(Config, tree):
        yield found
        if found.path == "adapters":
            for own in fields.members(Config, tree):
                if own.path.startswith("adapters."):
                    named = isinstance(own, Leaf) and own.path.endswith(f".{_ADAPTERS.key}")
                    yield replace(own, plugin=_ADAPTERS) if named and isinstance(own, Leaf) else own


def _leaf_lines(leaf: Leaf, depth: str, tree: dict[str, Any]) -> Iterator[str]:
    accepted = fields.allowed(leaf).replace(" such as '20k steps', '1.5M samples' or '3 epochs'", "")
    yield from _comment(f"{leaf.doc.strip()} [{accepted}]", depth)
    name = leaf.path.rpartition(".")[2]
    if leaf.plugin:
        yield f"{depth}{name}: {recipe.get(tree, leaf.path)}"
    elif leaf.required:
        yield f"{depth}{name}: ???"
    else:
        value = yaml.safe_dump(to_jsonable_python(leaf.default), default_flow_style=True, width=1 << 20)
        yield f"{depth}# {name}: {value.splitlines()[0]}"


def _comment(text: str, depth: str) -> Iterator[str]:
    for line in textwrap.wrap(" ".join(text.split()), WIDTH - len(depth) - 2):
        yield f"{depth}# {line}"
