"""The HTTP protocol with an end to patience: a request must be complete within seconds, or go on coming, and
connections are counted.

uvicorn waits for ever for the rest of a request, and its `limit_concurrency` counts requests, not connections that send
none.
"""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10.0
LEAST_BYTES = 256 << 10
"""Of the body of a request that is not answered yet, in so many seconds: then it gets as many again, for a picture that
is sent over a slow network."""
MOST_CONNECTIONS = 64


class PatientProtocol(H11Protocol):
    """One connection."""

    deadline: asyncio.TimerHandle | None = None
    received = 0
    """Bytes since the deadline was set."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        self._expect()

    def data_received(self, data: bytes) -> None:
        if self.deadline is None:  # the next request of a connection
            self._expect()
        self.received += len(data)
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._forget()
        elif self.received >= LEAST_BYTES and self.cycle is not None and not self.cycle.response_started:
            self._forget()
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _expect(self) -> None:
        self.received = 0
        self.deadline = self.loop.call_later(REQUEST_SECONDS, self._give_up)

    def _forget(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _give_up(self) -> None:
        self.deadline = None
        self.transport.abort()
