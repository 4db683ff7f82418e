"""Actions that the page asks of a run that trains: files for which the run looks between two updates.

What each does, and how it is answered, is in checkpoint/actions.py.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from daguerre import documents
from daguerre.checkpoint import actions
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.errors import UserError
from daguerre.report.html import Html, element, join

MOST_BYTES = 16 << 10
_BUTTONS = {
    "save": ("Save now", "a checkpoint, with images and export"),
    "sample": ("Sample now ...", "images with a prompt of your own"),
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
    strength: float | None = Field(None, ge=-10, le=10)


class Wanted(BaseModel):
    """Message of a page."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["save", "sample", "evaluate", "pause", "continue", "release", "stop"]
    values: Images | None = None


def ask(folder: Path, given: bytes) -> str:
    """Asks the run of a folder; the id of the action. UserError for a run that does not train, or for no action."""
    found = documents.sent(Wanted.model_validate_json, given, "the page sent no action")
    values = found.values.model_dump(exclude_none=True) if found.values else {}
    if values and found.kind != "sample":
        raise UserError(f"{found.kind} takes no settings", code="unused")
    return actions.ask(RunFolder(folder), found.kind, values)


def answer(folder: Path, ident: str) -> dict[str, Any] | None:
    """The answer of the run; None while it is not there. UserError for an id of no action."""
    found = actions.answer(RunFolder(folder), ident)
    return None if found is None else found.model_dump()


def bar() -> Html:
    """The buttons, and the form for images; the page shows them while the run trains."""
    buttons = (
        element("button", text, type="button", data_action=kind, title=title)
        for kind, (text, title) in _BUTTONS.items()
    )
    said = element("span", class_="note", id="answer", role="status")
    return join(element("div", *buttons, said, class_="tools", id="control", hidden=True), _form())


def _form() -> Html:
    def number(name: str, text: str, step: str, **more: object) -> Html:
        box = element(
            "input", type="number", id=f"of-{name}", name=name, step=step, placeholder="as in the recipe", **more
        )
        return join(element("label", text, for_=f"of-{name}"), box)

    return element(
        "dialog",
        element(
            "form",
            element("h2", "Sample now"),
            element("label", "Prompt", for_="of-prompt"),
            element("textarea", id="of-prompt", name="prompt", rows=3, required=True, maxlength=4000),
            number("seed", "Seed", "1", min=0),
            number("num_inference_steps", "Steps", "1", min=1, max=1000),
            number("guidance_scale", "Guidance scale", "any", min=0),
            number("strength", "Strength of the adapter", "any"),
            element(
                "div",
                element("button", "Cancel", type="button", class_="cancel"),
                element("button", "Sample", type="submit"),
                class_="buttons",
            ),
        ),
        id="sampling",
    )
