"""The gate that every request passes: whose name the page is called by, who asks, and what a browser may do with it.

A page of this machine can be reached by every page that its user opens: by a name that is made to mean 127.0.0.1 (DNS
rebinding), by forms and images of other sites. So the name in `Host` is checked, other sites get nothing, and a change
needs its own page's header and origin.
"""

import hmac
import ipaddress
from dataclasses import dataclass
from hashlib import sha256

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from daguerre.serve.pages import up

LOGIN = "/login"
CHANGE = "x-daguerre"
"""Header of a change. Forms of other sites cannot send one, and their scripts are not let through."""
_OPEN = (LOGIN, "/static/style.css", "/static/live.css")
"""Shown without a token: the form, and its style."""
POLICY = (
    # Attributes `style` are ours: all text of a run is escaped. They set the lengths of bars.
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # without any, browsers send forms with the origin "null"
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Rules:
    """Rules of who may come in."""

    hosts: frozenset[str] = frozenset()
    """Names by which the page may be called, next to `localhost` and addresses of numbers."""
    token: str = ""
    """Who has it may come in; empty where everybody may who reaches the port: on this machine alone."""
    control: bool = False
    """True if the page may change something."""
    secure: bool = False
    """True if it is served by TLS."""

    @property
    def pass_(self) -> str:
        """The value of the cookie: of the token, which it does not tell."""
        return hmac.new(self.token.encode(), b"daguerre serve", sha256).hexdigest()

    def is_token(self, text: str) -> bool:
        """True for the token, in the same time for every text."""
        return hmac.compare_digest(sha256(text.encode()).digest(), sha256(self.token.encode()).digest())

    def calls(self, host: str) -> bool:
        """True for a `Host` that nobody can have made to mean this machine."""
        name = _name(host)
        if name == "localhost" or name in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True  # numbers are looked up nowhere

    def cookie_name(self, scope: Scope) -> str:
        """By the port: browsers share cookies among the ports of a name."""
        return f"daguerre-{(scope.get('server') or ('', 0))[1]}"


class Gate:
    """The application behind its rules."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self.app, self.rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    own.setdefault(name, value)
            await send(message)

        refusal = self.refusal(scope, headers)
        await (refusal or self.app)(scope, receive, guarded)

    def refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """The answer to a request that does not get in."""
        rules, path, method = self.rules, str(scope["path"]), scope["method"]
        host = headers.get("host", "")
        if not rules.calls(host):
            return _no(421, "This page is not called by this name: start it with --allow-host NAME to let it be.")
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return _no(403, "Another site asked for this.")
        if rules.token and path not in _OPEN:
            cookie = cookie_parser(headers.get("cookie", "")).get(rules.cookie_name(scope), "")
            if not hmac.compare_digest(cookie.encode(), rules.pass_.encode()):
                is_page = headers.get("sec-fetch-mode", "navigate") == "navigate" and method == "GET"
                return RedirectResponse(f"{up(path)}login", 303) if is_page else _no(401, "Log in first.")
        if method in ("GET", "HEAD"):
            return None
        if not self._is_own(headers.get("origin", ""), host):
            return _no(403, "Another site asked for this change.")
        if path == LOGIN:
            return None
        if not rules.control:
            return _no(403, "This page is read-only: start it with --control to change something.")
        return None if headers.get(CHANGE) else _no(403, f"A change needs the header {CHANGE}.")

    def _is_own(self, origin: str, host: str) -> bool:
        """True for an origin that is this page's: as it is called here, or by a name that is allowed for a proxy."""
        scheme, _, authority = origin.partition("://")
        return scheme in ("http", "https") and (authority == host or _name(authority) in self.rules.hosts)


def _name(host: str) -> str:
    """The name in `NAME:PORT`, also of a number in brackets."""
    before, _, last = host.rpartition(":")
    return (before if before and last.isdecimal() else host).strip("[]").lower()


def _no(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status)
