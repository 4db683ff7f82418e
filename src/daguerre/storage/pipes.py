"""`pipe:` values of other loaders: the few commands that only print a file stand for its address; none is ever run."""

import re
import shlex
from typing import Any

from pydantic import AfterValidator

from daguerre.credentials import SEPARATOR
from daguerre.errors import UserError

KNOWN = "aws s3 cp URL -, gsutil cp URL -, gsutil cat URL, gcloud storage cat URL, curl URL, cat FILE"
_QUIET = {"--quiet", "--only-show-errors", "--no-progress", "--silent", "--location", "--fail", "--show-error"}
_QUIET |= {"-q", "-s", "-S", "-L", "-f", "-sL", "-sSL", "-fsSL"}
"""Options that do not change what is read."""


def address_in(text: str, setting: str) -> str:
    """The address that a `pipe:` value reads. UserError for other commands, not shown, as they may hold secrets."""
    try:
        lexer = shlex.shlex(text.removeprefix("pipe:"), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        lexer.commenters = ""
        plain = [word for word in lexer if word not in _QUIET]
    except ValueError:
        raise UserError(f"{setting}: pipe:...: a quotation mark is missing", setting=setting) from None
    for known in KNOWN.split(", "):
        before, after = (words.split() for words in re.split("URL|FILE", known))
        if plain[: len(before)] == before and plain[len(before) + 1 :] == after and len(plain) > len(before):
            address = plain[len(before)]
            if not address.startswith("-"):
                return address
    raise UserError(
        f"{setting}: pipe:...: commands are never run. Supported are {KNOWN} (credentials and endpoints come from "
        "the environment, not from options); otherwise give the address itself",
        code="unsupported",
        setting=setting,
    )


def addresses(given: Any) -> Any:
    """The value of a setting with the address in place of each `pipe:` command. UserError as `address_in`."""
    if isinstance(given, list | tuple):
        return type(given)(map(addresses, given))
    if not isinstance(given, str) or "pipe:" not in given:
        return given
    parts = [part.strip() for part in SEPARATOR.split(given)]
    return "::".join(address_in(part, "path") if part.startswith("pipe:") else part for part in parts)


FILES = AfterValidator(addresses)
"""Of a setting that names local or remote files."""
