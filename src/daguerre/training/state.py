"""The state of training, and its conversion to and from a checkpoint's tensors and documents."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from daguerre import keys
from daguerre.errors import UserError
from daguerre.training import device as devices
from daguerre.training.ema import EMA
from daguerre.training.guard import Guard, check_finite, misfits
from daguerre.training.meters import Meter
from daguerre.training.optimizers.in_backward import PiecewiseUpdate
from daguerre.training.optimizers.optimizer import Optimizer, build
from daguerre.training.performance.recording import Recorder
from daguerre.training.precision.dtypes import Precision
from daguerre.training.precision.loss_scaling import Scaler
from daguerre.training.precision.stochastic_rounding import Rounding, narrow
from daguerre.training.settings import EMASettings, OptimizerSettings
from daguerre.training.sharding import UNSHARDED, Sharding, cut
from daguerre.types import Batch, LossTerms, Stateful

_FLOAT32 = Precision()


@dataclass
class TrainState:
    """Weights, averages, optimizer and counts; the loop moves it, checkpoints hold it.

    A checkpoint needs no random state: numbers are keyed by sample (`daguerre.keys`).
    """

    net: nn.Module
    trained: dict[str, nn.Parameter]
    """Trained parameters by name, in the order of the net; of split ones this device's part."""
    optimizer: Optimizer
    ema: EMA
    objective: Stateful
    meter: Meter
    """Sums since numbers were last logged: a run that goes on logs the same means."""
    step: int = 0
    """Updates done (a skipped non-finite one counts: its samples were used)."""
    slots: int = 0
    """Position in the plan: sample slots trained on, undecodable ones included."""
    samples: int = 0
    """Samples trained on."""
    guard: Guard = field(default_factory=Guard)
    """Counts of the updates that were skipped because the loss or a gradient was not finite."""
    scaler: Scaler = field(default_factory=Scaler)
    """Multiplies the loss before the backward pass."""
    sharding: Sharding = UNSHARDED
    seed: int = 0
    recorder: Recorder | None = None
    """Records forward and backward passes, and replays them; None: each update computes its own."""
    of_references: frozenset[str] = frozenset()
    """Names of the parameters that an update without reference images leaves as they are."""
    saved: frozenset[str] = frozenset()
    """Names in the net's state dict of what a checkpoint holds; the rest is the base, which never changes."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trained parameters, in the order of the net."""
        return list(self.trained.values())

    @classmethod
    def start(
        cls,
        net: nn.Module,
        objective: Stateful,
        optimizer: OptimizerSettings,
        ema: EMASettings,
        precision: Precision = _FLOAT32,
        seed: int = 0,
        sharding: Sharding = UNSHARDED,
        saved: frozenset[str] | None = None,
        float32: frozenset[str] = frozenset(),
    ) -> TrainState:
        """The state before the first update, around the present weights of `net`, stored as `precision` says. `seed`
        decides rounding to 16 bits, and dropout inside the net. A checkpoint holds the names in `saved`, by default all
        of the net; parameters in `float32` keep that type. UserError for an optimizer that needs whole parameters if
        `sharding` splits them."""
        # First, as the optimizer and the averages are made of the parameters as they are stored.
        precision.store(net, float32)
        device = devices.of(net)
        trained = {name: p for name, p in sharding.held(net).items() if p.requires_grad}
        moving = build(optimizer, trained, _rounding(precision, seed, trained))
        if sharding.splits and not all(part.elementwise for part in moving.parts):
            raise UserError(
                f"optimizer.name={optimizer.name} works on whole parameters, and this mesh splits them over devices "
                "(mesh.*_fsdp_parallelism, mesh.*_tensor_parallelism): use adamw, lion or schedule_free, or data "
                "parallelism alone",
                code="conflict",
                setting="optimizer.name",
            )
        averages, scaler, meter = EMA.of(ema, trained), precision.scaler(device), Meter(device, sharding)
        saved = frozenset(sharding.weights(net)) if saved is None else saved
        return cls(
            net, trained, moving, averages, objective, meter, scaler=scaler, sharding=sharding, seed=seed, saved=saved
        )

    def see(self, terms: LossTerms, valid_B: Tensor) -> None:
        """Notes the losses of a micro-batch, for the means that are logged, the guard and the objective."""
        self.meter.add_terms(terms, valid_B)
        self.guard.see(terms.loss_B, valid_B)
        self.objective.observe(terms, valid_B)

    def idle(self, micro_batches: Sequence[Batch]) -> set[nn.Parameter]:
        """The parameters that no micro-batch of any device reaches. Their gradients, zeros all, are to be dropped: an
        optimizer would count the update, and let moments and weights decay."""
        if not self.of_references or self.sharding.total(sum(batch.has_references for batch in micro_batches)):
            return set()
        return {self.trained[name] for name in self.of_references & self.trained.keys()}

    def move(self, learning_rate: float, skip: Tensor, factor: Tensor | None) -> None:
        """Updates weights, moments and averages by the gradients times `factor`, which are dropped, and the learnt
        values of the objective; if `skip`, all but the averages stay, and these go on around the weights."""
        # Given to the optimizer: moving the average in the same pass over memory saves reading all weights once more.
        average = self.ema.next(self.step + 1)
        moved = self.optimizer.step(learning_rate, skip, factor, self.step, average)
        self.optimizer.zero_grad()
        self._moved(skip, moved)

    def piecewise(self, learning_rate: float) -> PiecewiseUpdate:
        """The same update for one parameter after the other; `finish` must follow."""
        return PiecewiseUpdate(self.optimizer, learning_rate, self.step, self.ema.next(self.step + 1))

    def finish(self, pieces: PiecewiseUpdate, skip: Tensor) -> None:
        """Ends an update in pieces, after which all is as after `move`."""
        self._moved(skip, pieces.finish(skip))

    def _moved(self, skip: Tensor, moved: bool) -> None:
        self.step += 1
        self.ema.update(self.step, moved)
        self.objective.absorb(self.sharding.sum, skip)  # an update that is left out teaches the objective nothing

    def dropout_seed(self) -> int:
        """The seed of dropout inside the net in the next update: the only chance that depends on the cut of batches."""
        return int(keys.words(self.seed, "dropout", self.step, self.sharding.rank, count=1)[0] >> 1)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Tensors by file and name, as a checkpoint stores them."""
        files: dict[str, dict[str, Tensor]] = {
            "model": _of(self.sharding.weights(self.net), self.saved),
            "optimizer": self.optimizer.tensors(),
        }
        files |= {"ema": self.optimizer_averages(), **self.ema.tensors()}
        files |= {"objective": self.objective.state(), "meter": self.meter.state(), "scaler": self.scaler.state()}
        return {name: tensors for name, tensors in files.items() if tensors}

    def optimizer_averages(self) -> dict[str, Tensor]:
        """Averaged weights that the optimizer keeps itself, copies by name; nothing for most."""
        averages = self.optimizer.averages()
        return {name: averages[p] for name, p in self.trained.items() if p in averages}

    def parameter_of(self, file: str, name: str) -> str | None:
        """The parameter to which a tensor of `tensors` belongs: its weights, averages and moments are split the same
        way."""
        if file == "optimizer":
            number = name.partition(".")[0]
            return self._numbered[int(number)] if number.isdecimal() else None
        return name if file in ("model", *self.ema.files) and name in self._held else None

    def held(self, name: str) -> nn.Parameter:
        """This device's part of a parameter, trained or not."""
        return self._held[name]

    @cached_property
    def _numbered(self) -> list[str]:
        # Optimizers number parameters by group, which is not the order of the net.
        names = {p: name for name, p in self.trained.items()}
        return [names[p] for p in self.optimizer.parameters]

    @cached_property
    def _held(self) -> dict[str, nn.Parameter]:
        return self.sharding.held(self.net)

    def start_averages(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes whole weights of every trained parameter the average."""
        self.ema.start_from(
            {name: cut(tensors[name], self.sharding.part(name), p.shape) for name, p in self.trained.items()}
        )

    def document(self) -> dict[str, Any]:
        steps, in_a_row = self.guard.counts()
        counts = {"step": self.step, "slots": self.slots, "samples": self.samples}
        return {**counts, "nonfinite_steps": steps, "nonfinite_in_a_row": in_a_row}

    def load(
        self,
        tensors: Mapping[str, Mapping[str, Tensor]],
        document: Mapping[str, Any],
        anew: Collection[str] = (),
        unlike: Collection[str] = (),
    ) -> None:
        """Takes over a checkpoint, but for what is reset: files, and numbers of parameters in the optimizer's state
        (`training/change.py`). UserError if its tensors do not fit this run's networks."""
        known = {"model", "optimizer", "ema", *self.ema.tensors(), "objective", "meter", "scaler"}
        # Strictly: what is left out silently would be a lost average or a lost table of loss weights.
        if unknown := sorted(tensors.keys() - known):
            names = ", ".join(unknown)
            raise UserError(f"the checkpoint holds {names}, which this run would not use", code="conflict")
        load_weights(self.net, tensors["model"], self.sharding, self.saved)
        self.optimizer.load(tensors.get("optimizer", {}), unlike)
        # After the weights: averages that start anew are copies of them.
        self.ema.load(tensors, anew)
        if "objective" not in anew:
            self.objective.load_state(dict(tensors.get("objective", {})))
        self.meter.load(tensors.get("meter", {}))
        if "scaler" not in anew:
            self.scaler.load(tensors.get("scaler", {}))
        self.step, self.slots, self.samples = document["step"], document["slots"], document["samples"]
        self.guard = Guard(document["nonfinite_steps"], document["nonfinite_in_a_row"])


@contextmanager
def evaluating(state: TrainState, averaged: bool = True) -> Iterator[None]:
    """Within the context the net is in evaluation mode and computes with its averaged weights, unless these are not
    asked for."""
    averages = (state.ema.averages or state.optimizer_averages()) if averaged else {}
    state.net.eval()
    # The memory changes places: no third copy of the weights is needed, and putting it back is exact.
    try:
        with state.sharding.swapped(state.net, state.trained, averages):
            yield
    finally:
        state.net.train()  # also after an error: some of them, such as a full disk, do not end a run


def _of(weights: Mapping[str, Tensor], names: Collection[str] | None) -> dict[str, Tensor]:
    """The weights of these names, by default all, in the order of the net."""
    return {name: tensor for name, tensor in weights.items() if names is None or name in names}


def _rounding(precision: Precision, seed: int, trained: Mapping[str, nn.Parameter]) -> Rounding | None:
    """The rounding of weights; None where none has 16 bits."""
    return precision.rounding(seed) if any(narrow(p) for p in trained.values()) else None


def load_weights(
    net: nn.Module, tensors: Mapping[str, Tensor], sharding: Sharding = UNSHARDED, saved: Collection[str] | None = None
) -> None:
    """Loads this device's part of the weights of `net` that are `saved`, by default all. Each of them must be in
    `tensors` and nothing else: UserError lists names and shapes that do not fit."""
    held = _of(sharding.weights(net), saved)
    if problems := misfits(held, tensors):
        raise UserError(f"the saved weights do not match this recipe's networks: {problems}", code="conflict")
    check_finite("the saved weights", {name: tensors[name] for name in held})
    with torch.no_grad():
        for name, value in held.items():
            # In place: optimizer, averages and FSDP2 refer to this very memory.
            value.copy_(tensors[name])
    sharding.rewritten(net)


def adopt(
    net: nn.Module, tensors: Mapping[str, Mapping[str, Tensor]], saved: Collection[str] | None = None
) -> list[str]:
    """`init_from`: takes another run's weights (its averages where it has them) and nothing else, before a state is
    made of the net. `saved` are the weights that a checkpoint of this run holds, by default all.

    A component that only this run trains keeps the weights it has; returns a line for each. UserError for one that
    only the other run trained.
    """
    weights = dict(tensors["model"])
    # The averages count: it is these that the other run has generated, validated and exported with.
    weights |= tensors.get("ema", {})
    ours = _of(net.state_dict(), saved)
    here, there = ({name.partition(".")[0] for name in names} for names in (ours, weights))
    if more := sorted(there - here):
        raise UserError(
            f"init_from: that run also trained {', '.join(more)}, which this recipe loads from elsewhere: train it "
            f"with adapter.train='[{', '.join(sorted(here | there))}]', or load it from the run's export with "
            f"{' '.join(f'model.{name}=RUN/pipeline' for name in more)}, as all other components, and without "
            "init_from",
            code="conflict",
            setting="init_from",
        )
    new = sorted(here - there)
    load_weights(net, weights | {name: ours[name] for name in ours if name.partition(".")[0] in new}, saved=saved)
    return [f"{name} starts from the base model: the run of init_from did not train it" for name in new]
