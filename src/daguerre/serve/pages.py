"""The frame of every page: the report's style, addresses that are relative, so that a proxy may serve it anywhere."""

from urllib.parse import parse_qs

from daguerre.report.html import Html, element, join

ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect width='16' height='16' "
    "rx='4' fill='%238a5a2b'/%3E%3Cpath d='M3 11l3-4 3 2 4-5' fill='none' stroke='%23fff' stroke-width='1.6'/%3E"
    "%3C/svg%3E"
)


def page(title: str, body: Html, up: str = "", styles: tuple[str, ...] = (), scripts: tuple[str, ...] = ()) -> str:
    """A page; `up` leads from its address to that of the list, `styles` and `scripts` are names of `static.FILES`."""
    sheets = "".join(f'<link rel="stylesheet" href="{up}static/{name}">' for name in ("style.css", *styles))
    modules = "".join(f'<script type="module" src="{up}static/{name}"></script>' for name in scripts)
    # uPlot is no module: it defines a name, before modules run.
    plain = f'<script defer src="{up}static/uplot.min.js"></script>' if "uplot.css" in styles else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<title>{join(title)}</title><link rel="icon" href="{ICON}">{sheets}{plain}{modules}'
        f"</head>\n<body>{body}</body></html>\n"
    )


def up(path: str) -> str:
    """The way from the address of a page to that of the list."""
    return "../" * (path.count("/") - 1)


def message(kicker: str, title: str, text: str, up: str = "") -> str:
    """A page that says one thing."""
    body = join(
        element(
            "header",
            element("p", f"Daguerre · {kicker}", class_="kicker"),
            element("h1", title),
            element("p", text, class_="summary"),
            element("p", element("a", "All runs", href=f"{up or './'}"), class_="note"),
        )
    )
    return page(f"{title} · Daguerre", body, up, ("live.css",))


def login(wrong: bool = False) -> str:
    """The form for the token."""
    said = "This is not the token." if wrong else "Paste the token that daguerre serve printed when it was started."
    form = element(
        "form",
        element("label", "Token", for_="token"),
        element("input", type="password", id="token", name="token", required=True, autocomplete="current-password"),
        element("button", "Log in", type="submit"),
        method="post",
        action="login",
        class_="login",
    )
    body = element(
        "main",
        element("p", "Daguerre", class_="kicker"),
        element("h1", "Log in"),
        element("p", said, class_="summary", role="alert" if wrong else None),
        form,
    )
    return page("Log in · Daguerre", body, "", ("live.css",))


def form_value(body: bytes, name: str) -> str:
    """A value of a form that was sent; "" where it is not there."""
    found = parse_qs(body.decode("utf-8", "replace"), max_num_fields=8)
    return found.get(name, [""])[0].strip()
