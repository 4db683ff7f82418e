"""A whole page from its parts: one file that needs nothing else, and asks nothing of any network.

The page carries a policy that lets a browser load nothing from outside and run no script but ours.
"""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from string import Template

from daguerre.report.markup import Html, element, join
from daguerre.report.run import when

_HERE = Path(__file__).parent


def whole(title: str, header: Html, body: Html, of: str, styles: tuple[str, ...], script: str = "") -> str:
    """The page; `of` says in the footer what it was written from. `styles` and `script` are names of files here."""
    code = asset(script) if script else ""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    allowed = f"'sha256-{digest}'" if code else "'none'"
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"
    now = when(datetime.now(UTC).isoformat())
    return Template(asset("page.html")).substitute(
        policy=policy,
        title=join(title),
        style="".join(asset(name) for name in styles),
        script=element("script", Html(code)) if code else "",
        header=header,
        body=body,
        footer=join(f"Written by Daguerre {version('daguerre')} on {now} from {of}."),
    )


def asset(name: str) -> str:
    """A file of this folder."""
    return (_HERE / name).read_text(encoding="utf-8")
