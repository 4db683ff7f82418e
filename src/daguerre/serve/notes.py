"""Notes about a run, which are written on the page: another name to show, a text, and whether it is put away."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from daguerre import documents
from daguerre.checkpoint.atomic import locked, to_json, write_json_atomically
from daguerre.errors import UserError
from daguerre.remote.copies import Copies
from daguerre.serve.summaries import PAGE
from daguerre.storage.errors import StoreError

MOST_BYTES = 64 << 10


class Notes(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field("", max_length=200)
    note: str = Field("", max_length=4000)
    archived: bool = False


def write(folder: Path, given: bytes, copies: Copies | None = None) -> None:
    """Writes what a page sends, in the folder of a run, or in the store that it is a copy of. UserError for something
    else, and for a store that cannot be written."""
    found = documents.sent(Notes.model_validate_json, given, "the page sent no note")
    far = copies.far(folder) if copies else None
    if far is not None:
        try:
            far.run.write(PAGE, to_json(found.model_dump()))
        except StoreError as error:
            raise UserError(error.explanation, code="unreachable") from error
    with locked(folder):  # two pages may write at once
        write_json_atomically(folder / PAGE, found.model_dump())
