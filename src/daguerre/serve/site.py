"""The state of the server, and what every answer needs: refusals as answers, bodies of requests, streams of events."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse

from daguerre.errors import UserError
from daguerre.fresh import FULL
from daguerre.queue.queue import Queue
from daguerre.report.run import Run
from daguerre.serve import list_page, pages, run_page
from daguerre.serve.catalog import Catalog
from daguerre.serve.gate import Rules
from daguerre.serve.queueing.schema import Schema
from daguerre.serve.summaries import Summary
from daguerre.serve.watched import Parts, Watched, Watching

MOST_STREAMS = 32
"""Open streams of events; the other connections are left for answers."""
TICK_SECONDS = 1.0
"""Between two looks for what an open page should say."""
QUIET_TICKS = 15
"""After so many without news a stream sends a sign of life."""
_LIST_SECONDS, _FULL_SECONDS, _LIST_SHARE = 2.0, 10.0, 0.01

Answer = Callable[[Request], Awaitable[Response]]


@dataclass
class Site:
    """State of the server: the runs, who looks at them, and when they were looked at."""

    catalog: Catalog
    rules: Rules
    queue: Queue
    """The queue of this machine that is shown, and with `rules.control` changed."""
    bounds: tuple[str, ...] = ()
    """Folders and addresses below which a run reads that this page queues; its own folder without any."""
    patience_seconds: float = 0.7
    """A page waits so long for metrics that are not read yet; then it comes without, and they follow."""
    stopping: Callable[[], bool] = lambda: False
    """True when the server is about to end: streams end then."""
    streams: int = 0
    queue_changes: int = 0
    """Of this page: who has made one sees at once what became of it."""
    schema: Schema = field(default_factory=Schema)
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a draft is checked: one at a time."""
    watching: Watching = field(init=False)
    settings: list_page.Settings = field(init=False)
    _scanning: asyncio.Lock = field(default_factory=asyncio.Lock)
    _next_scan: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        self.bounds = self.bounds or tuple(map(str, self.catalog.roots))
        self.watching = Watching(self.catalog, self._parts)
        self.settings = list_page.Settings(self.catalog)

    @property
    def starts(self) -> bool:
        """True if runs are started on the page, and pictures shown there: of a store it only shows runs."""
        return self.catalog.copies is None

    def summary(self, id: str) -> Summary | None:
        entry = self.catalog.entries.get(id)
        return entry.summary if entry else None

    def _parts(self, watched: Watched, run: Run) -> Parts:
        self.catalog.refresh(watched.id)
        return run_page.parts(watched, run, self.summary(watched.id), self.catalog)

    async def scan(self) -> None:
        """Looks for what is new in the list, all runs or those that run, each no more often than is worth it."""
        async with self._scanning:
            now, (any_, every) = asyncio.get_running_loop().time(), self._next_scan
            if now < any_:
                return
            everything = now >= every
            await run_in_threadpool(self.catalog.scan, everything)
            after = asyncio.get_running_loop().time()
            rest = (after - now) / _LIST_SHARE
            self._next_scan = (
                after + max(_LIST_SECONDS, 0.0 if everything else rest),
                after + max(_FULL_SECONDS, rest) if everything else every,
            )


def site_of(request: Request) -> Site:
    """The site that is asked."""
    site: Site = request.app.state.site
    return site


def folder_of(request: Request) -> Path:
    """The folder of the run that is asked for. UserError for no run, and for one that must not be shown."""
    folder = site_of(request).catalog.at(request.path_params["id"])
    if folder is None:
        raise UserError("there is no such run", code="missing")
    return folder


def answering(answer: Answer) -> Answer:
    """The same, with refusals as answers."""

    async def answered(request: Request) -> Response:
        try:
            return await answer(request)
        except UserError as error:
            status = {"missing": 404, "unknown": 404, "in_use": 409}.get(error.code, 422)
            text = str(error)
        except FileNotFoundError:
            status, text = 404, "this is no longer there"
        except OSError as error:
            if error.errno not in FULL:
                raise
            status, text = 507, f"{error.strerror}. Free some space and try again"
        if request.headers.get("sec-fetch-mode") == "navigate":
            said = pages.message("not shown", "This cannot be shown", text, pages.up(request.url.path))
            return HTMLResponse(said, status)
        return PlainTextResponse(f"{text}\n", status)

    return answered


async def body_of(request: Request, most: int) -> bytes:
    """The body of a request, if it is no longer than it may be. UserError."""
    found = b""
    async for chunk in request.stream():
        found += chunk
        if len(found) > most:
            raise UserError(f"more than {most:,} bytes were sent")
    return found


def event(document: object) -> str:
    """One event of a stream."""
    return f"data: {json.dumps(document)}\n\n"


def stream(site: Site, events: AsyncIterator[str]) -> Response:
    """The answer that sends events, unless too many pages are open."""
    if site.streams >= MOST_STREAMS:
        return PlainTextResponse("Too many pages are open.\n", 503)

    async def counted() -> AsyncIterator[str]:
        site.streams += 1
        try:
            async for event in events:
                yield event
        finally:
            site.streams -= 1

    return StreamingResponse(counted(), media_type="text/event-stream")
