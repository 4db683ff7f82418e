"""Which files of a repository make a model usable offline: configs, tokenizers and one set of weights a network.

Works on names and sizes alone; safetensors come before pickled weights, everything that other frameworks read is left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from daguerre.errors import UserError
from daguerre.families import catalogue

_SMALL = (".json", ".txt", ".model")
_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")


def fetchable() -> tuple[str, ...]:
    """What can be fetched of a pipeline: the components of all families, and the scheduler's config."""
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
    known = fetchable()
    there = [name for name in known if any(path.startswith(f"{name}/") for path in files)]
    if not there:
        return _of_one_network(files, variant, components)
    if missing := [name for name in components or () if name not in there]:
        raise UserError(f"components={','.join(missing)}: it has {', '.join(there)}")
    wanted = [name for name in there if components is None or name in components]
    found = {"model_index.json": files["model_index.json"]} if "model_index.json" in files else {}
    is_pickled = False
    for name in wanted:
        inside = {path.removeprefix(f"{name}/"): size for path, size in files.items() if path.startswith(f"{name}/")}
        found |= {f"{name}/{path}": size for path, size in inside.items() if _is_small(path)}
        if name in catalogue.networks():
            weights, is_pickle = _weights(inside, name, variant)
            found |= {f"{name}/{path}": inside[path] for path in weights}
            is_pickled |= is_pickle
    return Choice(dict(sorted(found.items())), is_pickled)


def _of_one_network(files: Mapping[str, int], variant: str | None, components: Sequence[str] | None) -> Choice:
    root = {path: size for path, size in files.items() if "/" not in path}
    if "config.json" not in root:
        single = [path for path in files if path.endswith((".safetensors", ".ckpt"))]
        hint = f": name one of its files, such as {single[0]}" if single else ""
        raise UserError(f"it is no pipeline in diffusers' layout and no network with a config.json{hint}")
    if components is not None:
        raise UserError(f"components={','.join(components)}: it is one network; leave it out")
    weights, is_pickled = _weights(root, "the network", variant)
    found = {path: size for path, size in root.items() if _is_small(path)} | {path: root[path] for path in weights}
    return Choice(dict(sorted(found.items())), is_pickled)


def _is_small(path: str) -> bool:
    return "/" not in path and path.endswith(_SMALL) and ".index" not in path and not path.startswith("flax")


def _weights(files: Mapping[str, int], what: str, variant: str | None) -> tuple[list[str], bool]:
    """One set of weights, and whether it is pickled."""
    mark = f".{variant}" if variant else ""
    for suffix in (".safetensors", ".bin"):
        for stem in _STEMS:
            if f"{stem}{mark}{suffix}" in files:
                return [f"{stem}{mark}{suffix}"], suffix == ".bin"
            if (index := f"{stem}{suffix}.index{mark}.json") in files:
                marks = re.escape(mark)
                shard = re.compile(rf"{stem}(?:{marks}-\d+-of-\d+|-\d+-of-\d+{marks}){re.escape(suffix)}")
                return [index, *(path for path in files if shard.fullmatch(path))], suffix == ".bin"
    matches = (re.fullmatch(rf"(?:{'|'.join(_STEMS)})\.(\w+)\.(?:safetensors|bin)", path) for path in files)
    variants = sorted({match[1] for match in matches if match})
    named = f"weights of the variant {variant!r}" if variant else "weights without a variant"
    raise UserError(f"{what} has no {named}; it has the variants: {', '.join(variants) or 'none'}")
