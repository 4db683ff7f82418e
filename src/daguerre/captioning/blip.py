"""The captioner `blip`: a sentence about a picture (Li et al. 2022, arXiv 2201.12086)."""

from typing import ClassVar, Literal

from daguerre.captioning import generative
from daguerre.captioning.generative import Generative, GenerativeSettings


class Settings(GenerativeSettings):
    """A short sentence."""

    published: ClassVar[str] = "Salesforce/blip-image-captioning-large"

    name: Literal["blip"] = "blip"
    """A short sentence about a picture."""
    max_new_tokens: int = 75
    """Most tokens of a caption."""
    prompt: str | None = None
    """Beginning of every caption, such as "a photo of"."""


def load(settings: Settings, device: str) -> Generative:
    """BLIP's network for captions."""
    prompts: dict[str, str | None] = {settings.name: settings.prompt}
    return generative.load(settings, "BlipForConditionalGeneration", ("blip",), prompts, device)
