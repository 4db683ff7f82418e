"""`ema.path`: weights of elsewhere from which the averages of a fresh run start. Only read here, by the net's names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from daguerre.checkpoint import manifest
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.checkpoint.store import Store
from daguerre.errors import UserError
from daguerre.models.single_file import load
from daguerre.models.weights import files
from daguerre.remote import local_copy

_WRAPPER = "text_model."
"""Stands before the names of text encoders in files of older versions of transformers."""
_SHOWN = 5


def read(path: Path, net: nn.Module, saved: Collection[str] | None = None) -> dict[str, Tensor]:
    """Weights for every trained parameter of `net`, by its name: a run's averages where it has them, else weights.
    `saved` are the weights that a checkpoint holds, by default all of the net.

    UserError where there is nothing to read, and lists what is missing, unknown or of another shape.
    """
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    known = set(net.state_dict() if saved is None else saved)
    found = {_own_name(name, known): tensor for name, tensor in _tensors(path.expanduser(), known)}
    problems = [f"missing {name}" for name in trained.keys() - found.keys()]
    problems += [f"unknown {name}" for name in found.keys() - known if not name.endswith(".position_ids")]
    problems += [
        f"{name} is {list(found[name].shape)}, the network has {list(p.shape)}"
        for name, p in trained.items()
        if name in found and found[name].shape != p.shape
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise UserError(
            f"ema.path={path}: these weights do not fit what is trained: {'; '.join(sorted(problems)[:_SHOWN])}{more}"
        )
    return {name: found[name] for name in trained}


def _tensors(path: Path, known: set[str]) -> Iterator[tuple[str, Tensor]]:
    """All that the place holds, each with its component before its name."""
    local_copy.bring(path)
    components = sorted({name.partition(".")[0] for name in known})
    if path.is_file():
        yield from _of_file(path, components, known)
    elif (path / "checkpoints").is_dir():
        found = Store(RunFolder(path).checkpoints).newest_verified()
        if found.path is None:
            raise UserError(f"ema.path={path}: this run has no checkpoint that can be read")
        yield from _of_checkpoint(found.path)
    elif (path / manifest.NAME).is_file():
        yield from _of_checkpoint(path)
    elif any((path / component).is_dir() for component in components):
        for component in components:
            if (path / component).is_dir():
                yield from _prefixed(component, files.read(path / component))
    elif path.is_dir():
        tensors = files.read(path)
        yield from _prefixed(_meant(tensors, components, known, path) or path.name, tensors)
    else:
        raise UserError(
            f"ema.path={path}: there is nothing; give a run folder, one of its checkpoints, a folder in diffusers' "
            "layout or a .safetensors file"
        )


def _of_checkpoint(path: Path) -> Iterator[tuple[str, Tensor]]:
    store = Store(path.parent)
    wanted = ("model", "ema") if "ema" in store.groups(path) else ("model",)
    groups = store.load(path, wanted).tensors
    yield from groups["model"].items()
    yield from groups.get("ema", {}).items()  # later, so that they count


def _of_file(path: Path, components: list[str], known: set[str]) -> Iterator[tuple[str, Tensor]]:
    """In the net's names, in those of one component, or a whole checkpoint in the original layout."""
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"ema.path={path} cannot be read as safetensors: {error}") from error
    if any(name in known for name in tensors):
        yield from tensors.items()
    elif (component := _meant(tensors, components, known, None)) is not None:
        yield from _prefixed(component, tensors)
    else:
        for component in components:
            names = [name.removeprefix(f"{component}.") for name in known if name.startswith(f"{component}.")]
            yield from _prefixed(component, load.network_tensors(path, component, names, pickled=False))


def _prefixed(component: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    return ((f"{component}.{name}", tensor) for name, tensor in tensors.items())


def _meant(tensors: Mapping[str, Tensor], components: list[str], known: set[str], path: Path | None) -> str | None:
    """The component whose names these are: the folder's own name where it is one, else that with the most of them."""
    if path is not None and path.name in components:
        return path.name
    shared = {part: sum(_own_name(f"{part}.{name}", known) in known for name in tensors) for part in components}
    best = max(shared, key=lambda part: shared[part])
    return best if shared[best] else None


def _own_name(name: str, known: set[str]) -> str:
    """The net's name of a parameter that a text encoder's file may call by another."""
    component, _, rest = name.partition(".")
    other = rest.removeprefix(_WRAPPER) if rest.startswith(_WRAPPER) else f"{_WRAPPER}{rest}"
    other = f"{component}.{other}"
    return other if name not in known and other in known else name
