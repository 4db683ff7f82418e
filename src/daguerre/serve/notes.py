"""Notes about a run, which are written on the page: another name to show, a text, and whether it is put away."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from daguerre import documents
from daguerre.checkpoint.atomic import locked, write_json_atomically
from daguerre.serve.summaries import PAGE

MOST_BYTES = 64 << 10


class Notes(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field("", max_length=200)
    note: str = Field("", max_length=4000)
    archived: bool = False


def write(folder: Path, given: bytes) -> None:
    """Writes what a page sends. UserError for something else."""
    found = documents.sent(Notes.model_validate_json, given, "the page sent no note")
    with locked(folder):  # two pages may write at once
        write_json_atomically(folder / PAGE, found.model_dump())
