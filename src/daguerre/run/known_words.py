"""Notices of words in prompts that a model never saw, for a denoiser trained from random weights on generated captions.

A pretrained one knows more than the captions of a run, and captions in files are not read for this.
"""

from collections.abc import Iterable

from daguerre.config.config import Config
from daguerre.data.images.words import words

_FEW = 60
"""Most known words that are listed."""
_SHOWN = 10


def known(config: Config) -> frozenset[str] | None:
    """Every word of the training captions; None if they are not known."""
    return config.data.words() if config.model.denoises_anew and config.init_from is None else None


def notices(config: Config, prompts: Iterable[str]) -> list[str]:
    """A line about words in the prompts that the model does not know, or none."""
    vocabulary = known(config)
    if vocabulary is None:
        return []
    strange: dict[str, str] = {}
    for prompt in prompts:
        for word in words(prompt):
            if word not in vocabulary:
                strange.setdefault(word, prompt)
    if not strange:
        return []
    listed = ", ".join([*list(strange)[:_SHOWN], *(["..."] if len(strange) > _SHOWN else [])])
    first = next(iter(strange.values()))
    others = f"the {len(vocabulary)} that it knows are: {', '.join(sorted(vocabulary))}"
    if len(vocabulary) > _FEW:
        others = f"it knows {len(vocabulary):,} others"
    return [
        f"these words are in none of the training captions: {listed} (as in {first!r}), so the model does not know "
        f"them; {others}"
    ]
