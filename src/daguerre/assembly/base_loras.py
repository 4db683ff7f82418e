"""LoRAs that are part of the base of a run (`model.loras`): added to the denoiser's weights before anything is trained.

What is trained, and the digest by which its checkpoints know the base, stand on the sum. Exports of a whole model hold
it; an adapter's files are for the base with these LoRAs.
"""

from functools import partial

import torch

from daguerre import deferred
from daguerre.assembly import assistant
from daguerre.errors import UserError
from daguerre.models.family import Family
from daguerre.models.lora_files import contents, read
from daguerre.models.lora_files.addition import Addition, merged
from daguerre.models.settings import FamilySettings, PretrainedSettings
from daguerre.models.weights import resolve

_SETTING = "model.loras"


@torch.no_grad()
def merge(settings: FamilySettings, family: Family) -> None:
    """Adds the LoRAs of these settings to a family that was just loaded. UserError for one that is not of the denoiser
    alone, and for a file that cannot be read in full."""
    asked: dict[tuple[str, str], list[tuple[Addition, float]]] = {}
    for one in settings.loras if isinstance(settings, PretrainedSettings) else ():
        file = contents.find(assistant.located(one.path, _SETTING))
        with torch.device("cpu"):
            found = read.read(file, family.components)
        for component, additions in found.items():
            if family.networks[component].role != "denoiser":
                raise UserError(
                    f"{_SETTING}: {file} adds to {component}, and only the denoiser's weights may differ from their "
                    "files, by which caches of captions and latents are known. `daguerre convert merge` writes a base "
                    "with all of it: train that",
                    code="unsupported",
                    setting=_SETTING,
                )
            for each in additions:
                asked.setdefault((component, each.name), []).append((each, one.strength))
    if resolve.without_weights():
        return
    for (component, name), own in asked.items():
        weight = family.components[component].get_parameter(name)
        add = partial(merged, own=own, component=component)
        if (later := deferred.of(weight)) is None:
            weight.copy_(add(weight))
        else:
            later.change(add)
