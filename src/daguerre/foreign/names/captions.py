"""Captions as Stable Cascade's configs choose them, in our settings. Their expressions are read, never run."""

import ast
import json

from daguerre import yaml_text
from daguerre.errors import UserError
from daguerre.foreign.names.values import Meaning

_THEIRS = (("og_caption", 0.05), ("caption", 0.95))
"""What the function `captions_getter` of their code draws."""
_ALLOWED = (
    "allowed: [txt, identity], [json, captions_getter], and [json, \"lambda j: j['FIELD']\"]; other rules are "
    "data.captions.fields, weights, join and templates"
)


def captions_getter(key: str, text: str) -> Meaning:
    """Their pair of a file of a sample and a function of it."""
    pair = yaml_text.value(text)
    if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(each, str) for each in pair)):
        raise UserError(f"expected a pair of a file of the sample and an expression, got {text}; {_ALLOWED}")
    file, expression = pair
    if (file, expression.strip()) == ("txt", "identity"):
        return _fields({"text": 1.0})
    if file == "json" and expression.strip() == "captions_getter":
        return _fields(dict(_THEIRS), "og_caption is a key of the sample's own JSON here; theirs is inside old_caption")
    if file == "json" and (field := _key_of(expression)) is not None:
        return _fields({field: 1.0})
    raise UserError(f"{text} is an expression that Daguerre does not run: {_ALLOWED}", code="unsupported")


def _key_of(expression: str) -> str | None:
    """The key of the JSON that a lambda gives: `j['caption']`, `j.get('caption')`, also of json.loads(j)."""
    try:
        parsed = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(parsed, ast.Lambda) or len(parsed.args.args) != 1:
        return None
    name = parsed.args.args[0].arg
    forms = (f"{name}[KEY]", f"{name}.get(KEY)", f"json.loads({name})[KEY]")
    keys = [node.value for node in ast.walk(parsed.body) if isinstance(node, ast.Constant)]
    if len(keys) != 1 or not isinstance(keys[0], str):
        return None
    found = ast.unparse(parsed.body).replace(repr(keys[0]), "KEY")
    return keys[0] if found in forms else None


def _fields(weights: dict[str, float], notice: str = "") -> Meaning:
    values = [("data.captions.fields", json.dumps([*weights]))]
    if len(weights) > 1:
        values.append(("data.captions.weights", json.dumps([*weights.values()])))
    return Meaning(tuple(values), (notice,) if notice else ())
