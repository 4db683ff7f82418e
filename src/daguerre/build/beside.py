"""The networks that a loss is computed with beside the family's: a discriminator, which is trained, and LPIPS, frozen.

They are components of the family like any other, so that all that counts, moves, splits and saves networks knows them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from daguerre.adapters.adapter import Attached
from daguerre.errors import UserError
from daguerre.models import lpips
from daguerre.models.family import Family
from daguerre.models.settings import ComponentSpec
from daguerre.models.weights import load as weights_load
from daguerre.models.weights import resolve
from daguerre.objectives.settings import ObjectiveSettings


def added(settings: ObjectiveSettings, family: Family, attached: Attached, seed: int) -> tuple[Family, Attached]:
    """The family with the networks that the objective asks for; those that are trained are also in the net."""
    if not settings.beside:
        return family, attached
    networks = {name: _network(name, own, seed) for name, own in settings.beside.items()}
    names = set[str]()
    for name, network in networks.items():
        if any(p.requires_grad for p in network.parameters()):
            attached.net.add_module(name, network)
            names |= {f"{name}.{inner}" for inner in network.state_dict()}
    specs = {**family.specs, **dict.fromkeys(networks, ComponentSpec("loss"))}
    trained = family.trained | {name.partition(".")[0] for name in names}
    family = replace(family, components={**family.components, **networks}, specs=specs, trained=trained)
    return family, replace(attached, beside=frozenset(names))


def of(settings: ObjectiveSettings, family: Family) -> Mapping[str, nn.Module]:
    """These networks of the family."""
    return {name: family.components[name] for name in settings.beside}


def _network(name: str, own: Any, seed: int) -> nn.Module:
    """A network with random weights where its settings name no place, else the one that is there."""
    setting = f"objective.{'adversarial' if name == 'discriminator' else 'perceptual'}"
    if not hasattr(own, "path"):
        made: nn.Module = weights_load.seeded(own.network, seed, setting)
        return made
    if resolve.without_weights():
        return lpips.Lpips().eval().requires_grad_(False)
    if (found := lpips.read(own.path)) is None:
        raise UserError(
            f"{setting}.path={own.path}: there is no such file here, and nothing is downloaded by itself. Needed is a "
            f"folder with {lpips.PUBLISHED}: give its place, or train without this term ({setting}=null)",
            code="missing",
            setting=f"{setting}.path",
        )
    if own.digest is not None and not found.digest.startswith(own.digest):
        raise UserError(
            f"{own.path} has the weights {found.digest}, and {setting}.digest={own.digest} asks for others",
            code="changed",
            setting=f"{setting}.digest",
        )
    return lpips.filled(found.tensors)
