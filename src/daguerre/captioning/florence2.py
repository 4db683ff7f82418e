"""The captioner `florence2`: captions of several lengths (Xiao et al. 2023, arXiv 2311.06242)."""

from typing import ClassVar, Literal

from pydantic import Field

from daguerre.captioning import generative
from daguerre.captioning.generative import Generative, GenerativeSettings

Task = Literal["caption", "detailed_caption", "more_detailed_caption"]


class Settings(GenerativeSettings):
    """A caption for each task."""

    published: ClassVar[str] = "florence-community/Florence-2-large"

    name: Literal["florence2"] = "florence2"
    """Captions of several lengths."""
    max_new_tokens: int = 1024
    """Most tokens of a caption."""
    tasks: list[Task] = Field(["more_detailed_caption"], min_length=1)
    """Captions that are wanted. The first goes to the field florence2, each other one to florence2_TASK."""


def load(settings: Settings, device: str) -> Generative:
    """Florence-2 in the form of transformers."""
    fields = [settings.name if i == 0 else f"{settings.name}_{task}" for i, task in enumerate(settings.tasks)]
    prompts = {field: f"<{task.upper()}>" for field, task in zip(fields, settings.tasks, strict=True)}
    return generative.load(settings, "Florence2ForConditionalGeneration", ("florence2",), prompts, device)
