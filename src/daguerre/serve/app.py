"""The application: addresses of the pages and of what they fetch, and what answers them.

Addresses hold ids and numbers, no paths. All of them are relative to the page that names them.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from daguerre.errors import UserError
from daguerre.report import page as report
from daguerre.report.facts import STATES
from daguerre.report.run import Run
from daguerre.serve import compare_page, control, downloads, figures, list_page, notes, pages, pictures, run_page
from daguerre.serve.catalog import Catalog, News
from daguerre.serve.gate import LOGIN, Gate, Rules
from daguerre.serve.static import static
from daguerre.serve.summaries import Summary
from daguerre.serve.watched import Parts, Watched, Watching

MOST_STREAMS = 32
"""Open streams of events; the other connections are left for answers."""
MOST_LOGIN_BYTES = 4096
_PATIENCE_SECONDS = 0.7
"""A page waits so long for metrics that are not read yet; then it comes without, and they follow."""
_TICK_SECONDS = 1.0
_QUIET_TICKS = 15
_LIST_SECONDS, _FULL_SECONDS, _LIST_SHARE = 2.0, 10.0, 0.01

_REPORT_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; sandbox allow-scripts"
)

Answer = Callable[[Request], Awaitable[Response]]


@dataclass
class Site:
    """State of the server: the runs, who looks at them, and when they were looked at."""

    catalog: Catalog
    rules: Rules
    stopping: Callable[[], bool] = lambda: False
    """True when the server is about to end: streams end then."""
    streams: int = 0
    watching: Watching = field(init=False)
    settings: list_page.Settings = field(init=False)
    _scanning: asyncio.Lock = field(default_factory=asyncio.Lock)
    _next_scan: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        self.watching = Watching(self.catalog, self._parts)
        self.settings = list_page.Settings(self.catalog)

    def summary(self, id: str) -> Summary | None:
        entry = self.catalog.entries.get(id)
        return entry.summary if entry else None

    def _parts(self, watched: Watched, run: Run) -> Parts:
        self.catalog.refresh(watched.id)
        return run_page.parts(watched, run, self.summary(watched.id), self.catalog.roots)

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


def application(site: Site) -> Starlette:
    """The application of a site."""
    routes: dict[str, Answer] = {
        "/": _list,
        "/events": _list_events,
        "/match": _match,
        "/compare": _compare,
        "/compare.json": _compare_numbers,
        "/run/{id}/": _run,
        "/run/{id}/events": _run_events,
        "/run/{id}/part/{name}": _part,
        "/run/{id}/curves": _curves,
        "/run/{id}/action/{ident}": _answer,
        "/run/{id}/file/{file}": _file,
        "/run/{id}/report": _report,
    }
    for place, find in _PICTURES.items():
        routes[f"/run/{{id}}/{place}"] = _sending(find, pictures.whole)
        routes[f"/run/{{id}}/{place}/small"] = _sending(find, pictures.small)
    found = [Route(path, _answering(answer), methods=["GET"]) for path, answer in routes.items()]
    found += [
        Route("/static/{name}", static),
        Route(LOGIN, _login_page, methods=["GET"]),
        Route(LOGIN, _login, methods=["POST"]),
        Route("/run/{id}/note", _answering(_note), methods=["POST"]),
        Route("/run/{id}/action", _answering(_action), methods=["POST"]),
    ]
    app = Starlette(
        routes=found,
        middleware=[Middleware(Gate, rules=site.rules), Middleware(GZipMiddleware, minimum_size=2000)],
        exception_handlers={404: _nothing},
    )
    app.state.site = site
    return app


def _answering(answer: Answer) -> Answer:
    """The same, with refusals as answers."""

    async def answered(request: Request) -> Response:
        try:
            return await answer(request)
        except UserError as error:
            status = {"missing": 404, "in_use": 409}.get(error.code, 422)
            text = str(error)
        except FileNotFoundError:
            status, text = 404, "this is no longer there"
        if request.headers.get("sec-fetch-mode") == "navigate":
            said = pages.message("not shown", "This cannot be shown", text, pages.up(request.url.path))
            return HTMLResponse(said, status)
        return PlainTextResponse(f"{text}\n", status)

    return answered


async def _nothing(request: Request, error: Exception) -> Response:
    return PlainTextResponse("There is nothing at this address.\n", 404)


def _site(request: Request) -> Site:
    site: Site = request.app.state.site
    return site


async def _watched(request: Request, patience: float = _PATIENCE_SECONDS) -> Watched:
    return await _site(request).watching.look(request.path_params["id"], patience)


async def _list(request: Request) -> Response:
    site = _site(request)
    await site.scan()
    return HTMLResponse(await run_in_threadpool(list_page.render, site.catalog))


async def _match(request: Request) -> Response:
    text = request.query_params.get("q", "")[:500]
    return JSONResponse({"ids": await run_in_threadpool(_site(request).settings.matching, text)})


async def _run(request: Request) -> Response:
    site, watched = _site(request), await _watched(request)
    return HTMLResponse(run_page.render(watched, site.summary(watched.id), site.rules.control))


async def _part(request: Request) -> Response:
    watched, name = await _watched(request), request.path_params["name"]
    if name not in watched.parts:
        raise UserError("the page has no such part", code="missing")
    return HTMLResponse(watched.parts[name] or "", headers={"x-mark": watched.marks[name]})


async def _curves(request: Request) -> Response:
    watched = await _watched(request)
    if watched.run is None:
        return JSONResponse({"version": "", "step": 0, "charts": [], "clock": {}, "metrics": {}})
    after = _after(request, watched)
    return JSONResponse(await run_in_threadpool(figures.document, watched.run, watched.version, after))


def _after(request: Request, watched: Watched) -> float | None:
    """The update after which numbers are asked for; None where all are needed."""
    try:
        after = float(request.query_params.get("after", ""))
    except ValueError:
        return None
    return after if request.query_params.get("version") == watched.version else None


_PICTURES: dict[str, Callable[..., Path]] = {
    "image/{step:int}/{number:int}": pictures.of_save,
    "asked/{number:int}": pictures.of_asked,
    "strength/{number:int}": pictures.of_strengths,
}
"""What finds the file of a picture, by the address below the run's."""


