"""Chooses the files of a repository that make a model usable offline: configs, tokenizers, and one set of weights of
each network, in safetensors where there are any.

Works on names and sizes alone; everything that other frameworks read is left.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from daguerre.errors import UserError
from daguerre.families.pretrained import catalogue
from daguerre.models.weights import index

_SMALL = (".json", ".txt", ".model", ".jinja")
_OF_WEIGHTS = re.compile(r"^flax|\.index")
"""Small files that belong to weights."""
_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")


def fetchable() -> tuple[str, ...]:
    """Everything that can be fetched of a pipeline: the components of all families, and the scheduler's config."""
    return (*catalogue.networks(), *catalogue.tokenizers(), "scheduler")


@dataclass(frozen=True)
class Choice:
    """Files to fetch."""

    files: dict[str, int]
    """Bytes by name."""
    is_pickled: bool
    """Some weights are there in pickled form alone."""

    def sizes(self) -> dict[str, int]:
        """Bytes by component; those at the root count as "configs"."""
        found: dict[str, int] = {}
        for name, size in self.files.items():
            part = name.rpartition("/")[0] or "configs"
            found[part] = found.get(part, 0) + size
        return found


def choose(files: Mapping[str, int], variant: str | None, components: Sequence[str] | None) -> Choice:
    """The files of a pipeline in diffusers' layout, or of a repository that is one network.

    UserError for a repository that is neither, and for weights that are not there.
    """
    found = {*index.NAMES} & files.keys()
    is_pickled = False
    for name in _components(files, components):
        inside = {path.rpartition("/")[2]: path for path in files if path.rpartition("/")[0] == name}
        chosen = [file for file in inside if file.endswith(_SMALL) and not _OF_WEIGHTS.search(file)]
        if not name or name in catalogue.networks():
            weights = _weights(inside, name or "the network", variant)
            is_pickled |= any(".bin" in file for file in weights)
            chosen += weights
        found |= {inside[file] for file in chosen}
    return Choice({path: files[path] for path in sorted(found)}, is_pickled)


def _components(files: Mapping[str, int], components: Sequence[str] | None) -> list[str]:
    """The folders to fetch from, of those that are asked for; [""] for a repository that is one network."""
    there = [name for name in fetchable() if any(path.startswith(f"{name}/") for path in files)]
    if there:
        if missing := [name for name in components or () if name not in there]:
            raise UserError(f"components={','.join(missing)}: it has {', '.join(there)}", setting="components")
        return [name for name in there if components is None or name in components]
    if "config.json" not in files:
        single = [path for path in files if path.endswith((".safetensors", ".ckpt"))]
        hint = f": name one of its files, such as {single[0]}" if single else ""
        raise UserError(
            f"it is no pipeline in diffusers' layout and no network with a config.json{hint}", code="unsupported"
        )
    if components is not None:
        raise UserError(
            f"components={','.join(components)}: it is one network; leave it out", code="unused", setting="components"
        )
    return [""]


def _weights(files: Iterable[str], what: str, variant: str | None) -> list[str]:
    files = list(files)
    mark = f".{variant}" if variant else ""
    for suffix in (".safetensors", ".bin"):
        for stem in _STEMS:
            if (whole := f"{stem}{mark}{suffix}") in files:
                return [whole]
            if (index := f"{stem}{suffix}.index{mark}.json") in files:
                marks = re.escape(mark)
                shard = re.compile(rf"{stem}(?:{marks}-\d+-of-\d+|-\d+-of-\d+{marks}){re.escape(suffix)}")
                return [index, *(path for path in files if shard.fullmatch(path))]
    matches = (re.fullmatch(rf"(?:{'|'.join(_STEMS)})\.(\w+)\.(?:safetensors|bin)", path) for path in files)
    variants = ", ".join(sorted({match[1] for match in matches if match})) or "none"
    named = f"weights of the variant {variant!r}" if variant else "weights without a variant"
    raise UserError(f"{what} has no {named}; it has the variants: {variants}", code="missing", setting="variant")
