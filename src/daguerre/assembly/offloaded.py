"""Text encoders that wait in the host's memory between captions (training.text_encoders=offload)."""

from collections.abc import Collection

import torch

from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.formatting import format_size
from daguerre.models import encoders
from daguerre.models.family import Family

_SETTING = "training.text_encoders"


def begin(config: Config, family: Family, device: torch.device, absent: Collection[str]) -> None:
    """Lets the frozen text encoders of a family wait, where the recipe says so, before networks are moved. `absent` are
    the components that have no memory, as a cache has what they make. UserError where none would ever wait."""
    if config.training.text_encoders == "resident":
        return
    names = config.model.text_encoders()
    why, way = "", "remove the setting"
    if not names:
        why = "this family reads no captions"
    elif trained := family.trained_readers:
        why = f"{', '.join(trained)} is trained, so all text encoders compute with the trained networks in each pass"
    elif held := [name for name in names if name in absent]:
        why = f"cache.path has what {', '.join(held)} makes of captions, so it is in no memory while a run trains"
        way = "remove one of them, or set cache.texts=false where captions cannot be cached"
    if why:
        raise UserError(f"{_SETTING}=offload has no effect: {why}: {way}", code="unused", setting=_SETTING)
    for name in names:
        encoders.wait(family.components[name], device)


def notices(family: Family, on_cpu: bool = False) -> list[str]:
    """A line about encoders that wait."""
    held = [network for network in family.components.values() if encoders.waiting(network) is not None]
    if not held:
        return []
    size = format_size(sum(encoders.held_bytes(network) for network in held))
    spares = ", which saves nothing on a CPU" if on_cpu else ""
    return [
        f"{_SETTING}=offload: {size} of text encoders are in the host's memory, of each process, and copied for the "
        f"captions of each micro-batch{spares}"
    ]
