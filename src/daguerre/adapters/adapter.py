"""The contract of every adapter: read this before adding one.

An adapter is one file in this folder that says what of a model is trained, or adds something to it and trains that. It
defines `Settings` (an `AdapterSettings` whose `name` is the file's name) and

    def attach(settings: Settings, model: Family, seed: int) -> Trainable

`model.net` holds the components that the adapters of the recipe reach (`Settings.reaches`). `attach` freezes, wraps or
adds, in place, on the CPU (or, under `torch.device("meta")`, without memory), before weights change their type, kernels
are chosen or anything is split over devices. Random weights are drawn from `seed` alone. Weights of the model are read
after it (deferred/), unless `Settings.reads_weights`.

A checkpoint holds what `Trainable.names` lists and names the rest, the base, by digest: a parameter of the net is
either in `names`, or belongs to the base and never changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from daguerre import deferred, plugins
from daguerre.adapters.settings import AdapterSettings
from daguerre.checkpoint.export import replaced
from daguerre.conditions.condition import ConditionSettings, ControlImages
from daguerre.errors import UserError
from daguerre.models.export.about import UNKNOWN, About
from daguerre.types import CONTROLS, AdapterInputs, Cond

if TYPE_CHECKING:
    import numpy as np

    from daguerre.models.family import Family
    from daguerre.models.network import Network
    from daguerre.objectives.objective import Objective
    from daguerre.samplers.settings import SamplingSettings


_CAPTIONS = 200
"""Captions in which words are looked for."""


def in_none(words: Collection[str], captions: Callable[[int], Sequence[str]]) -> tuple[list[str], int]:
    """The words that none of the first captions has, in small letters or capitals, and the number of these captions.
    `captions` reads so many of them, if there are words."""
    found = captions(_CAPTIONS) if words else []
    every = "\n".join(found).lower()
    return [word for word in words if word.lower() not in every], len(found)


class Trainable(ABC):
    """The trained part of a model. Subclasses are final: no adapter inherits from another."""

    net: nn.Module
    """Called by the objective: net(x, c_noise, cond) -> y."""
    names: frozenset[str]
    """Names in the state dict of `net` of what a checkpoint holds: all that requires a gradient is among them."""
    float32: bool = False
    """Whether these weights stay float32, whatever type the base is stored in (training.weights_dtype)."""
    whole: bool = False
    """Whether `export` writes a whole model: a run has it as `pipeline/`, and every other export as `adapter/`."""

    @property
    def added_networks(self) -> Mapping[str, Network]:
        """The networks that it adds to the model's, by their names in `net`."""
        return {}

    @property
    def images(self) -> ControlImages:
        """The images that `condition` reads in `inputs.images` in addition to the one that is trained on, by name:
        `CONTROLS` of `types.py`, [B, 4, H, W] uint8, RGBA; see `conditions/condition.py`. None: the data source stores
        it, and samples without one are left out; settings of a condition: it is computed from the image that is trained
        on."""
        return {}

    def check(self, inputs: AdapterInputs) -> None:
        """UserError for images of samples, on the host, that `condition` cannot read: it cannot tell on a device, which
        it would have to wait for."""
        return

    def condition(self, inputs: AdapterInputs, cond: Cond) -> Cond:
        """Conditioning of samples on the device, with what the adapter adds to it. No gradient flows into it. Images
        that are generated ask for each side of guidance: `texts` are its prompts."""
        return cond

    def random_inputs(self, seed: int, keys: np.ndarray, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """The random numbers that `condition` needs, on the CPU, by `daguerre.keys`; keys [B, 3], those of images that
        are generated (seed, 0, 0); shape of a latent. They come back in `inputs.draws`."""
        return {}

    def unseen(self, captions: Callable[[int], Sequence[str]]) -> list[str]:
        """Lines about words that it trains and that the first captions of the data do not have.
        `captions` reads so many of them."""
        return []

    @abstractmethod
    def export(self, folder: Path, objective: Objective, sampling: SamplingSettings, about: About) -> list[str]:
        """Writes what was trained, with the CURRENT weights, as its usual library reads it, in place of `folder`: the
        old content or the new one is there at any moment. `about` is for headers. Returns messages for the user."""

    def follow(self, objective: Objective) -> None:
        """Takes what it needs of the objective that calls the net, before any pass. UserError for one that it cannot
        follow."""
        return

    def again(self) -> Callable[[], AbstractContextManager[object]]:
        """Asked for in a pass of the net: makes contexts in which blocks of that pass are computed again for their
        gradients, long after it (training.gradient_checkpointing). For what it tells layers of a pass."""
        return nullcontext

    def start_from(self, path: Path) -> list[str] | None:
        """Takes up what a file of any program holds, before training; returns messages for the user. UserError for one
        that does not fit; None from adapters that start from no file."""
        return None

    def merge(self) -> None:
        """Puts what was learnt into the components' own weights, for exports that hold a whole model. Once."""
        return

    def detached(self) -> AbstractContextManager[None]:
        """Within the context the components are without what the adapter put into them."""
        return nullcontext()

    strengths: tuple[float, ...] = ()
    """Strengths below 1 at which images are generated at the end of a run, to be compared: 0 is the base."""

    def at(self, strength: float) -> AbstractContextManager[None]:
        """Within the context what it adds is multiplied by one of its `strengths`, or by 1; where one of these is
        between 0 and 1, by any number."""
        return nullcontext()


@dataclass(frozen=True, eq=False)
class Attached:
    """All adapters of a recipe on one model."""

    net: nn.Module
    trainables: Mapping[str, Trainable]
    """By the adapters' names in the recipe."""
    beside: frozenset[str] = frozenset()
    """Names in the net's state dict of what the loss trains in addition to the model, such as a discriminator."""

    @property
    def names(self) -> frozenset[str]:
        """Of what a checkpoint holds."""
        return self.beside.union(*(each.names for each in self.trainables.values()))

    @property
    def float32(self) -> frozenset[str]:
        """Of these, what stays float32."""
        return frozenset[str]().union(*(each.names for each in self.trainables.values() if each.float32))

    @property
    def added_networks(self) -> dict[str, Network]:
        """The networks that any of them adds."""
        return {name: network for each in self.trainables.values() for name, network in each.added_networks.items()}

    @property
    def images(self) -> ControlImages:
        """The images that any of them reads. UserError where two want different ones of one name."""
        found: dict[str, ConditionSettings | None] = {}
        owners: dict[str, str] = {}
        for adapter, own in self.trainables.items():
            for name, condition in own.images.items():
                if found.setdefault(name, condition) != condition:
                    first = owners[name]
                    raise UserError(
                        f"the adapters {first} and {adapter} read different images as {name}: {first} one "
                        f"{_origin(found[name])}, {adapter} one {_origin(condition)}. Give one of them another image "
                        f"({', '.join(CONTROLS)}), or both the same condition",
                        code="conflict",
                    )
                owners.setdefault(name, adapter)
        return found

    def unseen(self, captions: Callable[[int], Sequence[str]]) -> list[str]:
        """Lines of all adapters."""
        return [line for each in self.trainables.values() for line in each.unseen(captions)]

    def check(self, inputs: AdapterInputs) -> None:
        """By all adapters."""
        for each in self.trainables.values():
            each.check(inputs)

    def condition(self, inputs: AdapterInputs, cond: Cond) -> Cond:
        """Conditioning, by one adapter after the other."""
        for each in self.trainables.values():
            cond = each.condition(inputs, cond)
        return cond

    def random_inputs(self, seed: int, keys: np.ndarray, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Of all adapters."""
        return {
            name: v for each in self.trainables.values() for name, v in each.random_inputs(seed, keys, shape).items()
        }

    def follow(self, objective: Objective) -> None:
        """Tells all adapters."""
        for each in self.trainables.values():
            each.follow(objective)

    def again(self) -> Callable[[], AbstractContextManager[object]]:
        """Makes contexts of all adapters."""
        makers = [each.again() for each in self.trainables.values()]

        @contextmanager
        def repeated() -> Iterator[None]:
            with ExitStack() as stack:
                for make in makers:
                    stack.enter_context(make())
                yield

        return repeated

    def start_from(self, path: Path) -> list[str]:
        """Puts what a file holds into the adapter that it is for. UserError without such an adapter."""
        for each in self.trainables.values():
            if (said := each.start_from(path)) is not None:
                return said
        raise UserError(
            f"init_from={path}: there is no run, and no adapter of this recipe starts from a file in this way: a LoRA "
            "does (adapter.name=lora). A ControlNet is adapter.controlnet_model_name_or_path, a new token "
            "adapter.tokens='{<toy>: {init_file: FILE}}', a whole model model.pretrained_model_name_or_path",
            code="unsupported",
            setting="init_from",
        )

    def export(
        self,
        folder: Path,
        objective: Objective,
        sampling: SamplingSettings,
        about: About = UNKNOWN,
        whole: bool | None = None,
    ) -> list[str]:
        """Exports one adapter in place of `folder`, several in a folder of each one's name in it, without the others'
        additions. `whole`: those alone that export a whole model, or (False) that do not; nothing if there are none."""
        chosen = {name: own for name, own in self.trainables.items() if whole is None or own.whole == whole}
        if len(chosen) < 2:
            return [line for own in chosen.values() for line in self._export(own, folder, objective, sampling, about)]
        with replaced(folder) as fresh:
            return [
                line
                for name, own in chosen.items()
                for line in self._export(own, fresh / name, objective, sampling, about)
            ]

    def _export(
        self, own: Trainable, folder: Path, objective: Objective, sampling: SamplingSettings, about: About
    ) -> list[str]:
        with ExitStack() as stack:
            for other in self.trainables.values():
                stack.enter_context(nullcontext() if other is own else other.detached())
            return own.export(folder, objective, sampling, about)

    @property
    def strengths(self) -> tuple[float, ...]:
        """Those that all adapters have which have any, rising, and 1; () if none has."""
        known = [{*each.strengths} for each in self.trainables.values() if each.strengths]
        return (*sorted(set.intersection(*known)), 1.0) if known else ()

    @property
    def scales(self) -> bool:
        """True if `at` takes any number: what is added can be multiplied."""
        return any(0 < strength < 1 for strength in self.strengths)

    @contextmanager
    def at(self, strength: float) -> Iterator[None]:
        """Within the context all adapters that have strengths are at this one, or at any number where it `scales`."""
        with ExitStack() as stack:
            for each in self.trainables.values():
                stack.enter_context(each.at(strength))
            yield

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Within the context the components have what was learnt in their own weights, and nothing else in them. The
        weights stay as they are then: for the end of a program."""
        with ExitStack() as stack:
            for each in self.trainables.values():
                each.merge()
                stack.enter_context(each.detached())
            yield


def _origin(condition: ConditionSettings | None) -> str:
    return "that is stored" if condition is None else f"by {condition!r}"


def attach(settings: Mapping[str, AdapterSettings], model: Family, seed: int) -> Attached:
    """Attaches all adapters of a recipe, in their order, each to a model with the net of those before it."""
    whole = {name for own in settings.values() if own.part == "all" for name in own.reaches(model.trainable)}
    for name in model.trained - whole if model.trainable else ():
        model.components[name].requires_grad_(False)
    trainables: dict[str, Trainable] = {}
    for name, own in settings.items():
        if own.reads_weights:
            for component in model.components if own.separate else own.reaches(model.trainable):
                deferred.read(model.components[component])
        with deferred.deferring(deferred.is_on() and not own.reads_weights):  # of files that it opens, too
            trainables[name] = plugins.find("adapters", own.name).attach(own, model, seed)
        model = replace(model, net=trainables[name].net)
    found = Attached(model.net, trainables)
    lost = [name for name, p in model.net.named_parameters() if p.requires_grad and name not in found.names]
    assert not lost, f"trained, but in no checkpoint: {lost[:3]}"
    return found
