"""The base that a run's checkpoints stand on: a digest of every component's weights that they do not hold."""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from daguerre import deferred
from daguerre.adapters.adapter import Attached
from daguerre.config.config import Config
from daguerre.errors import UserError
from daguerre.models import encoders
from daguerre.models.family import Family
from daguerre.models.hosts import host
from daguerre.models.settings import ASSISTANT
from daguerre.models.weights import file_digests
from daguerre.objectives.networks.teacher import TEACHER
from daguerre.objectives.objective import REFERENCE

_WORD_BYTES = 8
_WIDTH = 1024
"""Words of a row of a tensor's digest."""
_SHOWN = 12
"""Hexadecimal digits of a digest in a message."""

Base = Mapping[str, Mapping[str, str]]
"""By component: `place`, where it came from, and `digest`, of its weights."""


def of(config: Config, family: Family, attached: Attached) -> Base:
    """The weights that a checkpoint of these networks leaves out. Call it before they change their type, are quantised
    or split."""
    return begun(config, family, attached).ended()


@dataclass(frozen=True)
class Begun:
    """Digests of weights that are summed as they are read."""

    places: Mapping[str, str]
    """By component, where it came from."""
    digests: Mapping[str, Callable[[], str]]

    def ended(self) -> Base:
        """The base, once weights are read: those that are not are read for it."""
        return {name: {"place": self.places[name], "digest": own()} for name, own in self.digests.items()}


def begun(config: Config, family: Family, attached: Attached) -> Begun:
    """The same for networks whose weights are read later (deferred/), so that none is read twice."""
    digests, absent = dict[str, Callable[[], str]](), encoders.absent(family)
    for component, network in family.components.items():
        # What only decodes has no part in training: a run may go on with another one.
        if component in config.model.decoding:
            continue
        if component in absent:
            digests[component] = partial(_of_absent, family, component)
            continue
        saved = {name for name in attached.names if name.startswith(f"{component}.")}
        weights = {
            # Under the base's own names, which adapters that wrap layers change.
            host(name)[0]: tensor
            for name, tensor in network.state_dict(keep_vars=True).items()
            if f"{component}.{name}" not in saved
        }
        if weights:
            digests[component] = _begun(weights)
    return Begun({name: _place(config, name) for name in digests}, digests)


def of_component(family: Family, component: str) -> str:
    """The digest of a component's weights, in memory or not, without what adapters have added to them."""
    absent = component in encoders.absent(family)
    return _of_absent(family, component) if absent else of_network(family.components[component])


def _of_absent(family: Family, component: str) -> str:
    """The digest of a network that is left out of memory, as of its weights; they are loaded for it once."""

    def computed() -> str:
        return digest(encoders.read_again(family, component).state_dict(keep_vars=True))

    # Remembered by the files' identity: opening the encoders at each start would cost what leaving them out saves.
    return file_digests.remembered({"identity": encoders.identity(family, component), "of": "weights"}, computed)


def of_network(network: nn.Module) -> str:
    """The digest of a network's weights without what adapters have added to them."""
    state = network.state_dict(keep_vars=True)
    hosts = {name: host(name) for name in state}
    return digest({hosts[name][0]: v for name, v in state.items() if not hosts[name][1]})


def check_components(recorded: Base | None, own: Collection[str], checkpoint: str) -> None:
    """UserError where a checkpoint stands on other components than those that were loaded, or names none."""
    if recorded is None:
        raise UserError(
            f"{checkpoint} does not record which base model it belongs to: an older version of Daguerre wrote it, "
            "and this version cannot read it. Continue with the version that wrote it, or start a new run",
            code="unsupported",
        )
    for component in [name for name in dict.fromkeys([*recorded, *own]) if name != REFERENCE]:
        if component not in recorded or component not in own:
            here = component in own
            holds, lacks = ("this recipe", "the checkpoint") if here else ("the checkpoint", "this recipe")
            way = "Leave it out" if here else "Give the same one"
            raise UserError(
                f"{checkpoint}: {holds} takes {component} from its base model, but {lacks} does not. {way} "
                f"({_settings(component)}), or start a new run",
                code="changed",
            )


