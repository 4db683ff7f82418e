"""The optimizer of the loop: one or more torch optimizers that leave out non-finite updates, and their state.

Each optimizer is a file in this folder, found by its name, which builds one or more `OptimizerPart`. No schedule here.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from daguerre import plugins
from daguerre.errors import UserError, install
from daguerre.training.guard import check_finite
from daguerre.training.optimizers import groups, one_pass
from daguerre.training.optimizers.one_pass import Average
from daguerre.training.precision.stochastic_rounding import Place, Rounding, widened
from daguerre.training.settings import InBackward, OptimizerSettings

NUMBER = ".number"
"""Ends the name of a saved tensor that is a Python number while training."""
_MOMENTS = (".exp_avg", ".exp_avg_sq", ".momentum", ".momentum_buffer", ".z")
"""Entries that have the shape of their parameter."""
UNTOUCHED = "untouched"
"""Saved for a parameter that no gradient ever reached, such as a layer behind the one that is read."""


@dataclass(frozen=True)
class OptimizerPart:
    """A torch optimizer of some of the trained parameters, and how it leaves out an update that is not finite."""

    optimizer: torch.optim.Optimizer
    skip: Literal["itself", "restored", "asked"]
    """itself: it reads `found_inf` on the device. restored: weights and moments are copied before each update and put
    back on the device; its counts of updates go on. asked: the host waits for the answer, for an optimizer that makes
    the host wait in every update anyway."""
    counters: tuple[str, ...] = ()
    """Numbers in its groups that change while training."""
    constants: tuple[str, ...] = ()
    """Entries of its state that are never saved: they follow from the parameter."""
    averaged: Callable[[Tensor, Mapping[str, Any]], Tensor] | None = None
    """The averaged value that belongs to a parameter and its state, for an optimizer that averages by itself."""
    made: tuple[str, ...] = ()
    """Entries of its state, where it makes them for each parameter by itself at its first gradient."""
    one_pass: bool = False
    """It is AdamW, which clips and moves the averages in the same pass."""
    elementwise: bool = False
    """It moves each number by its own gradient and moments alone: devices can each move a part of a parameter."""
    groups_together: bool = False
    """True if its groups share numbers, so that none can be moved without the others."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in the order in which their state is numbered."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def step(self, skip: Tensor) -> None:
        """One update with the gradients that are there, unless `skip` (0-dim bool on the device)."""
        if self.skip == "itself":
            self.optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
            self.optimizer.step()
            return
        self.begin()
        if self.skip == "restored":
            before = {key: tensor.clone() for key, tensor in self._tensors()}
            self.optimizer.step()
            for key, tensor in self._tensors():
                tensor.copy_(torch.where(skip, before[key], tensor))
        elif not skip.item():
            self.optimizer.step()

    @torch.no_grad()
    def begin(self) -> None:
        """Makes the state that torch optimizers make in their first update, so that a first one can be left out.

        An update with gradients and a learning rate of zero does it; weights and counts are put back.
        """
        parameters = self.parameters
        # Not for those that make it themselves: a rehearsal would count as an update in their bias correction.
        if self.skip == "itself" or any(self.optimizer.state.get(p) for p in parameters):
            return
        held = [(p.grad, p.detach().clone()) for p in parameters]
        counts = [dict(group) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for p in parameters:
            p.grad = torch.zeros_like(p)
        self.optimizer.step()
        for p, (gradient, value) in zip(parameters, held, strict=True):
            p.grad = gradient
            p.copy_(value)
        for group, count in zip(self.optimizer.param_groups, counts, strict=True):
            group.update(count)
        for p in parameters:
            entry = self.optimizer.state[p]
            entry |= {name: type(value)(0) for name, value in entry.items() if isinstance(value, (int, float))}
            if isinstance(count := entry.get("step"), Tensor):  # as torch's own optimizers count
                count.zero_()

    def _tensors(self) -> Iterator[tuple[tuple[int, str], Tensor]]:
        """Weights and moments, by the parameter's number and their name."""
        for number, p in enumerate(self.parameters):
            yield (number, ""), p.data
            for name, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and name not in self.constants:
                    yield (number, name), value

    def averages(self) -> dict[nn.Parameter, Tensor]:
        """The averaged weights, copies; none for an optimizer that keeps none."""
        if self.averaged is None:
            return {}
        return {p: self.averaged(p.detach().float(), self.optimizer.state.get(p, {})) for p in self.parameters}

    def in_turn(self) -> list[list[dict[str, Any]]]:
        """The groups one after the other; all at once if they go together."""
        every = self.optimizer.param_groups
        return [every] if self.groups_together else [[group] for group in every]

    @contextmanager
    def reduced(self, some: list[dict[str, Any]]) -> Iterator[None]:
        """Within the context the part consists of these groups alone."""
        every, self.optimizer.param_groups = self.optimizer.param_groups, some
        try:
            yield
        finally:
            self.optimizer.param_groups = every


@dataclass(frozen=True)
class Optimizer:
    """All parts, in the order in which their state is numbered."""

    parts: tuple[OptimizerPart, ...]
    rounding: Rounding | None = None
    """Rounding of weights of 16 bits, whose moments and arithmetic are float32; None for float32 weights."""
    in_backward: InBackward = False
    """When weights are moved during the backward pass (`in_backward.py`); False: after it."""

    def step(
        self,
        learning_rate: float,
        skip: Tensor,
        factor: Tensor | None = None,
        number: int = 0,
        average: Average | None = None,
    ) -> bool:
        """Update `number` of all parameters, unless `skip` (0-dim bool on the device): that leaves weights and moments.

        `factor` multiplies the gradients; None for one. They are spent afterwards. Returns whether `average` was moved,
        too, as it is where one pass over memory does both.
        """
        average = average if self.moves_averages else None
        self.set_rate(learning_rate)
        for index, part in enumerate(self.parts):
            # Widened group by group, as this bounds the float32 memory.
            turns = [part.optimizer.param_groups]
            for place, some in enumerate(turns if self.rounding is None else part.in_turn()):
                self.move(part, some, Place(number, seat(index, place)), skip, factor, average)
        return average is not None

    @property
    def moves_averages(self) -> bool:
        """True if one pass over memory moves weights and averages: averages are moved once an update, by such a pass
        over all parts, or afterwards by the EMA itself."""
        return self.rounding is None and all(part.one_pass for part in self.parts)

    def set_rate(self, learning_rate: float) -> None:
        """The learning rate of the next update."""
        for part in self.parts:
            for group in part.optimizer.param_groups:
                group["lr"] = learning_rate * group["share"]

    @torch.no_grad()
    def move(
        self,
        part: OptimizerPart,
        some: list[dict[str, Any]],
        place: Place,
        skip: Tensor,
        factor: Tensor | None,
        average: Average | None,
    ) -> None:
        """Moves these groups of a part by their gradients times `factor`, unless `skip`. `place` decides how weights of
        16 bits are rounded."""
        with part.reduced(some):
            if self.rounding is not None:
                # The memory of the weights is exchanged, so that no optimizer knows of 16 bits and moments are float32.
                with widened(part.parameters, factor, self.rounding, place):
                    part.step(skip)
            elif part.one_pass:
                one_pass.move(part.optimizer, skip, factor, average)
            else:
                gradients = [p.grad for p in part.parameters if p.grad is not None]
                if factor is not None and gradients:
                    torch._foreach_mul_(gradients, factor)
                part.step(skip)

    def learning_rates(self) -> dict[str, float]:
        """Those of the latest update, of the parameters that have one of their own, by its pattern."""
        every = [group for part in self.parts for group in part.optimizer.param_groups]
        return {group["pattern"]: group["lr"] for group in every if group["pattern"]}

    def zero_grad(self) -> None:
        for part in self.parts:
            part.optimizer.zero_grad(set_to_none=True)

    def averages(self) -> dict[nn.Parameter, Tensor]:
        """The weights to evaluate with, where the optimizer averages by itself; else nothing."""
        return {p: average for part in self.parts for p, average in part.averages().items()}

    def tensors(self) -> dict[str, Tensor]:
        """The state by `index.name`, in the order of the parameters, and by `group.index.name` what groups count."""
        found: dict[str, Tensor] = {}
        shared: set[int] = set()
        begun = any(part.optimizer.state.get(p) for part in self.parts for p in part.parameters)
        for prefix, entry, part in self._entries():
            # A parameter without state is not the same as one that the file has lost: it is marked.
            if begun and not entry:
                found[f"{prefix}.{UNTOUCHED}"] = torch.zeros(1, dtype=torch.uint8)
            for name, value in entry.items():
                if name in part.constants or (prefix.startswith("group") and name not in part.counters):
                    continue
                if isinstance(value, Tensor):
                    # The count of updates is one tensor for many parameters, and a file holds each tensor once.
                    found[f"{prefix}.{name}"] = value.clone() if id(value) in shared else value
                    shared.add(id(value))
                else:
                    # Python's own width: nothing is rounded.
                    kind = torch.int64 if isinstance(value, int) else torch.float64
                    found[f"{prefix}.{name}{NUMBER}"] = torch.tensor(value, dtype=kind)
        return found

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in the order in which their state is numbered."""
        return [p for part in self.parts for p in part.parameters]

    def entries(self) -> list[list[set[str]]]:
        """For each parameter the sets of entries that its state may have in a checkpoint, once updates were made."""
        for part in self.parts:
            self._begin(part)
        found: list[list[set[str]]] = []
        for part in self.parts:
            for p in part.parameters:
                begun = set(part.optimizer.state[p]) - set(part.constants)
                found.append([set(part.made), {UNTOUCHED}] if part.made else [begun])
        return found

    def load(self, tensors: Mapping[str, Tensor], anew: Collection[str] = ()) -> None:
        """Puts back what `tensors` gave, but for the parameters of these numbers, which are reset; UserError if it
        belongs to another set of parameters."""
        indexes = {key.partition(".")[0] for key in tensors} - {"group"}
        count = len(self.parameters)
        if indexes and indexes | {*anew} != set(map(str, range(count))):
            raise UserError(
                f"the optimizer state has {len(indexes)} parameters, this run trains {count}", code="conflict"
            )
        if not indexes:
            return
        for part in self.parts:
            self._begin(part)
        saved = self._given(tensors)
        # After shapes and counts: NaN in a file of another model would be the wrong complaint.
        check_finite("the optimizer state", tensors)
        parameters = dict(enumerate(self.parameters))
        for prefix, entry, _ in self._entries():
            p = parameters[int(prefix)] if prefix.isdecimal() else None
            for name, value in saved.get(prefix, {}).items():
                if p is not None and isinstance(value, Tensor):
                    entry[name] = self._arranged(f"{prefix}.{name}", value, entry.get(name), p)
                else:
                    entry[name] = value

    def _arranged(self, key: str, value: Tensor, held: Any, p: nn.Parameter) -> Tensor:
        """A saved tensor of a parameter on its device, in the memory layout in which the optimizer makes it (`held` if
        it has made it already): fused kernels walk weights, gradients and moments as they lie, and checkpoints hold
        everything contiguous. UserError for moments of another shape."""
        if key.endswith(_MOMENTS) and value.shape != p.shape:
            raise UserError(f"the optimizer state does not match: {key} is {list(value.shape)}, unlike its parameter")
        like = held if isinstance(held, Tensor) and held.shape == value.shape else p
        if like.shape != value.shape:
            return value.to(p.device)
        # Weights that are rounded are widened to contiguous ones for an update.
        layout = torch.preserve_format if self.rounding is None else torch.contiguous_format
        strides = torch.empty_like(like, device="meta", memory_format=layout).stride()
        if value.stride() == strides:
            return value.to(p.device)
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=p.device).copy_(value)

    def _begin(self, part: OptimizerPart) -> None:
        """State of each parameter of a part, for saved values to be put into."""
        if self.rounding is None:
            part.begin()
        else:
            for group, some in enumerate(part.in_turn()):
                with part.reduced(some), widened(part.parameters, None, self.rounding, Place(0, group)):
                    part.begin()
        part.optimizer.state |= {p: part.optimizer.state.get(p) or {} for p in part.parameters}

    def _given(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Saved tensors and numbers, by entry and name."""
        given: dict[str, dict[str, Any]] = {}
        for key, value in tensors.items():
            prefix, _, name = key.removesuffix(NUMBER).rpartition(".")
            if name == UNTOUCHED:
                continue
            given.setdefault(prefix, {})[name] = value.item() if key.endswith(NUMBER) else value
        return given

    def _entries(self) -> Iterator[tuple[str, dict[str, Any], OptimizerPart]]:
        """Each parameter's state under its number, then each group under its own."""
        parameters = [(p, part) for part in self.parts for p in part.parameters]
        for index, (p, part) in enumerate(parameters):
            entry = part.optimizer.state.get(p)
            yield str(index), {} if entry is None else entry, part
        all_groups = [(group, part) for part in self.parts for group in part.optimizer.param_groups]
        for index, (group, part) in enumerate(all_groups):
            yield f"group.{index}", group, part


def build(
    settings: OptimizerSettings, trained: Mapping[str, nn.Parameter], rounding: Rounding | None = None
) -> Optimizer:
    """The optimizer that the settings name, of all these parameters.

    UserError for a pattern that matches none of them, for a library that is not installed, for a device that it cannot
    work on.
    """
    groups.check(settings.weight_decay_exclude or (), trained, "optimizer.weight_decay_exclude")
    groups.check_rates(settings, trained)
    parts: list[OptimizerPart] = plugins.find("optimizers", settings.name).build(settings, trained)
    every = [group for part in parts for group in part.optimizer.param_groups]
    assert all("share" in group for group in every), "an optimizer's groups are made by groups.decay_groups"
    return Optimizer(tuple(parts), rounding, settings.in_backward)


def seat(part: int, turn: int) -> int:
    """The number of what is widened at once, by which its rounding is keyed."""
    return part << 32 | turn


def not_installed(name: str, package: str) -> UserError:
    """The error for an optimizer whose library is missing."""
    text = f"optimizer.name={name} needs {package}: {install(package)}"
    return UserError(text, code="not_installed", setting="optimizer.name")
