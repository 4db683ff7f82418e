"""The words of a text, as captions and prompts are compared: small letters, no punctuation."""

import re

_WORD = re.compile(r"\w+(?:['’-]\w+)*")


def words(*texts: str) -> list[str]:
    return [word for text in texts for word in _WORD.findall(text.lower())]
