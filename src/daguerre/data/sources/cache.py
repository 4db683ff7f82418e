"""A cache of encoded images and captions alone: what it was filled from is neither read nor needed."""

from typing import Annotated, Literal

import xxhash
from pydantic import Field

from daguerre.data.cached import rows
from daguerre.data.cached.source import SETS, CachedSource
from daguerre.data.settings import SourceSettings
from daguerre.data.source import Split, cache_of
from daguerre.errors import UserError
from daguerre.settings import ADDRESS, FREE
from daguerre.storage import io as storage_io
from daguerre.storage.location import Location


class Settings(SourceSettings):
    """The samples that a cache was filled with, by `daguerre cache` or `cache.path` (docs/cache.md)."""

    source: Literal["cache"] = "cache"
    """Name of this source."""
    path: Annotated[str, ADDRESS] = Field(min_length=1, json_schema_extra=FREE)
    """The cache: a folder, or an address under s3:// or gs://. Give it as `cache.path`, too."""
    set: str | None = Field(None, pattern=r"^[0-9a-f]{16}$")
    """Which of the data sets that the cache was filled with. Default: the only one."""


def open_source(settings: Settings, split: Split) -> CachedSource:
    """Opens the list of samples. UserError without a list, or for several and no choice."""
    url = settings.path.rstrip("/")
    names = [name.removesuffix(".index") for name in rows.files(f"{url}/{SETS}", ".index")]
    wanted = [settings.set] if settings.set else names
    if len(wanted) != 1 or wanted[0] not in names:
        raise UserError(
            f"data.path: {Location(url).name} holds {len(names)} data sets"
            + (f": choose one with data.set={'|'.join(names)}" if names else "; fill it with `daguerre cache RECIPE`"),
            code="missing",
            setting="data.set",
        )
    location = Location(f"{url}/{SETS}/{wanted[0]}.index")
    data = storage_io.read(location, 0, storage_io.size(location).bytes, twice=True)
    table = cache_of(settings).folder / SETS / f"{xxhash.xxh3_128_hexdigest(data)}.index"
    if not table.exists():
        storage_io.write(table, data)
    return CachedSource(None, table, settings)
