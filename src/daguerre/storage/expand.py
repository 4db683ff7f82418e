"""Path settings as locations: local paths, `file:`, brace ranges, globs, folders, stores, web addresses, `pipe:`.

Nothing is read here but folders and listings. A local path that exists is taken as it is, whatever signs are in it.
"""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from urllib.parse import unquote

from braceexpand import braceexpand

from daguerre import credentials
from daguerre.credentials import SEPARATOR
from daguerre.errors import Code, UserError
from daguerre.storage import io as storage_io
from daguerre.storage.location import STORES, WEB, Location, redacted, scheme
from daguerre.storage.pipes import address_in
from daguerre.storage.roots import leads_away

INDEX_SUFFIX = ".index"
"""Our own files in folders of shards, which a glob never means."""
FILES_LIMIT = 1_000_000
"""Most files of one setting."""
_GLOB = re.compile(r"[*?\[]")
_RANGE = re.compile(r"\{(-?\d{1,20})\.\.(-?\d{1,20})")
_OTHER_SCHEMES = {
    "az": "this is Azure storage; copy the files to s3:// or gs://, or give https:// addresses",
    "s3a": "write s3://",
    "s3n": "write s3://",
    "gcs": "write gs://",
    "hf": "write https://huggingface.co/datasets/NAME/resolve/main/FILE, or use data.source=huggingface",
}
_OTHER_SCHEMES |= dict.fromkeys(("azure", "abfs", "abfss", "adl", "wasb", "wasbs"), _OTHER_SCHEMES["az"])


def expand(
    given: str | Sequence[str], setting: str = "data.path", suffixes: tuple[str, ...] = (".tar",)
) -> list[Location]:
    """The files of a setting in its order, sorted within a glob or folder; a folder, or a store's prefix that ends in
    `/`, stands for the files in it with one of the suffixes; `a::b` is two, as in webdataset. UserError for a text with
    no meaning, and for files that are missing or come twice; remote files are not looked for."""
    texts = [given] if isinstance(given, str) else list(given)
    reading = _Reading(setting, suffixes)
    if not any(text.strip() for text in texts):
        raise reading.error("it is empty; expected a file, folder or address", "missing")
    split = [[text] if _exists(text) else [part.strip() for part in SEPARATOR.split(text)] for text in texts]
    locations = [location for parts in split for part in parts for location in reading.locations(part)]
    seen: set[str] = set()
    for location in locations:
        if location.identity in seen:  # also if only their secrets differ: caches could not tell them apart
            raise reading.error(
                f"{location.name} is listed twice: remove one (to train on it more often, use `repeats`)"
            )
        seen.add(location.identity)
        if location.local is not None and leads_away(location.local):
            raise reading.error(f"{location.name} leads out of the folders that this run may read")
    return locations


def _exists(text: str) -> bool:
    return not scheme(text) and not text.startswith("pipe:") and os.path.lexists(os.path.expanduser(text))


