"""Addresses of the queue: its page, its news, its changes, and the form of a new run."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from daguerre.errors import UserError
from daguerre.report.html import Html
from daguerre.serve.queueing import changes, checking, drafts, entries, form
from daguerre.serve.site import QUIET_TICKS, TICK_SECONDS, Site, answering, body_of, event, site_of, stream

Made = TypeVar("Made")
_SHARE = 0.01
"""Of the time that looking at the queue may take, for a page."""


def routes() -> list[Route]:
    """All of them."""
    return [
        Route("/queue/", answering(_queue), methods=["GET"]),
        Route("/queue/events", answering(_events), methods=["GET"]),
        Route("/queue/entry/{ident}/log", answering(_log), methods=["GET"]),
        Route("/queue/change", answering(_change), methods=["POST"]),
        Route("/queue/new", answering(_new), methods=["GET"]),
        Route("/queue/draft", answering(_draft), methods=["POST"]),
        Route("/queue/check", answering(_check), methods=["POST"]),
        Route("/queue/plan", answering(_plan), methods=["POST"]),
        Route("/queue/try", answering(_try), methods=["POST"]),
        Route("/queue/add", answering(_add), methods=["POST"]),
    ]


async def _queue(request: Request) -> Response:
    site = site_of(request)
    return HTMLResponse(await run_in_threadpool(entries.render, site.queue, site.catalog, site.rules.control))


async def _events(request: Request) -> Response:
    site = site_of(request)

    async def events() -> AsyncIterator[str]:
        known: dict[str, Html] = {}
        last, quiet, following, seen = None, 0, 0.0, 0
        while not site.stopping():
            quiet += 1
            if (began := time.monotonic()) >= following or seen != site.queue_changes:
                seen = site.queue_changes
                now = await run_in_threadpool(entries.shown, site.queue, site.catalog, site.rules.control)
                following = began + (time.monotonic() - began) / _SHARE
                if now != last:
                    changed = {ident: row for ident, row in now.rows.items() if known.get(ident) != row}
                    said = entries.words(now, site.rules.control)
                    yield event({"rows": changed, "lists": now.lists, "paused": now.paused, "said": said})
                    last, known, quiet = now, now.rows, 0
            if quiet and quiet % QUIET_TICKS == 0:
                yield ": quiet\n\n"
            await asyncio.sleep(TICK_SECONDS)

    return stream(site, events())


async def _change(request: Request) -> Response:
    site, given = site_of(request), await body_of(request, changes.MOST_BYTES)
    said = await run_in_threadpool(changes.make, site.queue, given)
    site.queue_changes += 1
    return JSONResponse({"said": said})


async def _log(request: Request) -> Response:
    text = await run_in_threadpool(entries.log, site_of(request).queue, request.path_params["ident"])
    return PlainTextResponse(text)


async def _new(request: Request) -> Response:
    site, asked = site_of(request), request.query_params
    if not site.rules.control:
        raise UserError("this page is read-only: start it with --control to start runs")
    goes_on = "on" in asked
    id = asked.get("on") or asked.get("run") or ""
    given = dict(text.split("=", 1) for text in asked.getlist("set")[:50] if "=" in text)

    def work() -> str:
        if not id:
            name = asked.get("recipe", "quickstart")
            choice = {"recipe": name, "run": "", "goes_on": False, "name": name, "yaml": drafts.as_yaml(given)}
            return form.render(choice, "New run", drafts.own_recipes(site.catalog.folder))
        folder = site.catalog.at(id)
        if folder is None:
            raise UserError("there is no such run: it may have been moved", code="missing")
        summary = site.summary(id)
        name = summary.name if summary else folder.name
        given.update({} if goes_on else {"run_name": form.free_name(folder)})
        choice = {"recipe": "", "run": id, "goes_on": goes_on, "name": name, "yaml": drafts.as_yaml(given)}
        return form.render(choice, f"Train on: {name}" if goes_on else f"Copy of {name}", ())

    return HTMLResponse(await run_in_threadpool(work))


async def _draft(request: Request) -> Response:
    site, draft = site_of(request), drafts.read(await body_of(request, 2 * drafts.MOST_BYTES))
    return JSONResponse(await _patiently(site, form.document, site, draft))


async def _meant(request: Request) -> drafts.Meant:
    """The training of a message that is to be checked or added."""
    site, draft = site_of(request), drafts.read(await body_of(request, 2 * drafts.MOST_BYTES))
    return await run_in_threadpool(lambda: drafts.mean(site, draft, drafts.overrides(draft.yaml)))


async def _check(request: Request) -> Response:
    site, meant = site_of(request), await _meant(request)
    async with site.checking:  # each takes seconds of the processor, and much memory
        return JSONResponse(await _patiently(site, checking.checked, site, meant))


async def _plan(request: Request) -> Response:
    site, meant = site_of(request), await _meant(request)
    async with site.checking:
        return HTMLResponse(await _patiently(site, checking.planned, site, meant))


async def _try(request: Request) -> Response:
    site, meant = site_of(request), await _meant(request)
    async with site.checking:
        return HTMLResponse(await _patiently(site, checking.tried, site, meant))


async def _add(request: Request) -> Response:
    site, meant = site_of(request), await _meant(request)
    async with site.checking:
        return JSONResponse(await _patiently(site, checking.added, site, meant))


async def _patiently(site: Site, work: Callable[..., Made], *given: Any) -> Made:
    """The result of a function that waits for another process; a server that is about to end leaves it."""
    task = asyncio.create_task(run_in_threadpool(work, *given))
    while not task.done():
        await asyncio.wait([task], timeout=TICK_SECONDS / 2)
        if site.stopping():
            raise UserError("the server ends", code="in_use")
    return task.result()
