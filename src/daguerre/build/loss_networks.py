"""The networks that a loss is computed with besides the student: of its settings, which say themselves what each is.

They are components of the family like any other, so that all that counts, moves, splits and saves networks knows them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from daguerre.adapters.adapter import Attached
from daguerre.build.batch_sizes import couples_samples
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.models.family import Family
from daguerre.models.network import Network
from daguerre.models.weights import load, pickled, resolve
from daguerre.objectives.objective import AVERAGE, Objective
from daguerre.objectives.settings import ObjectiveSettings


@dataclass(frozen=True)
class Source:
    """The ways to these networks (objectives/networks/source.py), for one run."""

    seed: int

    @property
    def without_weights(self) -> bool:
        return resolve.without_weights()

    def seeded(self, make: Callable[[], nn.Module], setting: str) -> nn.Module:
        network: nn.Module = load.seeded(make, self.seed, setting)
        return network

    def tensors(self, place: str) -> Mapping[str, Tensor] | None:
        return pickled.of_place(Path(place).expanduser())


def added(settings: ObjectiveSettings, family: Family, attached: Attached, seed: int) -> tuple[Family, Attached]:
    """The family with the networks that the objective asks for; those that are trained are also in the net."""
    if not settings.networks:
        return family, attached
    networks = {role: own.network(Source(seed)) for role, own in settings.networks.items()}
    names = set[str]()
    for role, network in networks.items():
        if any(p.requires_grad for p in network.parameters()):
            attached.net.add_module(role, network)
            names |= {f"{role}.{inner}" for inner in network.state_dict()}
    trained = family.trained | {name.partition(".")[0] for name in names}
    more = {role: Network(network, "loss") for role, network in networks.items()}
    family = replace(family, networks={**family.networks, **more}, trained=trained)
    return family, replace(attached, beside=frozenset(names))


def of(settings: ObjectiveSettings, family: Family) -> Mapping[str, nn.Module]:
    """These networks of the family, by role."""
    return {role: family.components[role] for role in settings.networks}


def check(config: Config, objective: Objective, net: nn.Module) -> None:
    """UserError for a recipe whose other parts leave a network that the loss needs without a meaning."""
    name, roles = config.objective.name, objective.needs.networks
    if AVERAGE in roles and not config.ema.enabled:
        raise UserError(
            f"objective.name={name} reads the moving averages of the weights, and ema.enabled is false: set "
            "ema.enabled=true",
            code="conflict",
            setting="ema.enabled",
        )
    fixed = [role for role in roles if role != AVERAGE]
    for adapter, own in config.adapters.items():
        why = ""
        if own.part == "embeddings":
            why = "which would read captions with words that only the student has learnt"
        elif own.separate:
            why = "which has not learnt what the network of this adapter reads"
        if fixed and why:
            raise UserError(
                f"objective.name={name} compares the student with another network ({', '.join(fixed)}), {why}: remove "
                f"adapters.{adapter} ({own.name}), or choose another objective",
                code="conflict",
                setting="objective.name",
            )
    if roles and (norms := couples_samples(objective, net)):
        raise UserError(
            f"objective.name={name} calls the student with other weights, and {norms}: their running statistics are "
            "the student's alone. Train other components, or choose another objective",
            code="unsupported",
            setting="objective.name",
        )
