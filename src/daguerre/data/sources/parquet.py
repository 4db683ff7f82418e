"""Parquet files with a column of images (bytes, paths or addresses) and a column of captions.

Holds the settings and opens the files; the source is `daguerre.data.table.source`.
"""

from typing import Annotated, Literal

from pydantic import Field

from daguerre.data.source import Split
from daguerre.data.table.columns import TableSettings
from daguerre.data.table.parquet import ParquetTables
from daguerre.data.table.source import TableSource, open_tables
from daguerre.settings import ADDRESS, FREE
from daguerre.storage import expand
from daguerre.storage.pipes import FILES

SUFFIXES = (".parquet", ".pq")


class Settings(TableSettings):
    """Parquet files, such as img2dataset or the Hugging Face hub have: one image with its caption a row."""

    source: Literal["parquet"] = "parquet"
    """Name of this source."""
    path: Annotated[str | Annotated[tuple[str, ...], Field(min_length=1)], FILES, ADDRESS] = Field(
        json_schema_extra=FREE
    )
    """A file, a folder of them, a pattern (`*.parquet`, `{00000..00099}.parquet`), an address (s3, gs, http, https), or
    a list of these. They may move between two starts: samples are known by the tables' contents."""


def open_source(settings: Settings, split: Split) -> TableSource:
    """All usable rows, of both splits. UserError if there are none."""
    return open_tables(settings, ParquetTables(), expand.expand(settings.path, "data.path", SUFFIXES))
