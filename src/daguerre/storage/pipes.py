"""`pipe:` values as other loaders take them: the few commands that only print one file are read as that file's address.

No command is ever run.
"""

from __future__ import annotations

import shlex
from typing import Any

from pydantic import AfterValidator

from daguerre.credentials import SEPARATOR
from daguerre.errors import UserError

KNOWN = "aws s3 cp URL -, gsutil cp URL -, gsutil cat URL, gcloud storage cat URL, curl URL, cat FILE"
_QUIET = {
    "--quiet",
    "--only-show-errors",
    "--no-progress",
    "-q",
    "-s",
    "-S",
    "-L",
    "-f",
    "-sL",
    "-sSL",
    "-fsSL",
    "--silent",
    "--location",
    "--fail",
    "--show-error",
}
"""Options that change nothing of what is read."""
_COMMANDS: tuple[tuple[list[str], list[str]], ...] = (
    # the words before the address, the words after it
    (["aws", "s3", "cp"], ["-"]),
    (["gsutil", "cp"], ["-"]),
    (["gsutil", "cat"], []),
    (["gcloud", "storage", "cat"], []),
    (["curl"], []),
    (["cat"], []),
)


def address_in(text: str, setting: str) -> str:
    """The address that a `pipe:` value reads. UserError for any other command; nothing of it is shown, as it may hold
    secrets."""
    words = _words(text.removeprefix("pipe:"), setting)
    plain = [word for word in words if word not in _QUIET]
    for before, after in _COMMANDS:
        if plain[: len(before)] == before and plain[len(before) + 1 :] == after and len(plain) > len(before):
            address = plain[len(before)]
            if not address.startswith("-"):
                return address
    raise UserError(
        f"{setting}: pipe:...: no command is run. Understood are {KNOWN} (credentials and endpoints "
        "come from the environment, not from options); for anything else give the address itself"
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
"""Of a setting that names files near or far."""


def _words(command: str, setting: str) -> list[str]:
    try:
        lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        lexer.commenters = ""
        return list(lexer)
    except ValueError:
        raise UserError(f"{setting}: pipe:...: a quotation mark is missing") from None
