"""Show runs in a browser: live curves, samples, comparisons.

usage: daguerre serve [FOLDER | ADDRESS] [--control] [--port N] [--host HOST] [--allow-host NAME] [--root DIR] [--open]

Serves a page about all runs in FOLDER (default: runs), or below an address of a store, those that train now among
them, until Ctrl-C. It only reads, and only this machine reaches it.

  daguerre serve                         the runs in ./runs, at http://127.0.0.1:8800
  daguerre serve /data/runs --open       another folder; opens the browser
  daguerre serve s3://bucket/runs        the runs in a bucket, those on other machines too
  ssh -L 8800:127.0.0.1:8800 machine     on your own machine: the page of another one

  --control             start runs and put them into the queue, whose runs this page starts one after the other; ask
                        runs to save, sample, evaluate, pause and stop; name them, note on them, put them away; change
                        captions, leave pictures out, send some
  --port N              another port than 8800; 0 takes a free one
  --host HOST           beyond this machine, such as 0.0.0.0: the page then asks for a token, that of the variable
                        DAGUERRE_SERVE_TOKEN, or one that is printed at the start
  --allow-host NAME     a name by which the page is called, such as that of a proxy; repeatable
  --root DIR            a further folder: its pictures are shown, links in FOLDER may lead there, and runs that are
                        started on the page may read there; also the address of a store, for such runs; repeatable
  --queue DIR           another queue than ~/.local/state/daguerre/queue (daguerre queue --help)
  --cert FILE --key FILE    serve by TLS

docs/serve.md has more.
"""

import ipaddress
import os
import secrets
import webbrowser
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from daguerre.checkpoint.atomic import make_folder
from daguerre.errors import UserError
from daguerre.queue.queue import Queue, usual_folder
from daguerre.queue.runner import Runner, devices_of_this_machine
from daguerre.remote.copies import Copies
from daguerre.serve import server
from daguerre.serve.catalog import Catalog
from daguerre.serve.gate import Rules
from daguerre.serve.site import Site
from daguerre.storage.address import is_remote
from daguerre.storage.bucket import prefix
from daguerre.threads import background

TOKEN = "DAGUERRE_SERVE_TOKEN"
_USUAL = "runs"
_LEAST_TOKEN = 16
_VALUES = ("--port", "--host", "--allow-host", "--root", "--queue", "--cert", "--key")
_SWITCHES = ("--control", "--open")


@dataclass(frozen=True)
class Given:
    """The words of a command."""

    name: str
    """The folder, as it was written."""
    values: dict[str, list[str]]
    switches: frozenset[str]

    @property
    def folder(self) -> Path:
        return Path(self.name).expanduser()

    def value(self, name: str, default: str) -> str:
        """The one value of an option. UserError if it is given twice."""
        found = self.values.get(name, [default])
        if len(found) > 1:
            raise UserError(f"{name} is given twice: {', '.join(found)}", code="conflict")
        return found[0]


def run(arguments: list[str]) -> int:
    """Exit code 0, after Ctrl-C; UserError for a folder that is not there, or a port that is taken."""
    given = read(arguments)
    copies, listed = _copies(given), given.values.get("--root", [])
    folder = copies.folder if copies else _folder(given)
    roots = (folder, *(_root(text) for text in listed if not is_remote(text)))
    host, (cert, key) = given.value("--host", "127.0.0.1"), _tls(given)
    token = "" if is_loopback(host) else os.environ.get(TOKEN, "") or secrets.token_urlsafe(24)
    if token and len(token) < _LEAST_TOKEN:
        raise UserError(f"{TOKEN} has {len(token)} characters: give it {_LEAST_TOKEN} or more, that nobody can guess")
    names = frozenset(name.lower() for name in given.values.get("--allow-host", []))
    rules = Rules(names, token, "--control" in given.switches, secure=bool(cert))
    queue = Queue(Path(given.value("--queue", str(usual_folder()))).expanduser().absolute())
    bounds = (*map(str, roots), *filter(is_remote, listed))
    site = Site(Catalog(folder, roots, copies), rules, queue, bounds)
    with server.listening(host, _port(given)) as (socket, port):
        address = f"http{'s' * bool(cert)}://{f'[{host}]' if ':' in host else host}:{port}/"
        print(f"runs in {copies.at.name if copies else folder}: {address}")
        if token and not os.environ.get(TOKEN):
            print(f"token: {token}")
        print("Ctrl-C ends the page, and no run.", flush=True)
        if "--open" in given.switches:
            webbrowser.open(address)
        with _beside(site):
            server.serve(site, socket, cert, key)
    return 0


def _beside(site: Site) -> AbstractContextManager[None]:
    """Helpers of a page while it is served: copies of runs in a store are kept up to date, and the queue is run."""
    if site.catalog.copies:
        return background("copies", site.catalog.copies.keep)
    if site.rules.control:
        return background("queue", Runner(site.queue, devices_of_this_machine()).keep_running)
    return nullcontext()


def _folder(given: Given) -> Path:
    folder = given.folder.resolve()
    if given.name == _USUAL and "--control" in given.switches:
        make_folder(folder)  # of who begins with the page
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {given.folder}: give the folder that holds your runs, or start with --control, which "
            f"makes {_USUAL}",
            code="missing",
        )
    return folder


def _copies(given: Given) -> Copies | None:
    """The runs of an address; None for a folder. UserError for a store that cannot be read."""
    if not is_remote(given.name):
        return None
    found = Copies(prefix(given.name))
    if unused := [name for name in ("--root", "--queue") if name in given.values]:
        raise UserError(
            f"{' and '.join(unused)}: the page of a store shows its runs and starts none. Serve a folder of this "
            "machine to start runs; they may write to the store by output_dir",
            code="unused",
        )
    found.check()
    return found


def read(arguments: Sequence[str]) -> Given:
    """The words of a command, sorted. UserError."""
    folders: list[str] = []
    values: dict[str, list[str]] = {}
    switches: set[str] = set()
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word in _SWITCHES:
            switches.add(word)
        elif name in _VALUES:
            if not equals and not words:
                raise UserError(f"{word} needs a value: see daguerre serve --help", code="missing")
            values.setdefault(name, []).append(value if equals else words.pop(0))
        elif word.startswith("-"):
            allowed = ", ".join((*_SWITCHES, *_VALUES))
            raise UserError(f"there is no option {word}: there are {allowed}", code="unknown")
        else:
            folders.append(word)
    if len(folders) > 1:
        raise UserError(f"`daguerre serve` takes one folder or address; you gave {', '.join(folders)}", code="conflict")
    return Given((folders or [_USUAL])[0], values, frozenset(switches))


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _root(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_dir():
        raise UserError(f"--root: there is no folder {text}", code="missing")
    return path.resolve()


def _port(given: Given) -> int:
    text = given.value("--port", "8800")
    if not text.isdecimal() or int(text) > 65535:
        raise UserError(f"--port takes a number up to 65535, you gave {text}")
    return int(text)


def _tls(given: Given) -> tuple[str, str]:
    found = given.value("--cert", ""), given.value("--key", "")
    if any(found) and not all(found):
        raise UserError("--cert and --key belong together: give both files", code="missing")
    for path in filter(None, found):
        if not Path(path).is_file():
            raise UserError(f"there is no file {path}", code="missing")
    return found
