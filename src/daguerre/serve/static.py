"""The files of the pages themselves, in memory: they are few, and nothing else is served by a name."""

from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

_HERE = Path(__file__).parent / "static"
_REPORT = Path(__file__).parent.parent / "report"
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".LICENSE": "text/plain"}

FILES = {
    path.name: path.read_bytes()
    for path in (*sorted(_HERE.iterdir()), _REPORT / "style.css", _REPORT / "data.css", _REPORT / "hover.js")
    if path.suffix in _TYPES
}
_MARKS = {name: f'"{sha256(data).hexdigest()[:16]}"' for name, data in FILES.items()}


async def static(request: Request) -> Response:
    """One of the files."""
    name = request.path_params["name"]
    if name not in FILES:
        return PlainTextResponse("There is no such file.\n", 404)
    headers = {"etag": _MARKS[name], "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == _MARKS[name]:
        return Response(status_code=304, headers=headers)
    return Response(FILES[name], headers=headers, media_type=_TYPES[Path(name).suffix])
