"""The way in which a family reads a text encoder, as data that its file has. No torch here."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Reading:
    """Tokens that a text encoder gets of a caption, and what of its output becomes conditioning.

    The defaults are Stable Diffusion's. Encoders whose hidden states have one name are joined
    (models/parts/text/conditioning.py), as are all pooled features.
    """

    kinds: tuple[str, ...] = ("clip", "t5")
    """Kinds of encoders that can be read so: names of modules in models/parts/text."""
    template: str = "{}"
    """Text around a caption, which takes the place of {}: the turns of a chat, with special tokens written out. Plain
    text rather than a tokenizer's own template, which would be code from a file."""
    dropped: int = 0
    """Tokens at the start whose hidden states are left out: those of the template before a caption."""
    max_tokens: int | None = None
    """Tokens of which hidden states are given: longer texts are cut. None: as many as the tokenizer says."""
    kept: int = 0
    """Tokens at the end that are kept where a text is cut: those of the template behind a caption."""
    padding: Literal["fixed", "longest"] = "fixed"
    """fixed: every text is filled up to max_tokens; longest: up to the longest of its batch. Always on the right: what
    looks back alone, or has its padding hidden, gives a text's tokens the same features with padding on the left."""
    step: int = 1
    """With padding `longest`: a text is filled up to a multiple of so many tokens, and the denoiser attends to that."""
    padding_place: int | None = None
    """The place that all of the padding has for the encoder; None: where it stands."""
    masked: bool = False
    """Whether padding is hidden from the encoder's attention."""
    text_mask: bool = False
    """Whether the denoiser gets a mask of the tokens that are no padding."""
    layers: tuple[int, ...] = (-1,)
    """Hidden states as transformers numbers them: 0 the embeddings, -1 those of the last layer. Several are joined on
    features, in this order."""
    final_norm: bool = True
    """Whether the encoder's last norm is applied to each of them."""
    text: str | None = "text"
    """Name of the hidden states in the conditioning. None: they are not used."""
    part: int = 0
    """Encoders of one part stand side by side on features; parts follow one another on tokens, and narrower ones are
    filled up with zeros."""
    pooled: Literal["plain", "projected"] | None = None
    """Features of a whole text: the last hidden state at its end, or this times the encoder's text projection."""
    long: bool = False
    """Whether longer texts are read in windows, each with its own start and end, and not cut."""
