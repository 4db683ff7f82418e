"""The forms of the pages about pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from daguerre.report.html import Html, element, join
from daguerre.serve.dataset import jobs
from daguerre.serve.dataset.folders import Place
from daguerre.unicode import printable

_ACCEPT = ".jpg,.jpeg,.png,.webp,.txt"
_USUAL_BASE = "sdxl_lora"
"""Recipe of a run that is started without a recipe of the pictures; the form of the run has all others."""


def tools(control: bool, shown: Mapping[str, str]) -> Html:
    """The filter, and the buttons for what is chosen."""
    options = (element("option", text, value=name) for name, text in shown.items())
    row = element(
        "div",
        element(
            "input", type="search", id="filter", placeholder="words of captions or names", aria_label="Find pictures"
        ),
        element("label", "Show ", element("select", *options, id="show")),
        element("span", class_="note", id="count", role="status"),
        class_="tools",
    )
    return join(row, element("div", *_chosen(), class_="tools", id="chosen"), _many()) if control else row


def _chosen() -> list[Html]:
    def button(text: str, to: str, title: str) -> Html:
        return element("button", text, type="button", data_to=to, title=title, disabled=True)

    return [
        element("label", element("input", type="checkbox", id="every"), " all of this page"),
        button("Leave out", "left_out", "training does not read them; they can be restored"),
        button("To the trash", "trash", "the same; nothing is deleted"),
        button("Restore", "back", "back to where they were"),
        element("button", "Change captions ...", type="button", id="change"),
    ]


def _many() -> Html:
    """The form that changes many captions."""
    kinds = {
        "replace": "find and replace a text",
        "add": "add a tag",
        "remove": "remove a tag",
        "move": "move a tag",
    }
    places = {"first": "to the front", "up": "one up", "down": "one down", "last": "to the end"}
    form = element(
        "form",
        element("h2", "Change captions"),
        element("p", class_="note", id="of-which"),
        element("label", "What", for_="m-kind"),
        element("select", *(element("option", t, value=k) for k, t in kinds.items()), id="m-kind", name="kind"),
        element(
            "div",
            element("label", "Find", for_="m-find"),
            element("input", id="m-find", name="find", maxlength=1000, autocomplete="off"),
            element("label", "Replace by", for_="m-by"),
            element("input", id="m-by", name="by", maxlength=1000, autocomplete="off"),
            element("label", element("input", type="checkbox", name="any_case"), " ignore capitals"),
            data_for="replace",
        ),
        element(
            "div",
            element("label", "Tag (a part between commas)", for_="m-tag"),
            element("input", id="m-tag", name="tag", maxlength=200, autocomplete="off"),
            data_for="add remove move",
        ),
        element(
            "div",
            element("label", "Where", for_="m-to"),
            element("select", *(element("option", t, value=k) for k, t in places.items()), id="m-to", name="to"),
            data_for="add move",
        ),
        element("div", class_="preview", id="preview", role="status"),
        element("p", class_="wrong", role="alert"),
        element(
            "div",
            element("button", "Cancel", type="button", class_="cancel"),
            element("button", "Change", type="submit", disabled=True),
            class_="buttons",
        ),
    )
    return element("dialog", form, id="many", aria_label="Change captions")


def viewer(control: bool) -> Html:
    """One picture at full size, with its caption."""
    box = element("textarea", id="v-text", rows=4, maxlength=20_000, readonly=not control)
    save = element("button", "Save", type="submit") if control else None
    form = element(
        "form",
        element("label", "Caption", for_="v-text"),
        box,
        element("p", class_="wrong", role="alert"),
        element(
            "div",
            element("button", "Previous", type="button", id="v-before"),
            element("button", "Next", type="button", id="v-after"),
            element("span", class_="note", id="v-said", role="status"),
            element("button", "Close", type="button", class_="cancel"),
            save,
            class_="buttons",
        ),
    )
    return element(
        "dialog",
        element("h2", id="v-name"),
        element("div", class_="cut", id="v-cut"),
        element("div", id="v-beside"),
        element("p", class_="note", id="v-about"),
        form,
        id="viewer",
        aria_labelledby="v-name",
    )


def drop(text: str) -> Html:
    """A place for files."""
    return element(
        "div",
        element("p", text),
        element("input", type="file", id="files", multiple=True, accept=_ACCEPT, aria_label="Choose files"),
        element("progress", value=0, max=1, hidden=True, id="sent", aria_label="files sent"),
        element("p", class_="note", id="sent-text", role="status"),
        element("ul", class_="wrong", id="refused", role="alert"),
        class_="drop",
        id="drop",
    )


def new_folder(roots: Sequence[Path]) -> Html:
    """The form for pictures of one's own."""
    usual = min(1, len(roots) - 1)  # the first is that of the runs
    options = (element("option", printable(str(root)), value=i, selected=i == usual) for i, root in enumerate(roots))
    return element(
        "section",
        element("h2", "Pictures of your own"),
        element(
            "form",
            element("label", "Name of the folder", for_="new-name"),
            element("input", id="new-name", name="name", maxlength=100, required=True, placeholder="my_dog"),
            element("label", "below", for_="new-root"),
            element("select", *options, id="new-root", name="root"),
            drop(
                "Drop pictures here (JPEG, PNG, WebP), with captions as NAME.txt where you have some, or choose them:"
            ),
            class_="new",
            id="new",
        ),
        class_="own",
    )


def more(place: Place, home: Path) -> Html:
    """More pictures, captions by a network, and a recipe; runs are written in `home`."""
    networks = (element("option", name, value=name) for name in jobs.captioners())
    bases = (element("option", name, value=name) for name in jobs.bases())
    name = element("input", name="name", value=printable(place.path.name), maxlength=100, required=True)
    there = "For pictures without NAME.txt; what is there stays. It is downloaded once."
    weights = element("input", name="path", maxlength=1000, placeholder="as it is published", autocomplete="off")
    by_network = [
        element("label", "Network ", element("select", *networks, name="by")),
        element("label", "Its folder, or OWNER/NAME of the hub ", weights),
        element("button", "Write captions", type="submit"),
        element("span", there, class_="note"),
    ]
    recipe = [
        element("label", "Name ", name),
        element("label", "Base ", element("select", element("option", "chosen for me", value=""), *bases, name="base")),
        element("button", "Make a recipe", type="submit"),
        element("span", "Nothing is trained yet.", class_="note"),
        element("a", "Start a run without one", href=jobs.start(home, place.path, _USUAL_BASE, place.path.name)),
    ]
    return join(
        _section("More pictures", drop("Drop pictures here, or choose them:")),
        _section("Captions by a network", element("form", *by_network, class_="tools", id="by-network")),
        _section("A recipe of these pictures", element("form", *recipe, class_="tools", id="recipe")),
        _job(),
    )


def _section(title: str, content: Html) -> Html:
    return element("section", element("h2", title), content)


def _job() -> Html:
    """The command that runs, and what it makes."""
    progress = element("progress", id="job-done", aria_label="done")
    return element(
        "section",
        element("div", progress, element("button", "Stop", type="button", id="job-stop"), class_="tools"),
        element("pre", id="job-text", tabindex=0, role="log"),
        element(
            "p",
            element("span", id="job-file"),
            " ",
            element("button", "Plan its memory", type="button", id="job-plan", hidden=True),
            " ",
            element("a", "Start a run on these pictures", href="../../queue/new", id="job-start", hidden=True),
            class_="note",
        ),
        element("pre", id="job-recipe", tabindex=0, hidden=True, role="region", aria_label="the recipe"),
        id="job",
        hidden=True,
    )
