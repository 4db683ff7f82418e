"""Passes that are recorded once and replayed (training.capture): one launch in place of the thousands of an update.

A GPU that waits for its host between small kernels computes a LoRA at a tenth of its speed. A CUDA graph holds all
launches of the forward and backward passes of an update, with the addresses of what they read and write. So it is made
for one shape of batches, and whatever changes from one update to the next lies in tensors that stay where they are: a
copy of the batch, and the count of its samples. Dropout's seed the graph takes from torch's generator. What follows
(sums over devices, clipping, optimizer, averages) is a few launches, and stays as it is.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.training import device as devices
from daguerre.training import passes
from daguerre.training.passes import LossFn, See
from daguerre.training.precision.dtypes import Autocast
from daguerre.training.precision.loss_scaling import Scaler
from daguerre.training.sharding import Sharding
from daguerre.types import Batch, LossTerms

BEFORE = 2
"""Updates of a shape that are computed before it is recorded: kernels are compiled and chosen there, which a recording
must not do."""


_Computed = Callable[[Sequence[Batch], int | Tensor, See], Tensor]
"""Computes the passes over batches, given the count of valid samples."""


class Graphs(Protocol):
    """A device that records what it is given to do."""

    def aside(self) -> AbstractContextManager[object]:
        """Within the context passes are computed where they will be recorded."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records what `work` gives the device to do, which need not be done yet; returns what does it, again and
        again, on the same tensors."""


class CudaGraphs(Graphs):
    """CUDA graphs of one run, which share their memory: what one leaves is read before the next one is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        # Autograd adds gradients on the stream that first saw their parameters: the one of the recording.
        usual = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            yield
        usual.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: the loader's threads go on to pin memory and send batches, which is no part of it.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


@dataclass
class _Recording:
    """The passes of updates of one shape."""

    batches: Sequence[Batch]
    count: Tensor
    weights: Sequence[nn.Parameter]
    """All of the net: walking through its modules takes longer than all else that an update asks of the host."""
    addresses: Sequence[int]
    """Where these lay."""
    replay: Callable[[], None]
    loss: Tensor
    terms: Sequence[tuple[LossTerms, Tensor]]
    """Of each micro-batch, with which of its slots are valid."""
    gradients: Mapping[nn.Parameter, Tensor]


class Recorder:
    """`passes.backward` for a net of which each device has all: the same numbers to the bit.

    Devices sum their gradients when the passes are done, not while they go on: a recording would hold their
    collectives, and each device records when it has seen a shape often enough, which others may not have.
    """

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._computed: Counter[Any] = Counter()
        self._recordings: dict[Any, _Recording] = {}

    def backward(
        self,
        net: nn.Module,
        micro_batches: Sequence[Batch],
        loss_fn: LossFn,
        valid: int,
        autocast: Autocast,
        see: See,
        scaler: Scaler,
        sharding: Sharding,
    ) -> Tensor:
        """Leaves the gradients of the global batch in the parameters and returns its loss; all of it, and what `see`
        is given, stays what it is until the next update."""

        def computed(batches: Sequence[Batch], count: int | Tensor, see: See) -> Tensor:
            return passes.backward(net, batches, loss_fn, count, autocast, see, scaler)

        loss = self._passed(net, micro_batches, valid, see, computed)
        sharding.after_backward()
        return sharding.sum(loss)

    def _passed(
        self, net: nn.Module, micro_batches: Sequence[Batch], valid: int, see: See, computed: _Computed
    ) -> Tensor:
        """This device's part of the gradients, in the parameters, and of the loss."""
        shape = tuple(_shape(batch) for batch in micro_batches)
        if self._computed[shape] < BEFORE:
            self._computed[shape] += 1
            with self._graphs.aside():
                return computed(micro_batches, valid, see)
        recording = self._recordings.get(shape)
        if recording is None or recording.addresses != _addresses(recording.weights):
            self._recordings.pop(shape, None)  # its memory is for the new one
            recording = self._recorded(net, micro_batches, valid, computed)
            self._recordings[shape] = recording
        else:
            recording.count.fill_(valid)
            for held, given in zip(recording.batches, micro_batches, strict=True):
                for place, tensor in zip(_tensors(held).values(), _tensors(given).values(), strict=True):
                    place.copy_(tensor, non_blocking=True)
        recording.replay()
        for p, gradient in recording.gradients.items():
            p.grad = gradient
        for terms, valid_B in recording.terms:
            see(terms, valid_B)
        return recording.loss

    def _recorded(self, net: nn.Module, micro_batches: Sequence[Batch], valid: int, computed: _Computed) -> _Recording:
        device = devices.of(net)
        batches = [_placed(batch, device) for batch in micro_batches]
        count = torch.full((), float(valid), device=device)
        terms: list[tuple[LossTerms, Tensor]] = []
        losses: list[Tensor] = []

        def see(of_batch: LossTerms, valid_B: Tensor) -> None:
            terms.append((_detached(of_batch), valid_B))

        def work() -> None:
            losses.append(computed(batches, count, see))

        try:
            replay = self._graphs.record(work)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UserError(
                f"training.capture=true: the GPU could not record a pass ({str(error).splitlines()[0]}): some part of "
                "it waits for what the GPU has computed. Go on with training.capture=false, which gives the same "
                "numbers",
                code="unsupported",
                setting="training.capture",
            ) from error
        (loss,) = losses
        weights = list(net.parameters())
        gradients = {p: p.grad for p in weights if p.grad is not None}
        return _Recording(batches, count, weights, _addresses(weights), replay, loss, terms, gradients)


def _addresses(weights: Sequence[nn.Parameter]) -> list[int]:
    return [p.data_ptr() for p in weights]


def _tensors(batch: Batch) -> dict[tuple[str, str], Tensor]:
    """The tensors of a batch that a pass reads, by field and name."""
    found = {
        (field.name, name): rows
        for field in fields(batch)
        if isinstance(held := getattr(batch, field.name), Mapping) and "host" not in field.metadata
        for name, rows in held.items()
    }
    found["valid_B", ""] = batch.valid_B
    if batch.weights_B is not None:
        found["weights_B", ""] = batch.weights_B
    return found


def _shape(batch: Batch) -> tuple[Any, ...]:
    return tuple((key, tensor.shape, tensor.dtype) for key, tensor in _tensors(batch).items())


def _placed(batch: Batch, device: torch.device) -> Batch:
    """The batch with all that a pass reads in tensors of its own on the device."""

    def placed(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)

    weights_B = None if batch.weights_B is None else placed(batch.weights_B)
    return replace(batch.map(placed), valid_B=placed(batch.valid_B), weights_B=weights_B)


def _detached(terms: LossTerms) -> LossTerms:
    """The numbers without the graph by which they were computed."""

    def detached(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: each.detach() for name, each in value.items()}
        return None if value is None else value.detach()

    return LossTerms(**{field.name: detached(getattr(terms, field.name)) for field in fields(terms)})
