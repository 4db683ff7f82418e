"""Secrets in addresses: settings, messages and files hold addresses without them.

`user:password@` and the query of an address (presigned addresses, tokens) are removed when a setting is checked, and
kept in the memory of this process alone; `***` stands in their place. `whole` restores them for opening the address.
"""

import os
import re
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

STORES = ("s3", "gs")
CUT = "***"
"""Stands for a removed secret."""
VARIABLE = "DAGUERRE_ADDRESSES"
"""Environment variable with whole addresses, spaces between."""
SEPARATOR = re.compile(r"::(?![^\[]*\])")
"""Between two addresses in one text, as webdataset writes them; but not in the address [::1]."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PARTS = re.compile(r"([^/?#]*)([^?#]*)(?:\?([^#]*))?(?:#.*)?", re.DOTALL)
_HARMLESS = re.compile(
    r"(id|file|filename|name|path|part|shard|index|n|page|download|raw|dl|alt|format|version|versionId)=[\w./{},-]{1,64}"
)
"""Parameters that only name the file."""
_NAMED = re.compile(
    r"(?i)((?<![A-Za-z0-9])(?:X-(?:Amz|Goog)-[\w-]+|sig|signature|[\w-]*token|password|passwd|api_?key|[\w-]*secret|"
    r"AWSAccessKeyId|GoogleAccessId)=)(?!(?:true|false)\b)[^\s&'\"]+"
)
"""Parameters that are always secret."""
_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?:(?![A-Za-z][A-Za-z0-9+.-]*://)[^\s'\"<>])+")
_AS_PATH = re.compile(r"(?:(?<=:/)|(?:(?<=^//)|(?<=[^\w:/]//))(?=[^/\s'\"@]*:))[^/\s'\"@]+@", re.MULTILINE)
"""User and password of an address that was taken for a path, or has no scheme."""
_COMMAND = re.compile(
    r"(?P<before>(?P<quote>['\"`]))pipe:(?!\.\.\.)(?:\\.|(?!(?P=quote))[^\n\\])*"
    r"|(?P<start>^|[=\[,])pipe:(?!\.\.\.)[^\n]*|(?<![\w'\"`-])pipe:(?=\S)(?!\.\.\.)[^\n]*",
    re.MULTILINE,
)
"""A command that stands for a file: to the end of its quotation, or of the line. `Broken pipe: ...` is not a
command."""
_PROMPT = re.compile(r"(?:--)?(?:[\w.]*[._])?prompts?=")
_NEXT = re.compile(r",(?![^{]*\})")
"""A comma between members of a list; but not in a range such as {00,05}."""
_OPENING = {")": "(", "]": "[", "}": "{"}
_WORD = re.compile(r"[a-z-]{,16}")
_SECRET_NAME = re.compile(
    r"(api|access|private|wandb|hf)_?key|secret|passw(or)?d"
    r"|(^|[._])(?<!placeholder_)(?<!initializer_)(?<!vectors_per_)token$",
    re.IGNORECASE,
)
"""Names of secrets: not those of a new token of a text encoder."""
_LEAST_LENGTH = 6
"""Of a secret that is searched for in texts by itself; shorter ones are part of other words."""
_kept: dict[str, str] = {}
"""Whole addresses by their redacted form."""


def scheme(text: str) -> str:
    """The scheme of an address, in lower case; empty for a path."""
    found = _SCHEME.match(text)
    return found[1].lower() if found else ""


def redacted(text: str) -> str:
    """A path or an address for messages: no user, password, query or fragment, and no command."""
    if text.startswith("pipe:"):
        return "pipe:..."
    if scheme(text):
        kind, rest = text.split("://", 1)
        host, path = ("", "/...") if _unreadable(text) else _parts(f"{kind.lower()}://{rest}")[:2]
        text = f"{kind}://{host.rpartition('@')[2]}{scrub(path) or '/'}"
    return text.encode("utf-8", "backslashreplace").decode()


def redact(given: Any) -> Any:
    """The value of a setting without the secrets in its addresses, which stay in memory for `whole`."""
    if isinstance(given, dict):
        return {redact(name): redact(inner) for name, inner in given.items()}
    if isinstance(given, list | tuple):
        return type(given)(map(redact, given))
    if not isinstance(given, str) or not ("://" in given or given.startswith("pipe:")):
        return given
    return "::".join(map(_put_aside, SEPARATOR.split(given)))


def word(given: str) -> str:
    """A word of the command line without the secrets of the addresses in it, which stay in memory for `whole`.

    For every word, as few are settings that are checked: data to measure, LoRAs by name, folders to write. Prompts are
    no addresses and keep their words.
    """
    if "://" not in given or _PROMPT.match(given):
        return given
    listed = given.partition("=")[2].lstrip().startswith(("[", "{")) or given.lstrip().startswith("[")
    return _IN_TEXT.sub(lambda found: _aside(found[0], listed), given)


def _aside(text: str, listed: bool) -> str:
    """An address in a text, with what follows it there: a comma in a list, marks and brackets that close."""
    comma = _NEXT.search(text) if listed else None
    end = comma.start() if comma else len(text)
    while text[end - 1] in ").,:;]}":
        opening = _OPENING.get(text[end - 1])
        if opening and text.count(opening, 0, end) >= text.count(text[end - 1], 0, end):
            break  # of a range in its name, such as part-{00..01}
        end -= 1
    return _put_aside(text[:end]) + text[end:]


def _put_aside(address: str) -> str:
    alone = scheme(address.strip()) and address.count("://") == 1
    stripped = _without(address.strip()) if alone else scrub(address)
    if stripped != address:
        _kept[stripped] = address.strip()
    return stripped


def whole(address: str) -> str:
    """The address with its secrets; unchanged if this process does not know them."""
    if CUT not in address:
        return address
    _of_environment(os.environ.get(VARIABLE, ""))
    return _kept.get(address, address)


@lru_cache(maxsize=1)
def _of_environment(listed: str) -> None:
    for address in listed.split():
        _kept.setdefault(redact(address), address)


def is_cut(address: str) -> bool:
    """True if a secret is missing in an address, also after `whole`."""
    return "://" in address and (f"://{CUT}" in address or CUT in address.partition("?")[2])


def environment() -> dict[str, str]:
    """Environment variables that give a child process the same secrets."""
    known = [address for address in [*_kept.values()] if not re.search(r"\s", address)]
    return {VARIABLE: " ".join(known)} if known else {}


def scrub(text: str) -> str:
    """A text without the secrets of the addresses in it, and without those that were put aside."""
    for secret, instead in _secrets(*_kept.items()):
        text = text.replace(secret, instead)
    text = _IN_TEXT.sub(lambda found: _scrubbed(found[0]), text) if "://" in text else text
    text = _AS_PATH.sub(f"{CUT}@", text)
    if "pipe:" in text:
        text = _COMMAND.sub(lambda found: f"{found['before'] or found['start'] or ''}pipe:...", text)
    return _NAMED.sub(rf"\1{CUT}", text) if "=" in text else text


def _scrubbed(address: str) -> str:
    end = len(address.rstrip(").,:;]}"))
    return _without(address[:end]) + address[end:]


@lru_cache(maxsize=1)
def _secrets(*kept: tuple[str, str]) -> list[tuple[str, str]]:
    """Secrets to find in texts, and their replacements; the longest first."""
    found = {address: stripped for stripped, address in kept}
    for address in list(found):
        authority, _, query = _parts(address)
        user = authority.rpartition("@")[0]
        secret = [each for each in query.split("&") if not _HARMLESS.fullmatch(each)]
        values = [value for each in secret if not _WORD.fullmatch(value := each.partition("=")[2])]
        loose = [user, *user.split(":", 1)[1:], query if len(secret) else "", *secret, *values]
        found |= {each: CUT for one in loose for each in (one, unquote(one)) if len(each) >= _LEAST_LENGTH}
    return sorted(found.items(), key=lambda each: -len(each[0]))


def _without(address: str) -> str:
    """The address with `***` for user and password, and for a query; without its fragment."""
    kind, rest = address.split("://", 1)
    if kind.lower() == "file":
        return address
    if "@" in rest and _unreadable(address):
        return f"{kind}://{CUT}"
    authority, path, query = _parts(address)
    _, at, host = authority.rpartition("@")
    cut: list[str] = []
    for each in query.split("&") if query else ():
        cut += [each] if _HARMLESS.fullmatch(each) else [CUT] if CUT not in cut else []
    return f"{kind}://{CUT if at else ''}{at}{host}{path}{'?' if cut else ''}{'&'.join(cut)}"


def _parts(address: str) -> tuple[str, str, str]:
    """User and host, path, query. Names of objects in a store may hold any sign: there a query is a signed one."""
    kind, _, rest = address.partition("://")
    if kind.lower() in STORES and not _NAMED.search(rest):
        authority, slash, path = rest.partition("/")
        return authority, slash + path, ""
    found = _PARTS.fullmatch(rest)
    assert found is not None
    return found[1], found[2], found[3] or ""


def _unreadable(address: str) -> bool:
    """True if a password may hold an unescaped `/`, `?` or `#`: it looks like a port that is no number, or like
    host:port/path."""
    authority, path, _ = _parts(address)
    looks_cut = "@" not in authority and ":" in authority
    if scheme(address) in STORES:  # a bucket has no colon in its name, and a secret key often has a slash
        return looks_cut and "@" in address
    if looks_cut and (re.search(r"/[^/@]+@", path) or (not path and "@" in address)):
        return True
    try:
        return urlsplit(address).port == -1
    except ValueError:
        return True


def is_secret(path: str, value: Any = None) -> bool:
    """True if a path, or a key inside its value, is named like a secret."""
    inner = [is_secret(str(name), below) for name, below in value.items()] if isinstance(value, dict) else []
    return _SECRET_NAME.search(path) is not None or any(inner)
