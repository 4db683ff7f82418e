"""JSON documents over a socket, one a line, without ever waiting. What they mean is the watchdogs' affair."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

_LONGEST_LINE_BYTES = 1 << 20
_MOST_UNSENT_BYTES = 1 << 22


class Line:
    """One end of a connection. A connection that breaks, or that carries something else, is no longer `open`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.open = True
        """Whether more can come."""
        self._unread = b""
        self._unsent = b""

    def send(self, document: dict[str, Any]) -> None:
        """Hands a document to the system, as far as that takes it; the rest goes with the next call."""
        self._unsent += json.dumps(document).encode() + b"\n"
        self.flush()
        self.open = self.open and len(self._unsent) < _MOST_UNSENT_BYTES

    def flush(self) -> None:
        """Hands over what is left."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = b""  # what the other end has said before it went can still be read

    def receive(self) -> list[dict[str, Any]]:
        """The documents that have come, without waiting; those that came before the end count."""
        try:
            while data := self.socket.recv(1 << 16):
                self._unread += data
                if len(self._unread) > _LONGEST_LINE_BYTES:
                    break
            self.open = False
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        *lines, self._unread = self._unread.split(b"\n")
        return [document for line in lines if (document := self._read(line)) is not None]

    def _read(self, line: bytes) -> dict[str, Any] | None:
        try:
            document = json.loads(line)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            self.open = False  # somebody else's
            return None
        return document

    def close(self) -> None:
        """Ends the connection."""
        self.open = False
        self.socket.close()


def settle(lines: Collection[Line], seconds: float = 0.5) -> None:
    """Ends connections so that the last words arrive: what comes in meanwhile is read, as the kernel would otherwise
    throw away both directions. Waits no longer than this for the other ends."""
    for line in lines:
        line.flush()
        with suppress(OSError):
            line.socket.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + seconds
    left = [line for line in lines if line.open]
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        for line in left:
            line.receive()
        left = [line for line in left if line.open]
    for line in lines:
        line.close()
