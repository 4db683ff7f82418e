"""Guards against non-finite numbers: in updates, counted without waiting for the device, and in saved tensors."""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from daguerre.errors import FAILED, UserError
from daguerre.training.sharding import UNSHARDED, Sharding
from daguerre.types import Batch

_NAMES_SHOWN = 8
READ_EVERY = 50
"""Updates after which the flags are read even if no numbers are: one wait for the device in so many updates costs
nothing that can be measured, and a hopeless run goes on for no longer."""


class NonFiniteError(UserError):
    """Too many updates in a row had a non-finite loss or gradient."""

    exit_code = FAILED
    code = "failed"


class Guard:
    """Flags of the latest updates, read by the host when it reads numbers anyway, and every `READ_EVERY` updates."""

    def __init__(self, steps: int = 0, in_a_row: int = 0) -> None:
        self._steps, self._in_a_row, self._longest = steps, in_a_row, 0
        self._seen: list[Tensor] = []
        self._unread: list[tuple[int, Tensor, list[str], list[Tensor]]] = []
        self._torn: Tensor | None = None
        # Bounded: a run may skip single updates for weeks.
        self._culprits: deque[tuple[int, list[str], list[str]]] = deque(maxlen=100)

    def see(self, loss_B: Tensor, valid_B: Tensor) -> None:
        """Remembers which samples of a micro-batch have a loss that is not finite, until its update is noted."""
        # An empty slot is in order, whatever its loss: it takes no part in the update.
        self._seen.append(torch.isfinite(loss_B.detach()) | (valid_B <= 0))

    def note(self, step: int, finite: Tensor, micro_batches: Sequence[Batch]) -> None:
        """Remembers whether update `step` was finite (0-dim bool on the device), and its samples."""
        names = [name for batch in micro_batches for name in batch.names]
        self._unread.append((step, finite, names, self._seen))
        self._seen = []

    def note_torn(self, step: int, torn: Tensor) -> None:
        """Remembers whether update `step` moved some of the weights before a gradient that is not finite (0-dim bool on
        the device): nothing can be trained or saved after the first one."""
        first = torch.zeros_like(torn, dtype=torch.int64) if self._torn is None else self._torn
        self._torn = torch.where((first == 0) & torn, step, first)

    def counts(self) -> tuple[int, int]:
        """Non-finite updates of the run so far, and in a row up to now. Reads the device. NonFiniteError after an
        update that left weights which belong to no update."""
        if self._torn is not None and (step := int(self._torn)):
            raise NonFiniteError(
                f"a gradient of update {step} was NaN or infinite when a part of the weights had moved already "
                "(optimizer.in_backward=at_once), so the run was stopped, and nothing of that was saved. Go on from "
                "the last checkpoint with optimizer.in_backward=after_norm, which looks at all gradients first and "
                "leaves such updates out (docs/trouble.md#nan)"
            )
        flags = torch.stack([finite for _, finite, *_ in self._unread]).tolist() if self._unread else []
        for finite, (step, _, names, seen) in zip(flags, self._unread, strict=True):
            if finite:
                self._in_a_row = 0
                continue
            self._steps += 1
            self._in_a_row += 1
            # The longest row, not the present one: it may have begun and ended between two readings.
            self._longest = max(self._longest, self._in_a_row)
            in_order = torch.cat(seen).tolist() if seen else []  # read only where an update failed
            self._culprits.append((step, names, [name for name, own in zip(names, in_order, strict=False) if not own]))
        self._unread.clear()
        return self._steps, self._in_a_row

    def check(self, limit: int, sharding: Sharding = UNSHARDED) -> None:
        """Raises NonFiniteError, naming the samples of all devices, if `limit` updates in a row were not finite."""
        self.counts()
        if self._longest < limit:
            return
        # All devices come here together, as whether an update was finite is the same for all: so their rows match.
        everyone = sharding.gather(list(self._culprits)[-limit:])
        lines = []
        for update in zip(*everyone, strict=True):
            every, odd = ([name for each in update for name in each[kind]] for kind in (1, 2))
            shown = ", ".join((odd or every)[:_NAMES_SHOWN]) + (" ..." if (odd or every)[_NAMES_SHOWN:] else "")
            lines.append(f"  step {update[0][0]}: {shown}" + (f" (of {len(every)} the loss of these)" if odd else ""))
        raise NonFiniteError(
            f"the loss or a gradient was NaN or infinite in {limit} updates in a row, so the run was stopped; its "
            "weights are those before these updates. Samples of these updates:\n" + "\n".join(lines) + "\n"
            "Try a lower optimizer.learning_rate or training.mixed_precision=no, and look at these samples "
            "(docs/trouble.md#nan)."
        )


def check_finite(what: str, tensors: Mapping[str, Tensor]) -> None:
    """UserError naming the first saved tensors with NaN or infinity: the file, which the caller names, is damaged or
    forged."""
    odd = sorted(name for name, each in tensors.items() if each.is_floating_point() and not torch.isfinite(each).all())
    if odd:
        shown = ", ".join(odd[:3]) + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")
        raise UserError(
            f"{what} have NaN or infinity in {shown}, which no run ever saves. Use another checkpoint (a run goes on "
            "from it with resume_from_checkpoint=step-...), or start a new run",
            code="damaged",
        )


def misfits(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """The first names and shapes in which tensors differ from those of the network; "" if they fit."""
    problems = [f"missing {name}" for name in own.keys() - tensors.keys()]
    problems += [f"unknown {name}" for name in tensors.keys() - own.keys()]
    problems += [
        f"{name} is {list(tensors[name].shape)}, the network has {list(own[name].shape)}"
        for name in own.keys() & tensors.keys()
        if own[name].shape != tensors[name].shape
    ]
    return "; ".join(sorted(problems)[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
