"""The application: addresses of the pages and of what they fetch, and what answers them.

Addresses hold ids and numbers, no paths. All of them are relative to the page that names them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
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
from daguerre.serve import compare_page, control, downloads, figures, list_page, notes, pages, pictures, run_page
from daguerre.serve.catalog import News
from daguerre.serve.dataset import addresses as of_pictures
from daguerre.serve.gate import LOGIN, Gate
from daguerre.serve.queueing import addresses as of_queue
from daguerre.serve.site import (
    QUIET_TICKS,
    TICK_SECONDS,
    Answer,
    Site,
    answering,
    body_of,
    event,
    folder_of,
    site_of,
    stream,
)
from daguerre.serve.static import static
from daguerre.serve.watched import Watched

MOST_LOGIN_BYTES = 4096
_REPORT_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; sandbox allow-scripts"
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
    found = [Route(path, answering(answer), methods=["GET"]) for path, answer in routes.items()]
    found += [
        Route("/static/{name}", static),
        Route(LOGIN, _login_page, methods=["GET"]),
        Route(LOGIN, _login, methods=["POST"]),
        Route("/run/{id}/note", answering(_note), methods=["POST"]),
        Route("/run/{id}/action", answering(_action), methods=["POST"]),
    ]
    app = Starlette(
        routes=[*found, *(of_queue.routes() + of_pictures.routes() if site.starts else ())],
        middleware=[Middleware(Gate, rules=site.rules), Middleware(GZipMiddleware, minimum_size=2000)],
        exception_handlers={404: _nothing},
    )
    app.state.site, app.state.desk = site, of_pictures.desk_of(site)
    return app


async def _nothing(request: Request, error: Exception) -> Response:
    return PlainTextResponse("There is nothing at this address.\n", 404)


async def _watched(request: Request, patience: float | None = None) -> Watched:
    site = site_of(request)
    wait = site.patience_seconds if patience is None else patience
    return await site.watching.look(request.path_params["id"], wait)


async def _list(request: Request) -> Response:
    site = site_of(request)
    await site.scan()
    return HTMLResponse(await run_in_threadpool(list_page.render, site.catalog, site.rules.control))


async def _match(request: Request) -> Response:
    text = request.query_params.get("q", "")[:500]
    return JSONResponse({"ids": await run_in_threadpool(site_of(request).settings.matching, text)})


async def _run(request: Request) -> Response:
    site, watched = site_of(request), await _watched(request)
    return HTMLResponse(run_page.render(watched, site.summary(watched.id), site.rules.control, site.starts))


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
            catalog = site_of(request).catalog
            path = find(folder_of(request), catalog.roots, **numbers)
            if catalog.copies:
                catalog.copies.bring(path)
            pictures.check(path, catalog.roots)
            return made(path)

        data, kind = await run_in_threadpool(work)
        # An image of a save may be written again by a run that went back: asked for anew after a while.
        return Response(data, media_type=kind, headers={"cache-control": "private, max-age=300"})

    return sent


async def _file(request: Request) -> Response:
    site = site_of(request)

    def find() -> downloads.Item:
        folder = folder_of(request)
        for one in downloads.items(folder, site.catalog):
            if one.id == request.path_params["file"]:
                return one
        raise UserError("there is no such file: a newer one may have taken its place", code="missing")

    item = await run_in_threadpool(find)
    name = item.name.replace("/", "-") + ".tar" * item.is_folder
    headers = {"content-disposition": f'attachment; filename="{name}"', "content-encoding": "identity"}
    if not item.is_folder:
        headers["content-length"] = str(item.size_bytes)
    return StreamingResponse(item.sent(), media_type="application/octet-stream", headers=headers)


async def _report(request: Request) -> Response:
    watched, copies = await _watched(request, 600.0), site_of(request).catalog.copies
    if copies:
        await run_in_threadpool(copies.bring, watched.folder)
    text = await run_in_threadpool(report.render, watched.folder, watched.followed.curves)
    # Made here, of data alone. Its policy stands in it; with the one of the live pages it would have no style.
    return HTMLResponse(text, headers={"content-security-policy": _REPORT_POLICY})


async def _chosen(request: Request) -> list[compare_page.Chosen]:
    site = site_of(request)
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
    site = site_of(request)
    folder = await run_in_threadpool(folder_of, request)
    given = await body_of(request, notes.MOST_BYTES)
    await run_in_threadpool(notes.write, folder, given, site.catalog.copies)
    await run_in_threadpool(site.catalog.refresh, request.path_params["id"])
    return JSONResponse({})


async def _action(request: Request) -> Response:
    folder = await run_in_threadpool(folder_of, request)
    given = await body_of(request, control.MOST_BYTES)
    run = site_of(request).catalog.address(folder)
    return JSONResponse({"id": await run_in_threadpool(control.ask, run, given)})


async def _answer(request: Request) -> Response:
    folder = await run_in_threadpool(folder_of, request)
    run = site_of(request).catalog.address(folder)
    return JSONResponse(await run_in_threadpool(control.answer, run, request.path_params["ident"]))


async def _login_page(request: Request) -> Response:
    return HTMLResponse(pages.login())


async def _login(request: Request) -> Response:
    rules = site_of(request).rules
    try:
        body = await body_of(request, MOST_LOGIN_BYTES)
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


async def _list_events(request: Request) -> Response:
    site = site_of(request)

    async def events() -> AsyncIterator[str]:
        news, quiet, problem = News(site.catalog), 0, site.catalog.problem()
        yield ": open\n\n"
        while not site.stopping():
            await asyncio.sleep(TICK_SECONDS)
            await site.scan()
            quiet += 1
            rows = {id: list_page.row(entry) if entry else None for id, entry in news.take().items()}
            if rows or problem != site.catalog.problem():
                quiet, problem = 0, site.catalog.problem()
                yield event({"rows": rows, "problem": problem})
            elif quiet % QUIET_TICKS == 0:
                yield ": quiet\n\n"

    return stream(site, events())


async def _run_events(request: Request) -> Response:
    site, id = site_of(request), request.path_params["id"]
    await _watched(request)

    async def events() -> AsyncIterator[str]:
        last, quiet = None, 0
        while not site.stopping():
            try:
                watched = await site.watching.look(id)
            except UserError as error:
                yield event({"gone": str(error)})
                return
            now = _standing(site, watched)
            quiet = 0 if now != last else quiet + 1
            if now != last:
                yield event(now)
            elif quiet % QUIET_TICKS == 0:
                yield ": quiet\n\n"
            last = now
            await asyncio.sleep(TICK_SECONDS)

    return stream(site, events())


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
