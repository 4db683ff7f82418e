"""The HTTP protocol with an end to patience: a request must be complete within seconds, and connections are counted.

uvicorn waits for ever for the rest of a request, and its `limit_concurrency` counts requests, not connections that send
none.
"""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10.0
MOST_CONNECTIONS = 64


class PatientProtocol(H11Protocol):
    """One connection."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        self._expect()

    def data_received(self, data: bytes) -> None:
        if self.deadline is None:  # the next request of a connection
            self._expect()
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._forget()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _expect(self) -> None:
        self.deadline = self.loop.call_later(REQUEST_SECONDS, self._give_up)

    def _forget(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _give_up(self) -> None:
        self.deadline = None
        self.transport.abort()
