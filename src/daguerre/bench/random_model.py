"""Networks for a benchmark: those of the recipe where they are on this machine, else the same with random weights.

How fast a network trains does not depend on what it has learnt. For a base that is not here, the numbers that ship with
the package and CLIP's own words make a folder from which the networks are built at random; nothing is downloaded.
"""

import json
import shutil
from itertools import zip_longest
from pathlib import Path
from typing import Any

from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.families.pretrained import single_files
from daguerre.models.components import ComponentLoader, Wanted
from daguerre.models.parts.text import tokenizers
from daguerre.models.parts.text.tokenizers import CLIP_TOKENS
from daguerre.models.settings import BASE, SINGLE_FILES, PretrainedSettings
from daguerre.models.weights import architectures, resolve


def at_hand(config: Config, folder: Path) -> tuple[Config, str]:
    """The config with networks that this machine can build, and what is to be said of them ("" if they are its own).

    `folder` is where a stand-in may be written. UserError where the base is not here and its numbers are not known.
    """
    model = config.model
    if not isinstance(model, PretrainedSettings) or all(_is_here(each) for each in ComponentLoader(model, 0).wanted()):
        return config, ""
    place = model.pretrained_model_name_or_path
    architecture = architectures.find(place)
    base = _write(architecture, model, folder / architecture.name) if architecture else _here(place)
    if base is None:
        way = f"Fetch it: daguerre fetch {place} -o DIR" if len(Path(place).parts) == 2 else "Train or export it first"
        raise UserError(
            f"{place} is not on this machine, and the package does not know its numbers; it knows "
            f"{', '.join(architectures.names())}. {way}",
            code="missing",
            setting="model.pretrained_model_name_or_path",
        )
    changes: dict[str, Any] = {"revision": None, "scheduler": BASE}
    changes["pretrained_model_name_or_path"] = str(base) if architecture else place
    changes |= {
        name: _numbers(base, name, own, model) for name, own in model.places.items() if not isinstance(own, dict)
    }
    changes |= dict.fromkeys(model.tokenizers(), BASE)
    # Settings that the recipe leaves alone are left alone: a family may refuse one that has no effect there.
    changes = {name: own for name, own in changes.items() if own != getattr(model, name)}
    # `variant` means weights, of which none are read.
    changed = type(model).model_validate(model.model_dump(exclude={"variant"}, exclude_unset=True) | changes)
    return (
        config.model_copy(update={"model": changed}),
        f"{place} is not on this machine: networks of its numbers with random weights, which take the same time",
    )


def _here(place: str) -> Path | None:
    """The folder of a base that is on this machine, where other components are not."""
    found = resolve.here(place, resolve.Options())
    return found if found is not None and found.is_dir() else None


def _numbers(base: Path, name: str, place: str | None, model: PretrainedSettings) -> dict[str, Any] | None:
    """Those of a network at a place that is not here: of a published one its own, else the base's (None), or those that
    its class has."""
    published = model.published(Path(place).name) if place is not None and place.endswith(SINGLE_FILES) else None
    if published is not None:
        return dict(published)
    own = architectures.find(place) if place is not None else None
    if own is not None and own.name != base.name and (own / name / "config.json").exists():
        return dict(json.loads((own / name / "config.json").read_text()))
    return None if (base / name).is_dir() else {}


def _is_here(wanted: Wanted) -> bool:
    found = resolve.here(wanted.place, wanted.options)
    return found is not None and not resolve.missing_files(found, wanted.needed)


def _write(architecture: Path, model: PretrainedSettings, folder: Path) -> Path:
    """A pipeline's folder without weights: configs and tokenizers."""
    for name in (*model.networks(), "scheduler"):
        if (architecture / name).is_dir():
            shutil.copytree(architecture / name, folder / name, dirs_exist_ok=True)
    for name, reader in zip_longest(model.tokenizers(), model.text_encoders()):
        own = folder / model.folder_of(name)
        own.mkdir(parents=True, exist_ok=True)
        for file, content in _words(architecture, name, architecture / (reader or name)).items():
            (own / file).write_bytes(content)
    return folder


def _words(architecture: Path, name: str, reader: Path) -> dict[str, bytes]:
    """Files of a tokenizer: CLIP's, or one of as many words as the network knows that reads its tokens."""
    place = reader / "config.json"
    numbers = json.loads(place.read_text()) if place.is_file() else {}
    size = numbers.get("text_config", numbers).get("vocab_size", CLIP_TOKENS)
    if size == CLIP_TOKENS:
        return single_files.clip_words(architecture.name, name)
    # A tokenizer with far fewer words than the network knows is refused, as it is another model's.
    return tokenizers.filled(tokenizers.files(tokenizers.learn(["image"], 77)), size)
