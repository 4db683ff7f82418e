"""Addresses of the queue: its page, its news, its changes, and what an entry has printed."""

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from daguerre.report.html import Html
from daguerre.serve.queueing import changes, entries
from daguerre.serve.site import QUIET_TICKS, TICK_SECONDS, answering, body_of, event, site_of, stream

_SHARE = 0.01
"""Of the time that looking at the queue may take, for a page."""


def routes() -> list[Route]:
    """All of them."""
    return [
        Route("/queue/", answering(_queue), methods=["GET"]),
        Route("/queue/events", answering(_events), methods=["GET"]),
        Route("/queue/entry/{ident}/log", answering(_log), methods=["GET"]),
        Route("/queue/change", answering(_change), methods=["POST"]),
    ]


async def _queue(request: Request) -> Response:
    site = site_of(request)
    return HTMLResponse(await run_in_threadpool(entries.render, site.queue, site.catalog, site.rules.control))


async def _events(request: Request) -> Response:
    site = site_of(request)

    async def events() -> AsyncIterator[str]:
        known: dict[str, Html] = {}
        last, quiet, following = None, 0, 0.0
        while not site.stopping():
            quiet += 1
            if (began := time.monotonic()) >= following:
                now = await run_in_threadpool(entries.shown, site.queue, site.catalog, site.rules.control)
                following = began + (time.monotonic() - began) / _SHARE
                if now != last:
                    changed = {ident: row for ident, row in now.rows.items() if known.get(ident) != row}
                    said = entries.words(now, site.rules.control)
                    yield event({"rows": changed, "lists": now.lists, "paused": now.paused, "said": said})
                    last, known, quiet = now, now.rows, 0
            if quiet % QUIET_TICKS == 1:
                yield ": quiet\n\n"
            await asyncio.sleep(TICK_SECONDS)

    return stream(site, events())


async def _change(request: Request) -> Response:
    given = await body_of(request, changes.MOST_BYTES)
    return JSONResponse({"said": await run_in_threadpool(changes.make, site_of(request).queue, given)})


async def _log(request: Request) -> Response:
    text = await run_in_threadpool(entries.log, site_of(request).queue, request.path_params["ident"])
    return PlainTextResponse(text)