def _sending(find: Callable[..., Path], made: Callable[[Path], tuple[bytes, str]]) -> Answer:
    """Sends pictures that `find` finds by the numbers in their address."""

    async def sent(request: Request) -> Response:
        numbers = {name: number for name, number in request.path_params.items() if name != "id"}

        def work() -> tuple[bytes, str]:
            return made(find(_folder(request), _site(request).catalog.roots, **numbers))

        data, kind = await run_in_threadpool(work)
        # An image of a save may be written again by a run that went back: asked for anew after a while.
        return Response(data, media_type=kind, headers={"cache-control": "private, max-age=300"})

    return sent


def _folder(request: Request) -> Path:
    """The folder of the run that is asked for. UserError for no run, and for one that must not be shown."""
    folder = _site(request).catalog.at(request.path_params["id"])
    if folder is None:
        raise UserError("there is no such run", code="missing")
    return folder


async def _file(request: Request) -> Response:
    site = _site(request)

    def find() -> downloads.Item:
        folder = _folder(request)
        for one in downloads.items(folder, site.catalog.roots):
            if one.id == request.path_params["file"]:
                return one
        raise UserError("there is no such file: a newer one may have taken its place", code="missing")

    item = await run_in_threadpool(find)
    name = item.name.replace("/", "-") + ".tar" * item.is_folder
    headers = {"content-disposition": f'attachment; filename="{name}"', "content-encoding": "identity"}
    if not item.is_folder:
        headers["content-length"] = str(item.size_bytes)
    sent = downloads.tar(item, site.catalog.roots) if item.is_folder else downloads.content(item)
    return StreamingResponse(sent, media_type="application/octet-stream", headers=headers)


async def _report(request: Request) -> Response:
    watched = await _watched(request, 600.0)
    text = await run_in_threadpool(report.render, watched.folder, watched.followed.curves)
    # Made here, of data alone. Its policy stands in it; with the one of the live pages it would have no style.
    return HTMLResponse(text, headers={"content-security-policy": _REPORT_POLICY})


async def _chosen(request: Request) -> list[compare_page.Chosen]:
    site = _site(request)
    ids = list(dict.fromkeys(request.query_params.getlist("run")))[: compare_page.MOST]
    if not ids:
        raise UserError("choose the runs to compare in the list", code="missing")
    found = []
    for id in ids:
        watched = await site.watching.look(id, 600.0)
        summary = site.summary(id)
        if watched.run is not None:
            name = summary.name if summary else watched.run.name
            found.append(compare_page.Chosen(id, name, watched.run))
    return found


