"""A remote file as a file object, fetched by ranges, each until two readings agree."""

import io
import os

from daguerre.storage import io as storage_io
from daguerre.storage.location import Location


class RemoteFile(io.RawIOBase):
    """For libraries that read files. StoreError as `io.read`."""

    def __init__(self, location: Location, size_bytes: int) -> None:
        super().__init__()
        self.location, self.size_bytes, self.position = location, size_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size_bytes}[whence]
        self.position = start + offset
        return self.position

    def read(self, size: int | None = -1) -> bytes:
        """Fewer bytes than asked for at the end only."""
        left = max(0, self.size_bytes - self.position)
        length = left if size is None or size < 0 else min(size, left)
        data = storage_io.read(self.location, self.position, length, twice=True)
        self.position += length
        return data
