"""The numbered LoRAs of Stability's code for Stage C, read for shared code (models/lora_files/numbered.py)."""

from pathlib import Path

from daguerre import plugins
from daguerre.families.cascade import words as cascade_words
from daguerre.families.cascade.lora_names import config, is_numbered, named
from daguerre.families.cascade.lora_names import is_one as is_for
from daguerre.families.cascade.words import read as words
from daguerre.models.parts.text.encoder import TextEncoder

__all__ = ["config", "is_for", "is_numbered", "model", "named", "reader", "words"]

model = "Stage C of Stable Cascade"


def reader(base: Path) -> TextEncoder:
    """The text encoder of a base, alone."""
    settings = plugins.find("families", "cascade_c").Settings(pretrained_model_name_or_path=str(base))
    return cascade_words.reader(settings)
