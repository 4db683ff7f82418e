"""Where pretrained files lie: a folder shipped with the package, a local folder, a single file, or the hub.

Finds places and says what is missing there, and how it comes; reads no weights (models/weights/load.py does). Under
`torch.device("meta")`, where networks are built without weights, configs alone are asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import torch

from daguerre.errors import Absent, UserError
from daguerre.models.settings import SINGLE_FILES
from daguerre.models.single_file import load
from daguerre.models.weights import architectures, pickled
from daguerre.models.weights.files import shards

SHIPPED = Path(__file__).parents[2] / "assets"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/(\S+\.(?:safetensors|ckpt|pt|bin))")

Files = tuple[tuple[str, ...], ...]
"""Files of a component, each by the names that it can have: one of them must be there."""
Needed = Mapping[str, Files]
"""Files by component folder; the component "" is the folder itself."""

CONFIG: Files = (("config.json",),)
TOKENIZER: Files = (("tokenizer_config.json",),)
SCHEDULER: Files = (("scheduler_config.json",),)
_STEMS = {"text_encoder": "model", "text_encoder_2": "model"}


@dataclass(frozen=True)
class Options:
    """Which files of a place are meant."""

    revision: str | None = None
    variant: str | None = None
    pickled: bool = False
    """Pickled weights will do where there are no others."""


def network(component: str, options: Options) -> Files:
    """Config and weights of a component, as diffusers and transformers name them."""
    stem = _STEMS.get(component, "diffusion_pytorch_model")
    mark = f".{options.variant}" if options.variant else ""
    names = [f"{stem}{mark}.safetensors", f"{stem}.safetensors.index{mark}.json"]
    if options.pickled:
        names.append(f"{'pytorch_model' if stem == 'model' else stem}{mark}.bin")
    return (*CONFIG, tuple(names))


def without_weights() -> bool:
    """Whether networks are being built without memory: `with torch.device("meta"):`."""
    return torch.get_default_device().type == "meta"


def shipped() -> list[str]:
    """Names of the pipelines that come with the package."""
    return sorted(folder.name for folder in SHIPPED.glob("[!_.]*") if folder.is_dir())


def locate(name: str, needed: Needed, options: Options = Options()) -> Path:
    """The folder that `name` means and that holds all files in `needed`.

    A shipped name comes first, then a local folder or file, then the hub: its local cache, and only then the network.
    UserError says what was looked for, where, and what to do.
    """
    if options.revision is not None and (name in shipped() or Path(name).exists()):
        raise UserError(f"model.revision has no effect on {name!r}, which is on this machine: set model.revision=null")
    if name in shipped():
        return _complete(SHIPPED / name, name, needed, options)
    if Path(name).is_dir():
        return _complete(Path(name), name, needed, options)
    if name.endswith(SINGLE_FILES):
        return _complete(load.folder(file(name, options), options.pickled), name, needed, options)
    if _HUB_ID.fullmatch(name):
        return _complete(_from_hub(name, needed, options), name, needed, options)
    raise UserError(
        f"there is no folder {name!r}, and it is no hub id (OWNER/NAME); shipped are: {', '.join(shipped())}. "
        "Give one of these, a folder in diffusers' layout, a hub id, or a .safetensors file"
    )


def file(name: str, options: Options) -> Path:
    """The local file that `name` (a path, or OWNER/NAME/FILE of the hub) means. UserError if there is none."""
    if Path(name).is_file():
        return Path(name)
    if (match := _HUB_FILE.fullmatch(name)) is None or Path(name).is_absolute():
        raise UserError(f"there is no file {name!r}, and it is no file of the hub (OWNER/NAME/FILE.safetensors)")
    repository, path = match.groups()
    try:
        return Path(huggingface_hub.hf_hub_download(repository, path, revision=options.revision))
    except OSError as error:
        raise _unreachable(name, repository, f"daguerre fetch {name} -o DIR", error) from error


def missing_files(folder: Path, needed: Needed) -> list[str]:
    """What of `needed` is not in `folder`, as COMPONENT/FILE (the first of several names), shards among it."""
    missing = []
    for part, files in needed.items():
        for names in files:
            there = [path for name in names if (path := folder / part / name).is_file()]
            if not there:
                missing.append(f"{part}/{names[0]}".lstrip("/"))
            elif ".index" in there[0].name:
                absent = (shard for shard in shards(there[0]) if not shard.is_file())
                missing += [shard.relative_to(folder).as_posix() for shard in absent]
    return missing


def here(name: str, options: Options) -> Path | None:
    """Where the files of a place are on this machine, without asking the hub; a file as its folder. None: nowhere."""
    if name in shipped():
        return SHIPPED / name
    if Path(name).exists():
        return Path(name) if Path(name).is_dir() else Path(name).parent
    repository = match[1] if (match := _HUB_FILE.fullmatch(name)) else name
    try:
        return _cached(repository, options)
    except (OSError, ValueError):
        return None


def _cached(repository: str, options: Options) -> Path:
    """The repository's folder in the hub's cache, whichever of its files are there. OSError if there is none."""
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=options.revision, local_files_only=True))
    except OSError as error:
        if (found := getattr(error, "snapshot_path", None)) is None:  # newer libraries ask for all files at once
            raise
        return Path(found)


def _complete(folder: Path, name: str, needed: Needed, options: Options) -> Path:
    """The folder, if it holds all that is needed; one whose weights are pickled is converted first."""
    if missing := missing_files(folder, needed):
        variant = f" of the variant {options.variant!r}" if options.variant else ""
        old = [] if options.pickled else [*folder.glob("*/*.bin"), *folder.glob("*.bin")]
        hint = "; it has pickled ones: model.pickled_weights=true reads them as tensors alone" if old else ""
        raise UserError(
            f"{name} ({folder}) lacks {', '.join(missing)}; needed is a folder in diffusers' layout with "
            f"{', '.join(filter(None, needed))} and weights in safetensors{variant}{hint}. Point to a complete one, or "
            "copy the missing files there"
        )
    if options.pickled and any(
        not any((folder / part / name).is_file() for name in names if not name.endswith(".bin"))
        for part, files in needed.items()
        for names in files
    ):
        return pickled.folder(folder)
    return folder


def _from_hub(name: str, needed: Needed, options: Options) -> Path:
    try:
        cached = _cached(name, options)
        if not missing_files(cached, needed):
            return cached
    except OSError:
        pass  # not in the cache: ask the hub
    if without_weights() and (known := architectures.find(name)) is not None and not missing_files(known, needed):
        return known
    try:
        folder = Path(
            huggingface_hub.snapshot_download(name, revision=options.revision, allow_patterns=_patterns(needed))
        )
        if options.pickled and missing_files(folder, _unpickled(needed)):
            bins = [f"{part}/{name}" for part, files in needed.items() for names in files for name in names]
            huggingface_hub.snapshot_download(
                name, revision=options.revision, allow_patterns=[path for path in bins if path.endswith(".bin")]
            )
        return folder
    except OSError as error:
        raise _unreachable(name, name, f"daguerre fetch {name} -o DIR", error) from error


def _unpickled(needed: Needed) -> Needed:
    return {
        part: tuple(tuple(name for name in names if not name.endswith(".bin")) for names in files)
        for part, files in needed.items()
    }


def _patterns(needed: Needed) -> list[str]:
    """What to download: the files with their shards, and small text files beside them."""
    found = ["tokenizer*/*.json", "tokenizer*/*.txt", "tokenizer*/*.model", "scheduler/*.json"]
    for part, files in _unpickled(needed).items():
        for name in [name for names in files for name in names]:
            found.append(f"{part}/{name}".lstrip("/"))
            if ".index" in name:
                stem, mark = name.partition(".")[0], name.partition(".index")[2].removesuffix(".json")
                found += [f"{part}/{stem}{mark}-*-of-*.safetensors".lstrip("/")]
                found += [f"{part}/{stem}-*-of-*{mark}.safetensors".lstrip("/")] if mark else []  # as it was once named
    return found


def _unreachable(name: str, repository: str, command: str, error: OSError) -> Absent:
    reason = str(error.__cause__ or error).strip().splitlines()[0]
    there = architectures.moved(repository)
    hint = f" Its publisher took it down; the hub keeps it as {there}." if there else ""
    return Absent(
        f"there is nothing {name!r} on this machine, and the hub did not give the model {repository!r}: {reason}."
        f"{hint} Its files are not in the local cache {huggingface_hub.constants.HF_HUB_CACHE}. Offline: on a machine "
        f"with a connection run `{command.replace(repository, there or repository)}`, copy DIR here and give its path, "
        f"or take one that is shipped: {', '.join(shipped())}"
    )
