"""Settings of caches of encoded images and captions. No torch here."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from daguerre.settings import ADDRESS, FREE, Settings, Unused

_NO_CACHE = "no effect without cache.path"


class CacheSettings(Settings):
    """Results of frozen encoders, kept so that each image and each caption is encoded once (docs/cache.md)."""

    unused_when: ClassVar[tuple[Unused, ...]] = (
        Unused(("images", "texts", "dtype", "batch_size", "shard_mb", "only"), lambda own: own.path is None, _NO_CACHE),
    )

    def way_to_use(self, field: str) -> str:
        return ", or set cache.path=auto"

    path: Annotated[str | None, ADDRESS] = Field(None, min_length=1, json_schema_extra=FREE)
    """Folder of the cache, also under s3:// or gs://; `auto` is one in `data.cache_dir`. Default: nothing is cached."""
    images: bool | None = Field(None, json_schema_extra=FREE)
    """Cache what the autoencoder makes of images. Default: if it can be cached; true: refuse the run if it cannot."""
    texts: bool | None = Field(None, json_schema_extra=FREE)
    """Cache what text encoders make of captions. Default: if it can be cached; true: refuse the run if it cannot."""
    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", json_schema_extra=FREE)
    """Types of what is kept. auto: means of latents in float32, their log variances and texts in float16, but texts of
    language models, whose hidden states can be too large for it, in bfloat16; bfloat16: all texts in it; float32: all
    as the encoders make it."""
    batch_size: int = Field(1, ge=1, json_schema_extra=FREE)
    """Images or captions that are encoded together. With 1 a row depends on its own image or caption alone, to the
    bit; more are faster on a GPU, and round differently."""
    shard_mb: float = Field(256, gt=0, json_schema_extra=FREE)
    """Size of the files of the cache, about, in MB. One is also closed after a minute, so that a kill costs little."""
    only: bool = Field(False, json_schema_extra=FREE)
    """Fill the cache and end, as `daguerre cache` does."""
