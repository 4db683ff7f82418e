"""Functions from other trainers' names of LoRAs to our settings, for rows of `converted` in names.yaml."""

import json
from collections.abc import Callable

from daguerre.config.aliases.values import NOTHING_ASKED, Meaning, number, one


def ratio(key: str, text: str, pattern: str) -> Meaning:
    """kohya's ratio of LoRA+: the learning rate of B over that of A."""
    if text.lower() in NOTHING_ASKED:
        return Meaning()
    return one("optimizer.learning_rate_factors", json.dumps({f"{pattern}.lora_B.*": number(key, text)}))


FUNCTIONS: dict[str, Callable[..., Meaning]] = {function.__name__: function for function in (ratio,)}
