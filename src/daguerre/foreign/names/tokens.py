"""New tokens as other trainers name them, in our settings."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from daguerre import yaml_text
from daguerre.data.caption_templates import TEMPLATES
from daguerre.errors import UserError
from daguerre.foreign.names.values import NOTHING_ASKED, Meaning, one
from daguerre.regular import check_regular

_BRACKETS = re.compile(r"\[.+\]|<.+>")


def templates(key: str, text: str, look: Callable[[str], str | None]) -> Meaning:
    """`learnable_property` and kohya's `use_object_template`: sentences around the new token as captions."""
    name = key.removeprefix("use_").removesuffix("_template") if key.startswith("use_") else text.lower()
    if key.startswith("use_") and text.lower() != "true":
        return Meaning()
    if name not in TEMPLATES and look("template_file") is not None:
        return Meaning()  # the file has the sentences
    if name not in TEMPLATES:
        known = ", ".join(TEMPLATES)
        raise UserError(f"allowed: {known}; template_file=FILE takes sentences of your own, one a line, with {{}}")
    adapters = json.loads(look("adapters") or "{}").values()
    token = next((own["placeholder_token"] for own in adapters if own and own.get("placeholder_token")), None)
    if token is None:
        raise UserError("set placeholder_token as well: the sentences are about a new token")
    return Meaning((("data.captions.text", token), ("data.captions.templates", name)))


def template_file(key: str, text: str) -> Meaning:
    """A file with a sentence a line, `{}` in which is the caption: the new token."""
    if text.lower() in NOTHING_ASKED:
        return Meaning()
    try:
        check_regular(Path(text).expanduser())
        lines = Path(text).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{text} cannot be read: {error}") from error
    return one("data.captions.templates", json.dumps([line.strip() for line in lines if line.strip()]))


def train_tokens(key: str, text: str) -> Meaning:
    """Stable Cascade's list of [token, regular expression]: `[name]` and `<name>` are new, and start from the mean of
    all tokens that fit; other tokens are of the vocabulary."""
    pairs = yaml_text.value(text)
    if not isinstance(pairs, list) or not all(isinstance(each, list) and len(each) == 2 for each in pairs):
        raise UserError("expected pairs of a token and what it starts from, such as [['[rex]', '^dog</w>']]")
    new = {name: {"init_pattern": start} if start else {} for name, start in pairs if _BRACKETS.fullmatch(str(name))}
    existing = [name for name, _ in pairs if name not in new]
    values = (("adapter.tokens", new), ("adapter.existing", existing))
    return Meaning(tuple((path, json.dumps(value)) for path, value in values if value))
