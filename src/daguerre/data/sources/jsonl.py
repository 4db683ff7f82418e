"""JSON Lines with a key for the path or address of an image and one for its caption, such as ControlNet's prompt.json.

Holds the settings and opens the files; the source is `daguerre.data.table.source`, the reader
`data/table/json_lines.py`.
"""

from typing import Annotated, Literal

from pydantic import Field

from daguerre.data.source import Split
from daguerre.data.table.columns import TableSettings
from daguerre.data.table.json_lines import JsonLines
from daguerre.data.table.source import TableSource, open_tables
from daguerre.settings import ADDRESS, FREE
from daguerre.storage import expand
from daguerre.storage.pipes import FILES

SUFFIXES = (".jsonl", ".ndjson", "prompt.json")
"""Of files in a folder; the last is that of ControlNet's data (a line {source, target, prompt} for each image)."""


class Settings(TableSettings):
    """Files with a JSON object a line: one image's path or address with its caption; the rest is metadata."""

    source: Literal["jsonl"] = "jsonl"
    """Name of this source."""
    path: Annotated[str | Annotated[tuple[str, ...], Field(min_length=1)], FILES, ADDRESS] = Field(
        json_schema_extra=FREE
    )
    """A file in UTF-8, a folder of them, a pattern (`*.jsonl`), an address (s3, gs, http, https), or a list of these.
    Paths in a file start at the file's folder."""


def open_source(settings: Settings, split: Split) -> TableSource:
    """All usable rows, of both splits. UserError if there are none."""
    return open_tables(settings, JsonLines(), expand.expand(settings.path, "data.path", SUFFIXES))
