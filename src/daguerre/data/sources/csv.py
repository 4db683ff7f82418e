"""CSV and TSV files with a column of paths or addresses of images and a column of captions.

Holds the settings and opens the files; the source is `daguerre.data.table.source`, the reader `data/table/csv.py`.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from daguerre.data.source import Split
from daguerre.data.table.columns import TableSettings
from daguerre.data.table.csv import CsvTables
from daguerre.data.table.source import TableSource, open_tables
from daguerre.errors import UserError
from daguerre.settings import ADDRESS, FREE
from daguerre.storage import expand
from daguerre.storage.location import Location
from daguerre.storage.pipes import FILES

SUFFIXES = (".csv", ".tsv")


class Settings(TableSettings):
    """CSV or TSV files: one image's path or address with its caption a row; the rest is metadata."""

    source: Literal["csv"] = "csv"
    """Name of this source."""
    path: Annotated[str | Annotated[tuple[str, ...], Field(min_length=1)], FILES, ADDRESS] = Field(
        json_schema_extra=FREE
    )
    """A file in UTF-8, a folder of them, a pattern (`*.csv`), an address (s3, gs, http, https), or a list of these.
    Paths in a table start at the table's folder."""
    delimiter: Literal["auto", ",", "\t", ";", "|"] = "auto"
    """Separator of cells. `auto`: a tab in .tsv files, else a comma."""
    quote: Literal['"', "'", "none"] = '"'
    """Stands around cells that hold delimiters or line ends; `none`: quotes are plain letters."""
    columns: tuple[str, ...] | None = Field(None, min_length=1)
    """Names of the columns, in their order, for files without a header line."""

    @model_validator(mode="after")
    def _twins(self) -> Self:
        if self.columns and len(set(self.columns)) < len(self.columns):
            raise ValueError(f"columns: {', '.join(self.columns)}: give each name only once")
        return self


def open_source(settings: Settings, split: Split) -> TableSource:
    """All usable rows, of both splits. UserError if there are none."""
    found = expand.expand(settings.path, "data.path", SUFFIXES)
    quote = "" if settings.quote == "none" else settings.quote
    return open_tables(settings, CsvTables(_delimiter(settings, found), quote, settings.columns), found)


def _delimiter(settings: Settings, found: list[Location]) -> str:
    if settings.delimiter != "auto":
        return settings.delimiter
    tabs = [location for location in found if location.name.lower().endswith(".tsv")]
    if tabs and len(tabs) < len(found):
        raise UserError(
            f"data.path: {tabs[0].name} is a TSV file but others are not: all tables of one source must have the "
            "same format. Use two sources (data.sources), or set data.delimiter",
            code="conflict",
            setting="data.delimiter",
        )
    return "\t" if tabs else ","
