"""Daguerre: one YAML recipe and one loop that trains, samples and evaluates diffusion models.

As a library it offers the names of `__all__` (docs/library.md), each of which is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daguerre import keys
    from daguerre.errors import UserError
    from daguerre.library.models import Model, load, plan, read_checkpoint, train
    from daguerre.library.runs import checkpoints, metrics
    from daguerre.library.sampling import draw, objective, sampler

__version__ = "0.2.0.dev0"

__all__ = [
    "Model",
    "UserError",
    "__version__",
    "checkpoints",
    "draw",
    "keys",
    "load",
    "metrics",
    "objective",
    "plan",
    "read_checkpoint",
    "sampler",
    "train",
]
_PLACES = {
    "errors": ("UserError",),
    "library.models": ("Model", "load", "plan", "read_checkpoint", "train"),
    "library.runs": ("checkpoints", "metrics"),
    "library.sampling": ("draw", "objective", "sampler"),
}


def __getattr__(name: str) -> Any:
    if name == "keys":
        return import_module("daguerre.keys")
    for place, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"daguerre.{place}"), name)
    raise AttributeError(f"daguerre promises no {name!r}; it has {', '.join(__all__)} (docs/library.md)")


def __dir__() -> list[str]:
    return [*__all__]
