"""Keys and folders that the configs of kohya's scripts, OneTrainer, ai-toolkit and SimpleTuner have in common.

Keys that mean what they mean on the command line are read by its tables; folders of images become a source, or a mix.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from daguerre.config.aliases import lookup
from daguerre.config_import.reader import REQUIRED, Reading, tables
from daguerre.errors import UserError

OWN: dict[str, str] = tables("peers")["own"]
OF_A_SOURCE: dict[str, Any] = {"caption_dropout": 0.0, "held_out_fraction": 0}
IMAGES = (".jpg", ".jpeg", ".png", ".webp")


def carry_known(reading: Reading, keys: Iterable[str]) -> None:
    """Reads the keys that are our own, or that other trainers' names on the command line explain."""
    tables: tuple[Mapping[str, Any], ...] = (lookup.SAME, lookup.CONVERTED, lookup.REFUSED, lookup.NOTICES)
    for key in keys:
        if key in OWN:
            reading.carry(key, OWN[key])
        elif any(key in table for table in tables) or any(fnmatchcase(key, row) for row in lookup.LATER):
            reading.alias(key)


def asks(value: Any) -> bool:
    """True for a value that asks for anything."""
    return value not in (None, "", 0, False, "none", "None", "null", "false", "False") and value not in ([], {})


def words(given: Any) -> list[str]:
    """The words of a list of arguments, which may be written as a text."""
    return shlex.split(given) if isinstance(given, str) else [str(each) for each in given or []]


def not_there(what: str, trainer: str) -> UserError:
    """The error for a config that trains what no recipe can say."""
    text = f"this config of {trainer} trains {what}, which is not supported yet: no recipe was written"
    return UserError(text, code="unsupported")


def no_dropout(reading: Reading, key: str, kind: str) -> None:
    """Refuses a dropout of inputs for a kind of LoRA that has none."""
    if kind in ("loha", "lokr") and asks(reading.get(key)):
        reading.refuse(key, f"peft has no dropout of inputs for {kind}")


def encoders(family: str) -> tuple[str, ...]:
    """Names of the text encoders of a family."""
    return ("text_encoder", "text_encoder_2") if family == "sdxl" else ("text_encoder",)


@dataclass
class Folder:
    """A folder of images in a config of theirs."""

    key: str
    """Where it stands in the config: the dotted path before its own keys."""
    path: Any
    repeats: float = 1
    caption: str | None = None
    """Of every image that has none of its own."""
    regular: bool = False
    """True for class images, which are taken as often as all others together."""
    name: str = ""
    place: str = "data"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of images in it; 0 where it is not on this machine."""
        folder = Path(str(self.path)).expanduser()
        return sum(path.suffix.lower() in IMAGES for path in folder.rglob("*")) if folder.is_dir() else 0

    @property
    def captioned(self) -> bool:
        """True if there are caption files beside its images."""
        folder = Path(str(self.path)).expanduser()
        return folder.is_dir() and any(path.suffix in (".txt", ".json", ".jsonl") for path in folder.rglob("*"))


def lay(reading: Reading, folders: Sequence[Folder]) -> None:
    """Gives each folder its place in the recipe, and says of what kind it is; how often each is taken is its weight."""
    if not folders:
        reading.assume({"data.source": "folder", "data.path": REQUIRED})
        reading.assume({f"data.{name}": value for name, value in OF_A_SOURCE.items()})
        return
    if len(folders) > 1:
        reading.assume({"data.source": "mix"})
        names: set[str] = set()
        for folder in folders:
            folder.name = _named(folder, names)
            folder.place = f"data.sources.{folder.name}"
    for folder in folders:
        captions = folder.caption if folder.caption and not folder.captioned else None
        values = {"source": "folder", "path": folder.path, **OF_A_SOURCE, **folder.settings}
        values |= {"captions.text": captions} if captions else {}
        if len(folders) == 1 and folder.repeats not in (1, 1.0):
            values["repeats"] = max(1, round(folder.repeats))
        reading.assume({f"{folder.place}.{name}": value for name, value in values.items()})
    if len(folders) > 1:
        reading.assume({"data.weights": weights(folders)})


def _named(folder: Folder, taken: set[str]) -> str:
    """A name for a source that no other has."""
    plain = re.sub(r"\W+", "_", folder.name or Path(str(folder.path)).name).strip("_").lower() or "images"
    name = next(n for n in (plain, *(f"{plain}_{i}" for i in range(2, 10_000))) if n not in taken)
    taken.add(name)
    return name


def weights(folders: Sequence[Folder]) -> dict[str, float]:
    """Shares of the folders: images times repeats, class images as often as all others together."""
    shares = {folder.name: folder.repeats * max(folder.count, 1) for folder in folders}
    others, regular = (sum(shares[f.name] for f in folders if f.regular == kind) for kind in (False, True))
    factor = others / regular if regular and others else 1
    return {f.name: float(f"{shares[f.name] * (factor if f.regular else 1):.6g}") for f in folders}


def updates_of(folders: Sequence[Folder], epochs: Any, batch: Any, accumulation: Any) -> str | None:
    """The updates of so many epochs, where the images are on this machine."""
    numbers = (epochs, batch or 1, accumulation or 1)
    if not all(isinstance(n, int | float) for n in numbers) or not folders or not all(f.count for f in folders):
        return None
    seen = sum(f.count * f.repeats for f in folders if not f.regular) * (1 + any(f.regular for f in folders))
    return f"{max(1, -int(-(seen * epochs) // (numbers[1] * numbers[2])))} steps"


def length(reading: Reading, key: str, path: str, folders: Sequence[Folder], sizes: tuple[Any, Any]) -> None:
    """Carries a number of epochs; a mix has none, so that they become updates there, of batches of these sizes."""
    epochs = reading.get(key)
    if len(folders) < 2:
        reading.carry(key, path, f"{epochs} epochs")
    elif steps := updates_of(folders, epochs, *sizes):
        reading.carry(key, path, steps, "epochs of these folders, on one device")
    else:
        reading.refuse(key, f"a mix of sources has no epochs, and its images cannot be counted from here: set {path}")


def finish(reading: Reading, tables: Mapping[str, Any]) -> None:
    """Notes the keys of the tables that set nothing here, and those that are left and ask for nothing; fills in what
    the trainer does where no key says otherwise."""
    reading.note(tables["no_matter"], "it does not change what is learnt")
    for key, value in list(reading.rest.items()):
        if not asks(value):
            reading.notice(key, "off there")
    reading.assume(tables["unasked"])
