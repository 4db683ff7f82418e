"""Addresses of the pages about pictures, and what answers them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from daguerre.checkpoint.atomic import locked
from daguerre.errors import UserError
from daguerre.serve import pictures
from daguerre.serve.bounds import OutOfBounds, check_file, within
from daguerre.serve.dataset import captions, jobs, moves, page, reading, uploads
from daguerre.serve.dataset.folders import Folders, Place
from daguerre.serve.dataset.listing import Listing, Shelf
from daguerre.serve.dataset.page import Question
from daguerre.serve.dataset.reading import Reader, Reading
from daguerre.serve.site import Answer, Site, answering, body_of, site_of


@dataclass
class Desk:
    """State of the server about pictures."""

    roots: tuple[Path, ...]
    folders: Folders = field(init=False)
    shelf: Shelf = field(init=False)
    commands: jobs.Jobs = field(init=False)
    uploads: int = 0
    """Files that are being received."""

    def __post_init__(self) -> None:
        self.folders, self.shelf = Folders(self.roots), Shelf(self.roots)
        self.commands = jobs.Jobs(self.roots)


def routes() -> list[Route]:
    """Those below /data/."""
    get: dict[str, Answer] = {
        "/": _index,
        "/{id}/": _folder,
        "/{id}/shown": _shown,
        "/{id}/job": _job,
        "/{id}/caption/{picture}": _caption,
        "/{id}/cover/{number:int}": _sending(_cover, pictures.small),
        "/{id}/picture/{picture}": _sending(_picture, pictures.whole),
        "/{id}/picture/{picture}/small": _sending(_picture, pictures.small),
        "/{id}/picture/{picture}/beside/{number:int}": _sending(_picture, pictures.whole),
    }
    post: dict[str, Answer] = {"/new": _new, "/{id}/edit": _edit, "/{id}/move": _move, "/{id}/job": _ask}
    found = [Route(f"/data{path}", answering(answer), methods=["GET"]) for path, answer in get.items()]
    found += [Route(f"/data{path}", answering(answer), methods=["POST"]) for path, answer in post.items()]
    return [*found, Route("/data/{id}/upload", answering(_upload), methods=["PUT"])]


def _desk(request: Request) -> Desk:
    desk: Desk = request.app.state.desk
    return desk


async def _readers(request: Request, place: Place) -> list[Reader]:
    site = site_of(request)
    await site.scan()
    return await run_in_threadpool(reading.readers, place, site.catalog)


def _place(request: Request) -> Place:
    return _desk(request).folders.at(request.path_params["id"])


async def _index(request: Request) -> Response:
    desk, control = _desk(request), site_of(request).rules.control
    places = await run_in_threadpool(desk.folders.listed)
    return HTMLResponse(page.index(places, desk.roots, control))


async def _folder(request: Request) -> Response:
    place = await run_in_threadpool(_place, request)
    readers = await _readers(request, place)
    return HTMLResponse(page.folder(place, readers, _desk(request).roots, site_of(request).rules.control))


async def _way(request: Request, place: Place) -> Reading:
    """The way in which the folder is read. UserError."""
    query = request.query_params
    if not (wanted := query.get("as", "")):
        return reading.of_form(place, query)
    for each in await _readers(request, place):
        if each.id == wanted:
            return each.reading
    raise UserError("there is no such run that reads this folder", code="missing")


async def _shown(request: Request) -> Response:
    place = await run_in_threadpool(_place, request)
    way = await _way(request, place)
    query = request.query_params
    number, show = query.get("page", "0"), query.get("show", "all")
    if not number.isdecimal() or len(number) > 6 or show not in page.SHOWN:
        raise UserError("there is no such page of pictures", code="missing")
    question = Question(query.get("q", "")[:500], show, int(number))

    def work() -> dict[str, Any]:
        return page.answer(_desk(request).shelf.listing(place, way), way, question, site_of(request).rules.control)

    return JSONResponse(await run_in_threadpool(work))


async def _caption(request: Request) -> Response:
    """The caption of a picture as it is written, and whether the page can write it."""
    place = await run_in_threadpool(_place, request)
    way = await _way(request, place)

    def work() -> dict[str, Any]:
        desk = _desk(request)
        listing = desk.shelf.listing(place, way)
        picture = listing.picture(request.path_params["picture"])
        beside = [*picture.images]
        try:
            found = captions.found(listing, picture)
        except UserError as error:
            return {"text": picture.caption, "refused": str(error), "beside": beside}
        return {"text": found.text, "refused": "", "beside": beside}

    return JSONResponse(await run_in_threadpool(work))


def _sending(find: Callable[[Request], Path], made: Callable[[Path], tuple[bytes, str]]) -> Answer:
    """Sends pictures that `find` finds."""

    async def sent(request: Request) -> Response:
        def work() -> tuple[bytes, str]:
            path, roots = find(request), _desk(request).roots
            check_file(path, roots, pictures.MOST_PICTURE_BYTES)
            if not within(path, roots):
                raise OutOfBounds(f"{path.name} lies outside the folders that this page may show")
            return made(path)

        data, kind = await run_in_threadpool(work)
        return Response(data, media_type=kind, headers={"cache-control": "private, max-age=300"})

    return sent


def _cover(request: Request) -> Path:
    place, number = _place(request), request.path_params["number"]
    if number >= len(place.covers):
        raise UserError("there is no such picture", code="missing")
    return place.path / place.covers[number]


def _picture(request: Request) -> Path:
    """By the listing as the page saw it, whichever way it was read: the pictures are the same."""
    place, shelf = _place(request), _desk(request).shelf
    listing = shelf.kept(place, request.path_params["picture"])
    listing = listing or shelf.listing(place, reading.of_form(place, {}))
    return listing.file(listing.picture(request.path_params["picture"]), request.path_params.get("number"))


async def _new(request: Request) -> Response:
    given = await body_of(request, jobs.MOST_BYTES)
    place = await run_in_threadpool(uploads.new_folder, _desk(request).folders, given)
    return JSONResponse({"id": place.id})


async def _upload(request: Request) -> Response:
    place = await run_in_threadpool(_place, request)
    desk = _desk(request)
    if desk.uploads >= uploads.MOST_AT_ONCE:
        raise UserError("other files are being sent: send this one again when they are there", code="in_use")
    desk.uploads += 1
    try:
        uploads.check_room(place, request.headers.get("content-length"))
        data = await uploads.received(request.stream())
        kept = await run_in_threadpool(uploads.keep, place, request.query_params.get("name", ""), data)
    finally:
        desk.uploads -= 1
    return JSONResponse(kept)


async def _edit(request: Request) -> Response:
    return await _changing(request, captions.MOST_BYTES, captions.edit)


async def _move(request: Request) -> Response:
    return await _changing(request, moves.MOST_BYTES, moves.move)


async def _changing(request: Request, most: int, change: Callable[[Listing, bytes], dict[str, Any]]) -> Response:
    """Changes a folder, one at a time among all pages, and names the runs that read it and may go on."""
    place = await run_in_threadpool(_place, request)
    way = await _way(request, place)
    given, desk = await body_of(request, most), _desk(request)

    def work() -> dict[str, Any]:
        try:
            with locked(place.path):
                return change(desk.shelf.listing(place, way), given)
        except PermissionError as error:
            raise UserError(f"{place.path.name} cannot be changed: {error.strerror}") from error

    found = await run_in_threadpool(work)
    runs = [each.name for each in await _readers(request, place) if each.may_go_on]
    return JSONResponse({**found, "runs": runs})


async def _job(request: Request) -> Response:
    place = await run_in_threadpool(_place, request)
    return JSONResponse(await run_in_threadpool(_desk(request).commands.state, place))


async def _ask(request: Request) -> Response:
    place = await run_in_threadpool(_place, request)
    given = await body_of(request, jobs.MOST_BYTES)
    return JSONResponse(await run_in_threadpool(_desk(request).commands.ask, place, given))


def desk_of(site: Site) -> Desk:
    """A desk for a server."""
    return Desk(site.catalog.roots)