class _Reading:
    """Reads one setting."""

    def __init__(self, setting: str, suffixes: tuple[str, ...]) -> None:
        self.setting = setting
        self.suffixes = suffixes

    def locations(self, text: str) -> list[Location]:
        """The files of one text of the setting."""
        if not text:
            raise self.error("one of the names is empty: remove it")
        if text.startswith("pipe:"):
            text = address_in(text, self.setting)
        text = credentials.whole(self._without_file(text))
        if _exists(text):
            return self._local(text)
        if credentials.is_cut(text):
            raise self.error(
                f"{text} was given with a user and password, or a query, here replaced by {credentials.CUT}. These "
                "are never saved. Give the full address again, on the command line or in the environment: "
                f"{credentials.VARIABLE}='https://USER:PASSWORD@...' (several with spaces between)"
            )
        names = self._braces(text)
        missing = [name for name in names if not (scheme(name) or _GLOB.search(name) or _exists(name))]
        if missing and len(names) > 1:
            first = ", ".join(repr(redacted(name)) for name in missing[:3])
            raise self.error(
                f"{redacted(text)!r} names {len(names):,} files, of which {len(missing):,} do not exist: {first}"
                f"{' ...' if len(missing) > 3 else ''} (seen from {os.getcwd()!r})",
                "missing",
            )
        return [location for name in names for location in self._expanded(name)]

    def error(self, what: str, code: Code = "invalid") -> UserError:
        """An error that names the setting."""
        return UserError(f"{self.setting}: {what}", code=code, setting=self.setting)

    def _without_file(self, text: str) -> str:
        """`file:x`, `file:/x` and `file:///x` are paths; %20 and the like are decoded where only that names a file."""
        found = re.match(r"file:(?://([^/]*)(?=/|$))?(.*)", text, re.DOTALL | re.IGNORECASE)
        if not found:
            return text
        if found[1] not in (None, "", "localhost"):
            raise self.error(
                f"{redacted(text)!r} names a file on another machine; for a local file write file:///x or x"
            )
        path = unquote(found[2]) if not _exists(found[2]) and _exists(unquote(found[2])) else found[2]
        if not path:
            raise self.error(f"{text!r} names no file")
        return path

    def _braces(self, text: str) -> list[str]:
        longest = max((abs(int(last) - int(first)) for first, last in _RANGE.findall(text)), default=0)
        try:
            names = list(islice(braceexpand(text), FILES_LIMIT + 1)) if longest < FILES_LIMIT else None
        except ValueError:  # braceexpand's UnbalancedBracesError
            raise self.error(f"{redacted(text)!r}: missing closing brace; write ranges as {{00000..00099}}") from None
        if names is None or len(names) > FILES_LIMIT:
            raise self.error(f"{redacted(text)!r} names more than {FILES_LIMIT:,} files")
        return names

    def _expanded(self, name: str) -> list[Location]:
        kind = scheme(name)
        if not kind:
            return self._local(name)
        if kind in STORES:
            return self._stored(kind, name)
        if kind in WEB:
            return [self._web(kind, name)]
        reason = _OTHER_SCHEMES.get(kind, "supported are local paths, s3://, gs://, http:// and https://")
        raise self.error(f"{redacted(name)!r}: {kind}:// is not supported: {reason}")

    def _local(self, name: str) -> list[Location]:
        path = os.path.abspath(os.path.expanduser(name))
        if os.path.isfile(path):
            return [Location(path)]
        if os.path.isdir(path):
            if not os.access(path, os.R_OK | os.X_OK):
                raise self.error(f"{redacted(name)!r} cannot be read: permission denied")
            files = sorted(os.path.join(path, entry) for entry in os.listdir(path))
            found = [file for file in files if self._fits(file) and os.path.isfile(file)]
            return [Location(file) for file in found] or self._nothing_in(path, files)
        if os.path.lexists(path):
            raise self.error(f"{redacted(name)!r} is a broken link, or not a regular file")
        if _GLOB.search(name):
            matches = sorted(glob.glob(path, recursive=True))
            found = [match for match in matches if os.path.isfile(match) and not match.endswith(INDEX_SUFFIX)]
            if found:
                return [Location(match) for match in found]
        raise self.error(_absent(name, path), "missing")

    def _fits(self, name: str) -> bool:
        file = name.rsplit("/", 1)[-1]
        return file.lower().endswith(self.suffixes) and not file.startswith(".")

    def _nothing_in(self, folder: str, files: Sequence[str]) -> list[Location]:
        wanted = " or ".join(self.suffixes)
        others = ", ".join(redacted(file.removeprefix(folder).lstrip("/")) for file in files[:3]) or "nothing"
        raise self.error(
            f"no file in {redacted(folder)!r} ends in {wanted}; found: {others}{' ...' if len(files) > 3 else ''}. "
            f"For files in folders inside it write {redacted(folder).rstrip('/')}/**/*{self.suffixes[0]}",
            "missing",
        )

    def _stored(self, kind: str, name: str) -> list[Location]:
        bucket, _, key = name.split("://", 1)[1].partition("/")
        if not bucket or {"@", ":"} & {*bucket} or _GLOB.search(bucket):
            raise self.error(
                f"{redacted(name)!r}: expected {kind}://BUCKET/KEY; credentials come from the environment, never "
                "from an address"
            )
        if key and not key.endswith("/") and not _GLOB.search(key):
            return [Location(f"{kind}://{bucket}/{key}")]
        folder = key[: key.rfind("/", 0, found.start() if (found := _GLOB.search(key)) else None) + 1]
        try:
            files = [location.url for location in storage_io.listing(f"{kind}://{bucket}/{folder}")]
        except storage_io.StoreError as error:
            raise self.error(error.explanation) from None
        return self._listed(f"{kind}://{bucket}/", key, files)

    def _listed(self, root: str, key: str, files: Sequence[str]) -> list[Location]:
        """The files of a listing that match a glob, or a prefix that ends in `/`."""
        if not _GLOB.search(key):
            here = [file for file in files if "/" not in file.removeprefix(root + key) and self._fits(file)]
            return [Location(file) for file in here] or self._nothing_in(root + key, files)
        means = re.compile("".join(_translated(key)), re.DOTALL).fullmatch
        matches = [file for file in files if means(file.removeprefix(root)) and not file.endswith(INDEX_SUFFIX)]
        if not matches:
            raise self.error(f"nothing matches {redacted(root + key)!r} (of {len(files):,} listed files)")
        return [Location(file) for file in matches]

    def _web(self, kind: str, name: str) -> Location:
        rest = name.split("://", 1)[1]
        path, _, query = rest.partition("?")
        if "*" in path or "[" in path.partition("/")[2] or query.startswith("?"):
            raise self.error(
                f"{redacted(name)!r}: web servers do not list their files: write a range such as {{000..099}}"
            )
        if "..." in redacted(name) and "..." not in name:
            raise self.error(
                f"{redacted(name)!r}: the address cannot be read; / : @ in a password are written %2F %3A %40"
            )
        if not path.partition("/")[0].rpartition("@")[2] or path.endswith("/") or "/" not in path:
            raise self.error(f"{redacted(name)!r}: give the address of a file; web servers do not list their files")
        return Location(f"{kind}://{rest}")


