"""Notices of marks in prompts that other programs read as weights, LoRAs or choices, and that are plain text here."""

import re
from collections.abc import Iterable

_ADDS = r"<\s*(?:lora|lyco|lycoris|hypernet|ti)\s*:[^<>]*>"
_LIST = r"^\s*\[[^\[\]]*,[^\[\]]*\]\s*$"  # also without quotes, which a shell takes away
MARKS = {
    _LIST: "{} is one prompt: sampling.prompts='[...]' takes a list of them, prompts_file=FILE one a line",
    r"\([^()]*:\s*[+-]?(?:\d+\.?\d*|\.\d+)\s*\)": "{} sets no weight",
    r"(?<!\\)\((?:[^()]|\\[()])*\(": "{} ... sets no weight: brackets are text",
    r"(?<!\\)\[[^\[\]]+\]": "{} sets no weight and chooses nothing",
    _ADDS: "{} loads nothing: use='{{FILE: 0.8}}' puts a LoRA on the model, with its strength",
    r"\bembedding:[\w.-]+": "{} loads nothing: use='{{FILE: 1}}' reads a file of tokens",
    r"\\[()\[\]]": "the backslash of {} is read, too",
    r"\bBREAK\b": "{} begins no new window of tokens",
}
"""Patterns of marks of A1111, ComfyUI and kohya's scripts, and the effect that they do not have."""


def notices(prompts: Iterable[str]) -> list[str]:
    """A line about the marks in prompts, positive and negative, or none."""
    found: dict[str, tuple[str, str]] = {}
    for prompt in prompts:
        rest = prompt
        for pattern, effect in MARKS.items():
            if match := re.search(pattern, rest):
                found.setdefault(effect, (match[0], prompt))
            if pattern in (_ADDS, _LIST):
                rest = re.sub(pattern, "", rest)
    if not found:
        return []
    said = "; ".join(effect.format(_short(mark)) for effect, (mark, _) in found.items())
    first = next(prompt for _, prompt in found.values())
    return [f"prompts are read word for word: {said} (as in {_short(first)!r})"]


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
