"""The server process: one port, one loop, no torch."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from daguerre.errors import UserError
from daguerre.serve.app import application
from daguerre.serve.patience import PatientProtocol
from daguerre.serve.site import Site


@contextmanager
def listening(host: str, port: int) -> Iterator[tuple[socket.socket, int]]:
    """A socket at an address, and its port. UserError where it cannot be had."""
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.create_server(place[:2], family=family)
    except OSError as error:
        raise UserError(
            f"cannot listen at {host}, port {port}: {error.strerror}. Another page may run there: choose another "
            "--port, or 0 for a free one",
            code="in_use",
        ) from error
    with found:
        yield found, found.getsockname()[1]


def serve(site: Site, at: socket.socket, cert: str = "", key: str = "", ended: threading.Event | None = None) -> None:
    """Serves until a signal asks to end, or `ended` is set."""
    app = application(site)
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=3,
        ssl_certfile=cert or None,
        ssl_keyfile=key or None,
    )
    try:
        asyncio.run(_Server(config, site, ended or threading.Event()).serve(sockets=[at]))
    finally:
        app.state.desk.commands.end()


class _Server(uvicorn.Server):
    """Open streams end when the server is to: uvicorn waits for them."""

    def __init__(self, config: uvicorn.Config, site: Site, ended: threading.Event) -> None:
        super().__init__(config)
        self.ended = ended
        site.stopping = lambda: self.should_exit

    async def on_tick(self, counter: int) -> bool:
        self.should_exit = self.should_exit or self.ended.is_set()
        return await super().on_tick(counter)