def _absent(name: str, path: str) -> str:
    """A message about a path that does not exist: its nearest folder, and a similar name."""
    what = "nothing matches" if _GLOB.search(name) else "there is no"
    parents = Path(path).parents
    nearest = next(parent for parent in parents if parent.is_dir() and not _GLOB.search(str(parent)))
    entries = sorted(os.listdir(nearest)) if os.access(nearest, os.R_OK) else []
    close = get_close_matches(Path(path).name, entries, 1)
    meant = f". Did you mean {redacted(close[0])!r}?" if close and nearest == parents[0] else ""
    return (
        f"{what} {redacted(name)!r} (seen from {os.getcwd()!r}); the nearest folder that exists is "
        f"{redacted(str(nearest))!r}, with {len(entries):,} entries{meant}"
    )


def _translated(pattern: str) -> Iterator[str]:
    """A glob as a regular expression, in parts. `*` and `?` stay inside a folder and leave out names that begin with a
    dot, `**` is any folders."""
    for found in re.finditer(r"(^|/)(\*\*(?:/|$))|(^|(?<=/))(?=[*?\[])|\*+|\?|\[(!?)([^\]/]+)\]|.", pattern, re.DOTALL):
        token = found[0]
        if found[2]:
            yield found[1] + (r"(?:[^./][^/]*/)*" if token.endswith("/") else r"(?:[^./][^/]*/)*[^./][^/]*")
        elif not token:
            yield r"(?!\.)"
        elif token.startswith("*"):
            yield "[^/]*"
        elif token == "?":
            yield "[^/]"
        elif found[5]:
            yield f"[{'^' if found[4] else ''}{re.escape(found[5]).replace(chr(92) + '-', '-')}]"
        else:
            yield re.escape(token)
