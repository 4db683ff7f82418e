"""Actions that the page asks of a run that trains: files for which the run looks between two updates.

What each does, and how it is answered, is in checkpoint/actions.py.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from daguerre import documents
from daguerre.checkpoint import actions
from daguerre.errors import UserError
from daguerre.remote import actions as far_actions
from daguerre.report.html import Html, element, join

MOST_BYTES = 16 << 10
_AS_IT_IS = "as in the recipe"
_BUTTONS = {
    "save": ("Save now", "a checkpoint, with images and export"),
    "sample": ("Sample now ...", "images with a prompt of your own"),
    "change": ("Change prompts ...", "other prompts and settings for the images of the next saves"),
    "evaluate": ("Evaluate now", "the loss on held-out samples, and the metric of the data"),
    "pause": ("Pause", "no update until it goes on; the model stays in memory"),
    "continue": ("Go on", "ends the pause"),
    "release": ("Release", "saves, frees the device and ends; the same command goes on from there"),
    "stop": ("Stop", "saves and ends"),
}


class Images(BaseModel):
    """Settings of images that are asked for; what is left out is as in the recipe."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    prompts: list[str] | None = Field(None, min_length=1, max_length=16)
    seed: int | None = Field(None, ge=0)
    sampler: str | None = None
    num_inference_steps: int | None = Field(None, ge=1, le=1000)
    guidance_scale: float | None = Field(None, ge=0)
    strength: float | None = Field(None, ge=0, le=2)


class Wanted(BaseModel):
    """Message of a page."""

    model_config = ConfigDict(extra="forbid")

    kind: actions.Kind
    values: Images | None = None


def ask(run: str, given: bytes) -> str:
    """Asks a run, a folder or an address; the id of the action. UserError for one that does not train, or for no
    action."""
    found = documents.sent(Wanted.model_validate_json, given, "the page sent no action")
    values = found.values.model_dump(exclude_none=True) if found.values else {}
    if values and found.kind not in actions.WITH_VALUES:
        raise UserError(f"{found.kind} takes no settings", code="unused")
    return far_actions.ask(run, found.kind, values)


def answer(run: str, ident: str) -> dict[str, Any] | None:
    """The answer of the run; None while it is not there. UserError for an id of no action."""
    found = far_actions.answer(run, ident)
    return None if found is None else found.model_dump()


def bar(prompts: Sequence[str]) -> Html:
    """The buttons, and the forms for images now and from now on; the page shows them while the run trains. `prompts`
    are those of its recipe."""
    buttons = (
        element("button", text, type="button", data_action=kind, title=title)
        for kind, (text, title) in _BUTTONS.items()
    )
    said = element("span", class_="note", id="answer", role="status")
    alone = (_number("seed", "Seed", "1"), _number("strength", "Strength of the adapter", "0.05", max=2))
    return join(
        element("div", *buttons, said, class_="tools", id="control", hidden=True),
        _form("sample", "Sample now", "Sample", "", alone),
        _form("change", "Prompts from here on", "Change", "\n".join(prompts)),
    )


def _number(name: str, text: str, step: str, **more: object) -> Callable[[str], Html]:
    """A box for a number, in the form of a kind."""

    def box(kind: str) -> Html:
        id, own = f"{kind}-{name}", {"name": name, "step": step, "placeholder": _AS_IT_IS, "min": 0, **more}
        return join(element("label", text, for_=id), element("input", type="number", id=id, **own))

    return box


_NUMBERS = (
    _number("num_inference_steps", "Steps", "1", min=1, max=1000),
    _number("guidance_scale", "Guidance scale", "any"),
)


def _form(kind: str, title: str, done: str, prompts: str, alone: Iterable[Callable[[str], Html]] = ()) -> Html:
    """A form for the settings of images; `alone` are boxes that no other has."""
    return element(
        "dialog",
        element(
            "form",
            element("h2", title, id=f"{kind}-title"),
            element("label", "Prompts, one a line", for_=f"{kind}-prompts"),
            element(
                "textarea", prompts, id=f"{kind}-prompts", name="prompts", rows=4, maxlength=8000, placeholder=_AS_IT_IS
            ),
            element("label", "Sampler", for_=f"{kind}-sampler"),
            element("input", id=f"{kind}-sampler", name="sampler", maxlength=50, placeholder=_AS_IT_IS),
            *(number(kind) for number in (*alone, *_NUMBERS)),
            element(
                "div",
                element("button", "Cancel", type="button", class_="cancel"),
                element("button", done, type="submit"),
                class_="buttons",
            ),
        ),
        id=f"form-{kind}",
        data_asks=kind,
        aria_labelledby=f"{kind}-title",
    )