def check_same_base(recorded: Base | None, own: Base, checkpoint: str) -> None:
    """UserError where a checkpoint stands on other weights than those that were loaded."""
    check_components(recorded, own, checkpoint)
    for component, then in (recorded or {}).items():
        if component != REFERENCE and then["digest"] != (now := own[component])["digest"]:
            raise UserError(
                f"{checkpoint} was trained on another {component}: that of {then['place']} (digest "
                f"{then['digest'][:_SHOWN]}), and the one of {now['place']} (digest {now['digest'][:_SHOWN]}) was "
                f"loaded. Give the same one ({_settings(component)}), or start a new run",
                code="changed",
            )


def _settings(component: str) -> str:
    """The settings that say where a component comes from."""
    if component == TEACHER:
        return f"objective.{component}"
    if component == ASSISTANT:
        return f"model.{component}"
    return f"model.{component}, model.pretrained_model_name_or_path, model.revision, model.variant"


def reference(net: nn.Module, config: Config) -> Base:
    """The weights of a net before its first update, which a loss compares with. A checkpoint does not hold them: they
    are made again from what the run was begun from."""
    first = {name: p for name, p in net.named_parameters() if p.requires_grad}
    return {REFERENCE: {"place": config.init_from or "the base", "digest": digest(first)}}


def check_same_reference(recorded: Base, own: Base, checkpoint: str) -> None:
    """UserError where the weights before the first update are others than those of the run."""
    then, now = recorded.get(REFERENCE), own[REFERENCE]
    if then is None:
        raise UserError(
            f"{checkpoint} was trained with a loss that compares with no other network, so the model before its first "
            "update is not recorded: start a new run from it with init_from",
            code="changed",
            setting="objective.name",
        )
    if then["digest"] != now["digest"]:
        raise UserError(
            f"{checkpoint}: its loss compares with the model before the first update (digest "
            f"{then['digest'][:_SHOWN]}), and {now['place']} now gives others (digest {now['digest'][:_SHOWN]}). Give "
            "the base, the type of weights and the init_from that the run was begun with, or start a new run",
            code="changed",
        )


def digest(weights: Mapping[str, Tensor]) -> str:
    """The digest of tensors by name: sums of their words as integers, along rows and columns of a fixed width. They are
    exact in whatever order a device adds, and elements that change places change them, too."""
    return _begun(weights)()


def _begun(weights: Mapping[str, Tensor]) -> Callable[[], str]:
    """Sums what is there, and the rest when it is read: what it returns gives the digest of all."""
    sums, shapes = dict[str, bytes](), {name: tuple(tensor.shape) for name, tensor in weights.items()}
    later = dict[str, deferred.Weight]()

    def note(name: str, value: Tensor) -> None:
        sums[name] = _sums(value)

    for name, tensor in weights.items():
        if (weight := deferred.of(tensor)) is None:
            note(name, tensor)
        else:
            later[name] = weight
            weight.watch(partial(note, name))

    def ended() -> str:
        sha256 = hashlib.sha256()
        for name in sorted(shapes):
            if name not in sums:
                later[name].value()
            sha256.update(f"{name} {shapes[name]}\n".encode() + sums[name])
        return sha256.hexdigest()

    return ended


def _sums(tensor: Tensor) -> bytes:
    # By value, not by layout: channels last must not make another base.
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    data = data.clone() if data.storage_offset() % _WORD_BYTES else data  # a view as int64 needs an aligned start
    words = data[: len(data) // _WORD_BYTES * _WORD_BYTES].view(torch.int64)
    rows = words[: len(words) // _WIDTH * _WIDTH].view(-1, _WIDTH)
    # Sums wrap around, which whole numbers do alike in any order; both directions, so that swapped weights differ.
    parts = (rows.sum(0), rows.sum(1), data[rows.numel() * _WORD_BYTES :])
    return b"".join(part.cpu().numpy().tobytes() for part in parts)


def digest_of(network: nn.Module) -> str:
    return digest(dict(network.named_parameters()))


def _place(config: Config, component: str) -> str:
    """The origin of a component, for messages."""
    settings: Any = config.model
    value = settings.places.get(component)
    if component == ASSISTANT:
        return str(getattr(settings, component))
    if component in config.objective.networks:
        return str(config.objective.networks[component].place)
    if value is None or isinstance(value, dict):
        return f"random weights of seed {config.seed}"
    if value != "base":
        return str(value)
    revision = f" at {settings.revision}" if settings.revision else ""
    return f"{settings.pretrained_model_name_or_path}{revision}"
