"""Finds the folder of pretrained files: shipped with the package, local, made of a single file, or of the hub.

Says which files are missing there and how to get them; reads no weights (models/weights/load.py does). Under
`torch.device("meta")`, where networks are built without weights, configs alone are asked for.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from daguerre.errors import Absent, UserError
from daguerre.models.settings import SINGLE_FILES
from daguerre.models.weights import architectures, index, pickled, single_files
from daguerre.models.weights.files import read_json, shards, variants

SHIPPED = Path(__file__).parents[2] / "assets"
_HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/(\S+\.(?:safetensors|sft|ckpt|pt|bin))")

Files = tuple[tuple[str, ...], ...]
"""Files of a component, each by the names that it can have: one of them must be there."""
Needed = Mapping[str, Files]
"""Files by component folder; the component "" is the folder itself."""

CONFIG: Files = (("config.json",),)
TOKENIZER: Files = (("tokenizer_config.json",),)


@dataclass(frozen=True)
class Options:
    """Revision and form of the files of a place."""

    revision: str | None = None
    variant: str | None = None
    pickled: bool = False
    """Pickled weights will do where there are no others."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that are left out."""


def network(component: str, options: Options) -> Files:
    """Config and weights of a component, as diffusers and transformers name them: of the variant or else plain ones."""
    of_transformers = component.startswith(("text_encoder", "image_encoder"))
    stem = "model" if of_transformers else "diffusion_pytorch_model"
    old = "pytorch_model" if stem == "model" else stem
    marks = (f".{options.variant}", "") if options.variant else ("",)
    names = [name for mark in marks for name in (f"{stem}{mark}.safetensors", f"{stem}.safetensors.index{mark}.json")]
    if options.pickled:
        names += [f"{old}{mark}.bin" for mark in marks]
    return (*CONFIG, tuple(names))


def without_weights() -> bool:
    """True if networks are being built without memory: `with torch.device("meta"):`."""
    return torch.get_default_device().type == "meta"


def shipped() -> list[str]:
    """Names of the pipelines that come with the package."""
    return sorted(folder.name for folder in SHIPPED.glob("[!_.]*") if folder.is_dir())


def is_hub_id(name: str) -> bool:
    """True for OWNER/NAME as the hub allows it, which a path such as `./folder` is not."""
    with suppress(HFValidationError):
        validate_repo_id(name)
        return "/" in name
    return False


def locate(name: str, needed: Needed, options: Options = Options()) -> Path:
    """The folder that `name` means and that holds all files in `needed`.

    A shipped name comes first, then a local folder or file, then the hub: its local cache, and only then the network.
    UserError says what was looked for, where, and what to do.
    """
    if options.revision is not None and (name in shipped() or Path(name).exists()):
        raise UserError(
            f"model.revision has no effect on {name!r}, which is a local path: set model.revision=null",
            code="unused",
            setting="model.revision",
        )
    if name in shipped():
        folder = SHIPPED / name
    elif Path(name).is_dir():
        folder = Path(name)
    elif name.endswith(SINGLE_FILES):
        folder = single_files.reader().folder(file(name, options), options.pickled, options.ignored)
    elif Path(name).is_file():  # of a form that is not read, such as .gguf
        folder = single_files.reader().folder(Path(name), options.pickled)
    elif is_hub_id(name):
        folder = _from_hub(name, needed, options)
    else:
        written_by = name.removesuffix("/pipeline").rpartition("/")[2] if name.endswith("/pipeline") else None
        seen_from = "" if Path(name).is_absolute() else f" (seen from {Path.cwd()})"
        if written_by is not None:
            raise UserError(
                f"there is no folder {name!r}{seen_from}: a run writes it when it has trained. First `daguerre train "
                f"{written_by}` (of another recipe: with run_name={written_by}), or give the place of another model",
                code="missing",
            )
        raise UserError(
            f"there is no folder {name!r}{seen_from}, and it is not a hub id (OWNER/NAME); shipped models are: "
            f"{', '.join(shipped())}. Give one of these, a folder in diffusers' layout, a hub id, or a .safetensors "
            "file",
            code="missing",
        )
    _check_complete(folder, name, needed, options)
    return pickled.folder(folder) if options.pickled and missing_files(folder, _unpickled(needed)) else folder


def file(name: str, options: Options) -> Path:
    """The local file that `name` (a path, or OWNER/NAME/FILE of the hub) means. UserError without a file."""
    if (found := file_here(name, options)) is not None:
        return found
    if (match := _HUB_FILE.fullmatch(name)) is None or not is_hub_id(match[1]):
        raise UserError(
            f"there is no file {name!r}, and it is not a file of the hub (OWNER/NAME/FILE.safetensors)", code="missing"
        )
    repository, path = match.groups()
    try:  # a whole snapshot of one file: where the hub cannot be reached, it is not asked six times
        folder = huggingface_hub.snapshot_download(repository, revision=options.revision, allow_patterns=[path])
    except OSError as error:
        raise _unreachable(name, repository, error) from error
    if not (found := Path(folder) / path).is_file():
        raise _unreachable(name, repository, FileNotFoundError(f"it has no {path}, or could not be asked"))
    return found


def file_here(name: str, options: Options) -> Path | None:
    """The local file that `name` means, without asking the hub; None without it."""
    if Path(name).is_file():
        return Path(name)
    match, folder = _HUB_FILE.fullmatch(name), here(name, options)
    found = None if match is None or folder is None else folder / match[2]
    return found if found is not None and found.is_file() else None


