"""The networks that a loss is computed with besides the student: of its settings, which say themselves what each is.

They are components of the family like any other, so that all that counts, moves, splits and saves networks knows them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from daguerre.adapters.adapter import Attached
from daguerre.assembly.batch_sizes import couples_samples
from daguerre.assembly.teacher import network as network_of_teacher
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.models.family import Family, ReferenceText
from daguerre.models.network import Network
from daguerre.models.weights import load, pickled, resolve
from daguerre.objectives.networks.teacher import Teacher
from daguerre.objectives.objective import AVERAGE, Objective
from daguerre.objectives.settings import ObjectiveSettings


@dataclass(frozen=True)
class Source:
    """The ways to these networks (objectives/networks/source.py), for one run."""

    config: Config
    family: Family

    @property
    def without_weights(self) -> bool:
        return resolve.without_weights()

    def seeded(self, make: Callable[[], nn.Module], setting: str) -> nn.Module:
        network: nn.Module = load.seeded(make, self.config.seed, setting)
        return network

    def tensors(self, place: str) -> Mapping[str, Tensor] | None:
        return pickled.of_place(Path(place).expanduser())

    def teacher(self, place: str) -> Network:
        return network_of_teacher(place, self.config, self.family)


def added(config: Config, family: Family, attached: Attached) -> tuple[Family, Attached]:
    """The family with the networks that the objective asks for; those that are trained are also in the net."""
    if not config.objective.networks:
        return family, attached
    networks = dict[str, Network]()
    for role, settings in config.objective.networks.items():
        # The settings make it: no network of a loss is named here.
        made = settings.network(Source(config, family))
        networks[role] = made if isinstance(made, Network) else Network(made, "loss")
    names = set[str]()
    for role, network in networks.items():
        if any(p.requires_grad for p in network.module.parameters()):
            # In the net: optimizer, averages, meshes and checkpoints then know it without another word.
            attached.net.add_module(role, network.module)
            names |= {f"{role}.{inner}" for inner in network.module.state_dict()}
    trained = family.trained | {name.partition(".")[0] for name in names}
    family = replace(family, networks={**family.networks, **networks}, trained=trained)
    return family, replace(attached, beside=frozenset(names))


def of(settings: ObjectiveSettings, family: Family) -> Mapping[str, Any]:
    """These networks of the family, by role, as a loss calls them."""
    networks = {role: family.networks[role] for role in settings.networks}
    return {role: network.teacher or network.module for role, network in networks.items()}


def check(config: Config, objective: Objective, family: Family, net: nn.Module) -> None:
    """UserError for a recipe whose other parts leave a network, or the empty caption, that the loss needs without a
    meaning."""
    name, roles = config.objective.name, objective.needs.networks
    if objective.needs.null and (why := _no_null(family)):
        raise UserError(
            f"objective.name={name} needs the conditioning of the empty caption, and {why}",
            code="conflict",
            setting="objective.name",
        )
    if AVERAGE in roles and not config.ema.enabled:
        raise UserError(
            f"objective.name={name} reads the moving averages of the weights, and ema.enabled is false: set "
            "ema.enabled=true",
            code="conflict",
            setting="ema.enabled",
        )
    teachers = {role: own.teacher for role, own in family.networks.items() if own.teacher is not None}
    fixed = [*(role for role in roles if role != AVERAGE), *teachers]
    _check_scales(config, objective, family, [*teachers.values()])
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


def _check_scales(config: Config, objective: Objective, family: Family, teachers: Sequence[Teacher]) -> None:
    """UserError for scales by which the teacher, or the student before its first update, cannot guide."""
    name = f"objective.name={config.objective.name}"
    # Without a teacher the student before its first update guides, so its own family says what it can.
    guidances = [teacher.guidance for teacher in teachers] or [family.guidance]
    faults = [guidance.fault(scale) for guidance in guidances for scale in objective.needs.scales]
    if fault := next(filter(None, faults), ""):
        raise UserError(f"{name}: as a teacher's, {fault}", code="conflict", setting="objective.name")


def _no_null(family: Family) -> str:
    """The reason for which one conditioning of the empty caption does not serve all batches; "" where it does."""
    if family.text is None:
        return "this family reads no captions: choose another objective"
    if family.references is not None and isinstance(family.text, ReferenceText):
        return "this family reads captions with reference images, the empty one too: choose another objective"
    if trained := family.trained_readers:
        return f"{', '.join(trained)} is trained, which makes another one with every update: train the denoiser alone"
    return ""
