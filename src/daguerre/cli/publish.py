"""Put a run's pipeline or adapter on the hub, with a model card.

usage: daguerre publish RUN OWNER/NAME [key=value ...] [--dry-run]

Sends the newest export of a run (its pipeline, or the adapter that it trained) to a repository of the hub, with the
recipe, sample images, and a model card: how it was trained, on what, what was measured, and the licence of its base.
The repository is created if it is not there, and is private. One commit holds all; a command that was stopped sends
only what is missing when it is given again.

  daguerre publish runs/my-style me/my-style
  daguerre publish runs/my-style me/my-style private=false license=openrail++
  daguerre publish runs/my-style me/my-style --dry-run        shows the files and the card; sends nothing

  private=true      of a new repository; one that is there stays as it is
  license=ID        licence of the model, such as apache-2.0 (default: that of its base)
  images=8          sample images of the last save
  message="..."     of the commit

A token that may write comes from the environment, HF_TOKEN; HF_ENDPOINT names another hub.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi, constants
from huggingface_hub import errors as hub

from daguerre.checkpoint.run_dir import EXPORTS, check_not_held
from daguerre.cli.convert import options as given
from daguerre.credentials import scrub
from daguerre.errors import UserError
from daguerre.formatting import counted, first_line, format_size
from daguerre.models.weights import index
from daguerre.remote import local_copy
from daguerre.report import card
from daguerre.report.run import Run, read_run
from daguerre.settings import Settings

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_CARD, _RECIPE = "README.md", "recipe.yaml"


class Options(Settings):
    """Options of `publish`."""

    private: bool = True
    license: str | None = None
    images: int = 8
    message: str | None = None


@dataclass(frozen=True)
class Upload:
    """The files of a repository."""

    repository: str
    files: dict[str, Path | bytes]
    """By their names there."""
    licence: str | None

    @property
    def size_bytes(self) -> int:
        return sum(len(one) if isinstance(one, bytes) else one.stat().st_size for one in self.files.values())


def run(arguments: list[str]) -> int:
    """Publishes the run; 0, or a UserError."""
    flags = [word for word in arguments if word == "--dry-run"]
    folder, repository, options = read([word for word in arguments if word not in flags])
    check_not_held(folder)
    found = read_run(folder)
    api = HfApi(endpoint=constants.ENDPOINT, token=_token(needed=not flags))
    with explained(repository):
        upload = gather(found, repository, options, api)
    print(f"{repository}: {counted(len(upload.files), 'file')}, {format_size(upload.size_bytes)}")
    print(f"licence: {upload.licence or 'none is stated; license=apache-2.0, for instance, states one'}")
    if flags:
        print("\n".join(f"  {name}" for name in upload.files))
        print(f"\n{bytes(upload.files[_CARD]).decode()}")
        return 0
    with explained(repository):
        api.create_repo(repository, private=options.private, exist_ok=True)
        commit = api.create_commit(
            repository,
            [CommitOperationAdd(name, content) for name, content in upload.files.items()],
            commit_message=options.message or f"Upload of the run {folder.name}",
        )
    print(f"published: {commit.repo_url}")
    return 0


def read(arguments: list[str]) -> tuple[Path, str, Options]:
    """The run, the repository and the options. UserError for what is missing."""
    names = [word for word in arguments if _REPOSITORY.fullmatch(word) and not Path(word).exists()]
    repository = names[-1] if names else ""
    others = [word for word in arguments if word != repository]
    target, options, _ = given.read(others, "publish", Options) if repository else ("", Options(), set())
    if not target:
        raise UserError(
            "give a run folder and a repository of the hub, as in: daguerre publish runs/my-run OWNER/NAME",
            code="missing",
        )
    if options.images < 0:
        raise UserError(f"images={options.images}: give a number from 0", setting="images")
    return local_copy.located(target), repository, options


def gather(run: Run, repository: str, options: Options, api: HfApi) -> Upload:
    """All that is published. UserError for a run that has exported nothing, and for a base of unknown licence."""
    kind, export = _export(run.folder)
    latest = run.samples[-1].step if run.samples else 0
    images = [one for one in run.samples if one.step == latest and one.path.is_file()][: options.images]
    files: dict[str, Path | bytes] = {
        path.relative_to(export).as_posix(): path
        for path in sorted(export.rglob("*"))
        if path.is_file() and path.name != _CARD
    }
    if index.MODULAR in files:
        files[index.MODULAR] = index.at(export / index.MODULAR, repository)
    files |= {card.image_file(number, one): one.path for number, one in enumerate(images)}
    files[_RECIPE] = scrub(run.config_text).encode()
    base = _base(run)
    licence = options.license or _licence(base, api)
    usage = export / _CARD
    words = usage.read_text(encoding="utf-8") if usage.is_file() else ""
    files[_CARD] = scrub(card.write(run, repository, kind, words, images, base, licence)).encode()
    return Upload(repository, files, licence)


def _export(folder: Path) -> tuple[str, Path]:
    for kind in EXPORTS:
        with suppress(UserError):
            local_copy.fetch_export(folder, kind)
        export = folder / kind
        if export.is_dir():
            alone = kind == "pipeline" and index.find(export) is None
            return "network" if alone else kind, export
    raise UserError(
        f"{local_copy.display_name(folder)} has no export: train it with checkpoint.export=true, or write one with "
        "`daguerre convert export`",
        code="missing",
    )


def _base(run: Run) -> str | None:
    """The model of the hub that was trained; None for a folder of this machine, and for a model from random weights."""
    place = run.setting("model.pretrained_model_name_or_path")
    return place if isinstance(place, str) and _REPOSITORY.fullmatch(place) and not Path(place).exists() else None


def _licence(base: str | None, api: HfApi) -> str | None:
    """The licence of the base, as its card says. UserError where it says none."""
    if base is None:
        return None
    found = None
    with suppress(hub.RepositoryNotFoundError, hub.GatedRepoError):
        data = api.model_info(base).card_data
        found = data.get("license") if data is not None else None
    if not isinstance(found, str) or not found:
        raise UserError(
            f"the hub names no licence of the base {base}: read its conditions, and give the licence of your model, "
            "as in license=openrail++",
            code="missing",
            setting="license",
        )
    return found


def _token(needed: bool) -> str | None:
    token = huggingface_hub.get_token()
    if needed and not token:
        raise UserError(
            "there is no token for the hub: create one that may write, in the settings of your account there, and set "
            "the environment variable HF_TOKEN to it",
            code="missing",
        )
    return token


@contextmanager
def explained(repository: str) -> Iterator[None]:
    """Raises errors of the hub as UserErrors that say what to do."""
    try:
        yield
    except hub.OfflineModeIsEnabled as error:
        raise UserError("HF_HUB_OFFLINE is set: unset it for this command", code="unreachable") from error
    except hub.HFValidationError as error:
        raise UserError(f"{repository} is no name of a repository: {first_line(error)}") from error
    except (hub.HTTPError, ConnectionError, TimeoutError, RuntimeError) as raised:
        cause = raised.__cause__ if type(raised) is RuntimeError and raised.__cause__ else raised  # of a file's upload
        if not isinstance(cause, hub.HTTPError | OSError):
            raise
        if getattr(getattr(cause, "response", None), "status_code", None) in (401, 403):
            raise UserError(
                f"{constants.ENDPOINT} refuses to write {repository}: HF_TOKEN must be a token that may write, of "
                f"an account that owns {repository.partition('/')[0]} or belongs to it",
                code="unreachable",
            ) from raised
        raise UserError(
            f"{constants.ENDPOINT}: {first_line(cause)}. Files that were sent are kept there: the same command again "
            "sends the rest",
            code="unreachable",
        ) from raised
