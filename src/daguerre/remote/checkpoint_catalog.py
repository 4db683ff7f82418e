"""The checkpoints in an object store as one process sees them: names, leftovers, what is set aside, what may go.

checkpoints/NAME/manifest.json, checkpoints/NAME/ATTEMPT/...     a checkpoint: remote/sealed_files.py
checkpoints/quarantine/NAME.NUMBER.json                          why one was set aside, its manifest, its folders
"""

import json
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass

from daguerre import documents
from daguerre.checkpoint import manifest
from daguerre.checkpoint.manifest import Damaged
from daguerre.checkpoint.retention import RetentionPolicy
from daguerre.remote.sealed_files import SealedFiles
from daguerre.storage.bucket import Listed, Prefix
from daguerre.storage.errors import Missing

_MANIFEST = re.compile(rf"([a-z]+-(\d+))/{re.escape(manifest.NAME)}")
_FILE = re.compile(r"([a-z]+-\d+)/([0-9a-z]+)/.+")
_ASIDE = "quarantine"


@dataclass(frozen=True)
class CheckpointCatalog:
    """The checkpoints below a place in a store."""

    at: Prefix

    def sealed(self, name: str) -> SealedFiles:
        return SealedFiles(self.at / name)

    def names(self) -> list[str]:
        """Names of the checkpoints that exist, verified or not, oldest first. StoreError."""
        return _names(self.at.listing())

    def collect_garbage(self) -> list[str]:
        """Deletes what no manifest names: files of saves that were killed or replaced. Returns notices."""
        listed = self.at.listing()
        kept = self._kept(listed)
        left = [one.name for one in listed if (found := _FILE.fullmatch(one.name)) and found.groups() not in kept]
        self.at.delete(left)
        saves = sorted({name.partition("/")[0] for name in left})
        return [f"removed {len(left)} files of {', '.join(saves)}, left over from a killed run"] if left else []

    def _kept(self, listed: list[Listed]) -> set[tuple[str, ...]]:
        """Name and attempt of what is a checkpoint, or was set aside. A damaged manifest keeps all there is."""
        kept: set[tuple[str, ...]] = set()
        for name in _names(listed):
            try:
                manifested = self.sealed(name).read()
            except Damaged:
                kept |= {(name, folder) for folder in _folders(listed, name)}
            else:
                kept |= {(name, manifested.folder)} if manifested else set()
        return kept | self._aside(listed)

    def _aside(self, listed: list[Listed]) -> set[tuple[str, ...]]:
        """Name and attempt of what was set aside. A damaged note keeps all there is of its name."""
        found: set[tuple[str, ...]] = set()
        for one in listed:
            if one.name.startswith(f"{_ASIDE}/") and one.name.endswith(".json"):
                name = one.name.removeprefix(f"{_ASIDE}/").rsplit(".", 2)[0]
                folders = _folders(listed, name)
                with suppress(ValueError, LookupError, TypeError):
                    folders = [*map(str, documents.parse(self.at.read(one.name)[0])["folders"])]
                found |= {(name, folder) for folder in folders}
        return found

    def quarantine(self, name: str, reason: str) -> str:
        """Takes a checkpoint out of the names; its files stay where they are. Returns a notice."""
        listed = self.at.listing()
        try:
            data = self.at.read(f"{name}/{manifest.NAME}")[0].decode(errors="replace")
        except Missing:
            data = ""
        about = {"name": name, "reason": reason, "folders": _folders(listed, name), "manifest": data}
        aside = f"{_ASIDE}/{name}.{secrets.token_hex(4)}.json"
        self.at.write(aside, json.dumps(about, indent=1).encode())
        self.at.delete([f"{name}/{manifest.NAME}"])
        return f"{reason}; {name} is set aside: {(self.at / aside).name}"

    def purge(self, keep: RetentionPolicy) -> list[str]:
        listed, notices = self.at.listing(), list[str]()
        named = {int(name.rpartition("-")[2]): name for name in _names(listed)}

        def sound(number: int) -> bool:
            name = named[number]
            try:
                self.verify(name, listed)
            except Damaged as damage:
                notices.append(self.quarantine(name, str(damage)))
                return False
            return True

        for number in keep.deletable(list(named), sound):
            self._delete(named[number], listed)
        return notices

    def verify(self, name: str, listed: list[Listed]) -> None:
        """Damaged unless the store has every file as it was sent."""
        self.sealed(name).verify({one.name.removeprefix(f"{name}/"): one for one in listed})

    def _delete(self, name: str, listed: list[Listed]) -> None:
        """The manifest first. What was set aside of the same name stays."""
        kept = self._aside(listed)
        self.at.delete([f"{name}/{manifest.NAME}"])
        files = [one.name for one in listed if (found := _FILE.fullmatch(one.name)) and found[1] == name]
        self.at.delete([path for path in files if tuple(path.split("/")[:2]) not in kept])


def _names(listed: list[Listed]) -> list[str]:
    found = [match for one in listed if (match := _MANIFEST.fullmatch(one.name))]
    return [match[1] for match in sorted(found, key=lambda match: (int(match[2]), match[1]))]


def _folders(listed: list[Listed], name: str) -> list[str]:
    found = (_FILE.fullmatch(one.name) for one in listed)
    return sorted({match[2] for match in found if match and match[1] == name})