async def _compare(request: Request) -> Response:
    return HTMLResponse(await run_in_threadpool(compare_page.render, await _chosen(request)))


async def _compare_numbers(request: Request) -> Response:
    return JSONResponse(await run_in_threadpool(compare_page.document, await _chosen(request)))


async def _note(request: Request) -> Response:
    site = _site(request)
    folder = await run_in_threadpool(_folder, request)
    given = await _body(request, notes.MOST_BYTES)
    await run_in_threadpool(notes.write, folder, given)
    await run_in_threadpool(site.catalog.refresh, request.path_params["id"])
    return JSONResponse({})


async def _action(request: Request) -> Response:
    folder = await run_in_threadpool(_folder, request)
    given = await _body(request, control.MOST_BYTES)
    return JSONResponse({"id": await run_in_threadpool(control.ask, folder, given)})


async def _answer(request: Request) -> Response:
    folder = await run_in_threadpool(_folder, request)
    return JSONResponse(await run_in_threadpool(control.answer, folder, request.path_params["ident"]))


async def _body(request: Request, most: int) -> bytes:
    """The body of a request, if it is no longer than it may be. UserError."""
    found = b""
    async for chunk in request.stream():
        found += chunk
        if len(found) > most:
            raise UserError(f"more than {most:,} bytes were sent")
    return found


async def _login_page(request: Request) -> Response:
    return HTMLResponse(pages.login())


async def _login(request: Request) -> Response:
    rules = _site(request).rules
    try:
        body = await _body(request, MOST_LOGIN_BYTES)
    except UserError as error:
        return PlainTextResponse(f"{error}\n", 413, headers={"connection": "close"})
    given = pages.form_value(body, "token")
    if not rules.token or not rules.is_token(given):
        await asyncio.sleep(0.5)
        return HTMLResponse(pages.login(wrong=True), 403)
    response = Response(status_code=303, headers={"location": "./"})
    response.set_cookie(
        rules.cookie_name(request.scope),
        rules.pass_,
        max_age=30 * 86400,
        httponly=True,
        samesite="strict",
        secure=rules.secure,
    )
    return response


def _event(document: object) -> str:
    return f"data: {json.dumps(document)}\n\n"


def _stream(site: Site, events: AsyncIterator[str]) -> Response:
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


async def _list_events(request: Request) -> Response:
    site = _site(request)

    async def events() -> AsyncIterator[str]:
        news, quiet = News(site.catalog), 0
        yield ": open\n\n"
        while not site.stopping():
            await asyncio.sleep(_TICK_SECONDS)
            await site.scan()
            quiet += 1
            if changed := news.take():
                quiet = 0
                yield _event({id: list_page.row(entry) if entry else None for id, entry in changed.items()})
            elif quiet % _QUIET_TICKS == 0:
                yield ": quiet\n\n"

    return _stream(site, events())


async def _run_events(request: Request) -> Response:
    site, id = _site(request), request.path_params["id"]
    await _watched(request)

    async def events() -> AsyncIterator[str]:
        last, quiet = None, 0
        while not site.stopping():
            try:
                watched = await site.watching.look(id)
            except UserError as error:
                yield _event({"gone": str(error)})
                return
            now = _standing(site, watched)
            quiet = 0 if now != last else quiet + 1
            if now != last:
                yield _event(now)
            elif quiet % _QUIET_TICKS == 0:
                yield ": quiet\n\n"
            last = now
            await asyncio.sleep(_TICK_SECONDS)

    return _stream(site, events())


def _standing(site: Site, watched: Watched) -> dict[str, Any]:
    """State of a run in short: a page sees by it what to fetch."""
    run, summary = watched.run, site.summary(watched.id)
    state = run.state if run else "unknown"
    return {
        "state": state,
        "words": STATES.get(state, state),
        "name": summary.name if summary else watched.folder.name,
        "reason": summary.reason if summary else "",
        "done": summary.step / summary.total if summary and summary.total else None,
        "version": watched.version,
        "step": watched.followed.curves.step,
        "read": round(watched.share_read, 2) if not watched.complete else None,
        "parts": watched.marks,
    }