def missing_files(folder: Path, needed: Needed) -> list[str]:
    """Files in `needed` that are not in `folder`, as COMPONENT/FILE (the first of several names), shards among them."""
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
    """The folder of the files of a place on this machine, without asking the hub; None without it."""
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
    """The repository's folder in the hub's cache, whichever of its files are there. OSError without it."""
    try:
        # The whole snapshot: its folder is named after a commit, which only the library knows.
        return Path(huggingface_hub.snapshot_download(repository, revision=options.revision, local_files_only=True))
    except OSError as error:
        if (found := getattr(error, "snapshot_path", None)) is None:  # newer libraries ask for all files at once
            raise
        return Path(found)


def _check_complete(folder: Path, name: str, needed: Needed, options: Options) -> None:
    if missing := missing_files(folder, needed):
        lying = sorted({name for part in needed for name in variants(folder / part)})
        other = [name for name in lying if name != options.variant]
        old = [] if options.pickled else [*folder.glob("*/*.bin"), *folder.glob("*.bin")]
        hint = "; it has pickled ones: model.pickled_weights=true reads only the tensors from them" if old else ""
        setting = "model.pickled_weights" if old else None
        if other and any(".safetensors" in name for name in missing):
            hint, setting = f"; it has the variant {' and '.join(other)}: set model.variant={other[0]}", "model.variant"
        parts = [part for part in {name.partition("/")[0] for name in missing if "/" in name} if part in needed]
        elsewhere = f", or give {', '.join(f'model.{part}=PLACE' for part in sorted(parts))}" if parts else ""
        told = index.find(folder)
        kind = f", a {named}," if told is not None and (named := read_json(told).get("_class_name")) else ""
        raise UserError(
            f"{name} ({folder}){kind} lacks {', '.join(missing)}; it must be a folder in diffusers' layout with "
            f"{', '.join(filter(None, needed))} and weights in safetensors{hint}. Point to a complete one, "
            f"copy the missing files there{elsewhere}",
            code="missing",
            setting=setting,
        )


def _from_hub(name: str, needed: Needed, options: Options) -> Path:
    # The variant first: with plain weights as well, a download would be twice as large.
    cached, wanted = None, _of_variant(needed, options.variant)
    try:
        cached = _cached(name, options)
        if not missing_files(cached, wanted):
            return cached
    except OSError:
        pass  # not in the cache: ask the hub
    if without_weights() and (known := architectures.find(name)) is not None and not missing_files(known, needed):
        return known

    def download(patterns: list[str]) -> Path:
        return Path(huggingface_hub.snapshot_download(name, revision=options.revision, allow_patterns=patterns))

    try:
        folder = download(_patterns(_unpickled(wanted)))
        if missing_files(folder, wanted):  # plain ones of networks without the variant
            absent = {part: files for part, files in needed.items() if missing_files(folder, {part: wanted[part]})}
            folder = download(_patterns(_unpickled(absent)))
        # Pickled weights last, and only for what has no others.
        if options.pickled and missing_files(folder, _unpickled(needed)):
            download([path for path in _paths(needed) if path.endswith(".bin")])
        return folder
    except OSError as error:
        if cached is not None and not missing_files(cached, needed):
            return cached
        raise _unreachable(name, name, error) from error


def _of_variant(needed: Needed, variant: str | None) -> Needed:
    """The files of the variant alone, of networks that may have it."""
    if variant is None:
        return needed
    found = {}
    for part, files in needed.items():
        own = (tuple(name for name in names if f".{variant}." in name) for names in files)
        found[part] = tuple(few or names for few, names in zip(own, files, strict=True))
    return found


def _unpickled(needed: Needed) -> Needed:
    return {
        part: tuple(tuple(name for name in names if not name.endswith(".bin")) for names in files)
        for part, files in needed.items()
    }


def _paths(needed: Needed) -> list[str]:
    """Every name that a file can have, with its folder."""
    return [f"{part}/{name}".lstrip("/") for part, files in needed.items() for names in files for name in names]


def _patterns(needed: Needed) -> list[str]:
    """Patterns to download by: the files with their shards, and small text files with them."""
    found = [*index.NAMES, "tokenizer*/*.json", "tokenizer*/*.txt", "tokenizer*/*.model", "scheduler/*.json"]
    for path in _paths(needed):
        found.append(path)
        if ".index" in path:
            folder, _, name = path.rpartition("/")
            stem, mark = name.partition(".")[0], name.partition(".index")[2].removesuffix(".json")
            # with a variant, as shards are named, and as they once were
            shard_names = {f"{stem}{mark}-*-of-*.safetensors", f"{stem}-*-of-*{mark}.safetensors"}
            found += [f"{folder}/{shard}".lstrip("/") for shard in shard_names]
    return found


def _unreachable(name: str, repository: str, error: OSError) -> Absent:
    reason = str(error.__cause__ or error).strip().splitlines()[0]
    there = architectures.moved(repository)
    hint = f" Its publisher removed it; the hub keeps it as {there}." if there else ""
    own = f"copy DIR here and give its path, or use a shipped one: {', '.join(shipped())}"
    return Absent(
        f"{name!r} is not on this machine, and the hub could not provide it: {reason}.{hint} It is not in the local "
        f"cache {huggingface_hub.constants.HF_HUB_CACHE}. Offline: on a machine with a connection run `daguerre fetch "
        f"{name.replace(repository, there or repository)} -o DIR`, "
        + (own if name == repository else "copy the file here and give its path")
    )
