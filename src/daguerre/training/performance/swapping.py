"""Blocks of a network that wait in the host's memory, and are on the device while they compute.

The call of such a block puts copies of its tensors into their places, and sends the tensors of the block that came
next the last time, by a stream of their own, so that they are there when they are needed: at most two blocks are on the
device. What the block keeps of its copies for the backward pass is remembered as a place in them, and read from new
copies then, so that nothing but these two blocks is held. Frozen tensors are never sent back.

The gradient of a trained weight comes to a stand-in without memory, on the device. There the weight is moved as soon
as its gradient is whole (`optimizers/in_backward.py`), with its moments and averages, which wait in the host's memory,
too, and all of them are sent back.

On a CPU both memories are the host's: the same code runs, and tests count the bytes of each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from daguerre.training.memory_tracker import elsewhere
from daguerre.types import wait, waits

AT_ONCE = 2
"""Blocks of a network that are on the device at once: one that computes, and the next one."""
_PIECE_BYTES = 1 << 27
"""Pinned memory is taken in pieces of this size: torch rounds each up to a power of two."""
_ALIGNED = 256
"""Tensors begin at multiples of so many bytes, as an allocator has it, on which kernels count."""
_PLACE = "swapped"
"""Attribute of a block that waits: its `Swap`, and its number there; of a trained weight in it: its `_Trained`."""


class Pool:
    """Bytes of the memory of one kind, as long as anything refers to it."""

    def __init__(self) -> None:
        self.bytes = 0
        self.peak = 0

    def note(self, tensor: Tensor) -> None:
        """Counts the memory under a tensor that was just made."""
        memory = tensor.untyped_storage()
        self.bytes += memory.nbytes()
        self.peak = max(self.peak, self.bytes)
        # torch keeps one Python object for a storage as long as it lives, so that its end is the end of the memory.
        weakref.finalize(memory, self._freed, memory.nbytes())

    def _freed(self, count: int) -> None:
        self.bytes -= count


class _Kept(NamedTuple):
    """A tensor in the memory of a block's copies."""

    number: int
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


@dataclass(eq=False)
class _Copies:
    """The tensors of a block on the device, one after the other in one piece of memory."""

    memory: Tensor
    by_source: dict[int, Tensor]
    """The copy of each tensor, by its id."""
    arrived: torch.cuda.Event | None
    """None once what computes waits for it."""
    made_of: list[int]
    """Where the memory of the tensors was: averages may have taken their place for a pass."""

    def tensor(self, kept: _Kept) -> Tensor:
        """The tensor at a place."""
        return self.memory.view(kept.dtype).as_strided(kept.size, kept.stride, kept.offset)


class _Block:
    """The places of a block's tensors that wait."""

    def __init__(self, module: nn.Module) -> None:
        self.slots: list[tuple[Any, str]] = [
            (table, name)
            for each in module.modules()
            for table in (each._parameters, each._buffers)
            for name, tensor in table.items()
            if waits(tensor)
        ]
        self.returned: torch.cuda.Event | None = None
        """After it, all that was sent back is in the host's memory."""

    @property
    def tensors(self) -> list[Tensor]:
        """As they are now; a tensor with several places once."""
        return list({id(table[name]): table[name] for table, name in self.slots}.values())


@dataclass(eq=False)
class _Trained:
    """A trained weight that waits."""

    swap: Swap
    number: int
    """Of its block."""
    stand_in: Tensor
    """Of its shape and without memory, on the device: autograd's leaf."""
    home: Tensor | None = None
    """Its memory of the host, while it is on the device."""


class _Enter(torch.autograd.Function):
    """The copy of a trained weight, whose gradient is that of the weight's stand-in."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, copy: Tensor) -> Tensor:
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Swap:
    """The blocks of one network that wait, in their order, and the copies that are on the device."""

    def __init__(self, network: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
        """Their tensors that are marked (`types.wait`) are put into memory of the host of their own, pinned for a GPU;
        `network` is called for each pass."""
        self.host, self.device = Pool(), Pool()
        self.sent_bytes = 0
        """Bytes of all that has been copied to the device."""
        self._where = device
        self._blocks = [_Block(module) for module in blocks]
        self._here: dict[int, _Copies] = {}
        self._followed: dict[tuple[int, bool], int] = {}
        """The block that came after a block the last time, in forward passes and in backward ones (True)."""
        self._latest: int | None = None
        self._before: int | None = None
        """The block that was called before the latest one."""
        self._stream, self._back = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        self._room = torch.empty(0, dtype=torch.uint8)
        """What is left of the newest piece of the host's memory."""
        self._place_on_host()
        network.register_forward_pre_hook(self._begin)
        for number, module in enumerate(blocks):
            vars(module)[_PLACE] = (self, number)
            inner = vars(module).get("forward")
            plain = type(module).forward if inner is None else inner.__func__
            # A bound method, around kernels and compiled code, which have put theirs there before.
            setattr(module, "forward", MethodType(_forward(plain), module))  # noqa: B010

    @property
    def held_bytes(self) -> int:
        """Bytes of all tensors that wait."""
        return sum(tensor.nbytes for block in self._blocks for tensor in block.tensors)

    @property
    def largest_bytes(self) -> int:
        """Most bytes of them that are on the device at once."""
        sizes = sorted(_layout(block.tensors)[1] for block in self._blocks)
        return sum(sizes[-AT_ONCE:])

    @property
    def trains(self) -> bool:
        """True if any of them is trained."""
        return any(tensor.requires_grad for block in self._blocks for tensor in block.tensors)

    def __len__(self) -> int:
        return len(self._blocks)

    @contextmanager
    def at_work(self, number: int) -> Iterator[None]:
        """Within the context the block's tensors are on the device."""
        copies, slots = self._ready(number, _in_backward()), self._blocks[number].slots
        before = [table[name] for table, name in slots]
        with self._keeping(number, copies) if torch.is_grad_enabled() else nullcontext():
            try:
                for (table, name), tensor in zip(slots, before, strict=True):
                    table[name] = self._entered(number, tensor, copies.by_source[id(tensor)])
                yield
            finally:
                for (table, name), tensor in zip(slots, before, strict=True):
                    table[name] = tensor

    def drop(self) -> None:
        """Frees the copies."""
        self._keep_only(())

    def _begin(self, network: nn.Module, inputs: Any) -> None:
        """Before each pass of the network."""
        self._latest = self._before = None
        if self.trains:
            self.drop()  # since the latest pass they may have been written to
        # On its way while what lies before the first block computes.
        if (first := self._followed.get((-1, False))) is not None:
            self._keep_only({first})
            self._send(first)

    def _ready(self, number: int, backward: bool) -> _Copies:
        """The copies of a block, after which what computes may be queued; the next block's are on their way."""
        if number != self._latest:
            if self._latest is not None or not backward:
                self._followed[-1 if self._latest is None else self._latest, backward] = number
            self._before, self._latest = self._latest, number
        following = self._followed.get((number, backward))
        # Behind the last block comes the backward pass, which begins with that and the one before.
        self._keep_only({number, self._before if following is None else following})
        copies = self._send(number)
        if copies.arrived is not None:
            torch.cuda.current_stream(self._where).wait_event(copies.arrived)
            copies.arrived = None
        if following is not None:
            self._send(following)
        return copies

    def _keep_only(self, numbers: Iterable[int | None]) -> None:
        for number in [own for own in self._here if own not in numbers]:
            copies = self._here.pop(number)
            if copies.arrived is not None:  # memory that is still written to is not given away
                torch.cuda.current_stream(self._where).wait_event(copies.arrived)

    def _send(self, number: int) -> _Copies:
        """The copies of a block, which may be on their way."""
        tensors = self._blocks[number].tensors
        made_of = [tensor.untyped_storage()._cdata for tensor in tensors]
        if number in self._here and self._here[number].made_of == made_of:
            return self._here[number]
        memory, made, arrived = self._copied(tensors, self._blocks[number].returned)
        by_source = dict(zip(map(id, tensors), made, strict=True))
        self._here[number] = _Copies(memory, by_source, arrived, made_of)
        return self._here[number]

    def _copied(
        self, tensors: Sequence[Tensor], after: torch.cuda.Event | None
    ) -> tuple[Tensor, list[Tensor], torch.cuda.Event | None]:
        """Memory on the device, and the copies of these tensors in it, which may be on their way."""
        offsets, size = _layout(tensors)
        memory = torch.empty(size, dtype=torch.uint8, device=self._where)
        self.device.note(memory)
        self.sent_bytes += size
        made = [_view(memory, offset, tensor) for offset, tensor in zip(offsets, tensors, strict=True)]
        if self._stream is None:
            _fill(made, tensors)
            return memory, made, None
        # What was queued before may still read the memory that the allocator has given out again.
        self._stream.wait_stream(torch.cuda.current_stream(self._where))
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            _fill(made, tensors)
            return memory, made, self._stream.record_event()

    def _entered(self, number: int, tensor: Tensor, copy: Tensor) -> Tensor:
        """The tensor that a block computes with: the copy, of a trained weight with its graph."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return copy
        entered: Tensor = _Enter.apply(self._trained(number, tensor).stand_in, copy)
        return entered

    def _trained(self, number: int, p: Tensor) -> _Trained:
        if _PLACE not in vars(p):
            with elsewhere():
                stand_in = torch.empty_strided(p.size(), p.stride(), dtype=p.dtype, device=self._where)
            # Its strides decide those of the gradient, with which kernels walk over weight and moments.
            stand_in.untyped_storage().resize_(0)
            vars(p)[_PLACE] = _Trained(self, number, stand_in.requires_grad_())
        own: _Trained = vars(p)[_PLACE]
        return own

    def copy_of(self, number: int, p: nn.Parameter) -> Tensor:
        """The copy of a weight of a block, in the backward pass."""
        return self._ready(number, True).by_source[id(p)]

    @contextmanager
    def lent(
        self, own: _Trained, p: nn.Parameter, state: Mapping[str, Any], average: Tensor | None, stay: Collection[str]
    ) -> Iterator[None]:
        """Within the context of a weight that is on the device, what belongs to it (but for the entries that `stay`
        there) is there, too; then all of it, with what was made within, is as it is now in the host's memory."""

        def every() -> list[Tensor]:
            found = [t for name, t in state.items() if isinstance(t, Tensor) and t.dim() and name not in stay]
            return found if average is None else [*found, average]

        there = every()
        if not all(map(waits, there)):  # new averages, or what a checkpoint was read to, where the weight waits
            for tensor in state.values():
                if isinstance(tensor, Tensor):
                    tensor.data = tensor.data.to(self._where)
            for tensor in there:
                self._settle(tensor)
        homes = [tensor.data for tensor in there]
        _, copies, arrived = self._copied(homes, None)
        if arrived is not None:
            torch.cuda.current_stream(self._where).wait_event(arrived)
        try:
            for tensor, copy in zip(there, copies, strict=True):
                tensor.data = copy
            yield
            assert own.home is not None
            self._send_back(own.number, [own.home, *homes], [p.data, *(tensor.data for tensor in there)])
        finally:
            for tensor, home in zip(there, homes, strict=True):
                tensor.data = home
        for tensor in every():
            if not waits(tensor):
                self._settle(tensor, own.number)

    def _send_back(self, number: int, homes: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        if self._back is None:
            _fill(homes, copies)
            return
        self._back.wait_stream(torch.cuda.current_stream(self._where))
        with torch.cuda.stream(self._back):
            _fill(homes, copies)
            self._blocks[number].returned = self._back.record_event()
        for copy in copies:
            copy.record_stream(self._back)  # its memory is not given away before it was read

    def wait_until_back(self) -> None:
        """Waits for what is on its way to the host, which may read it then."""
        if self._back is not None:
            self._back.synchronize()

    @torch.no_grad()
    def _settle(self, tensor: Tensor, number: int | None = None) -> None:
        """Gives a tensor memory of the host for good; what was made of a block may be on its way there."""
        home = self._own(tensor, self.held_bytes // 8)  # of a small network not much more than it takes
        if number is None:
            home.copy_(tensor)
        else:
            self._send_back(number, [home], [tensor.data])
        tensor.data = home  # in place: whoever refers to a weight still does
        wait(tensor)

    def _own(self, tensor: Tensor, left: int) -> Tensor:
        """Memory of the host for a tensor, in one piece with that of others, of which so many bytes are still to
        come."""
        size = _room(tensor)
        if size > len(self._room):
            with elsewhere():
                self._room = torch.empty(
                    max(size, min(left, _PIECE_BYTES)), dtype=torch.uint8, pin_memory=self._stream is not None
                )
            self.host.note(self._room)
        own, self._room = _view(self._room, 0, tensor), self._room[size:]
        return own

    def _keeping(self, number: int, copies: _Copies) -> saved_tensors_hooks:
        """Within the context autograd keeps places in the copies, and what else it keeps as outside of it: recomputing
        does so, and sending activations to the host."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack_outer, unpack_outer = outer or (_unbound, _unbound)
        key = copies.memory.untyped_storage()._cdata

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage()._cdata != key:
                return pack_outer(tensor)
            return _Kept(number, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        def unpack(kept: Any) -> Tensor:
            if not isinstance(kept, _Kept):
                found: Tensor = unpack_outer(kept)
                return found
            return self._ready(kept.number, True).tensor(kept)

        return saved_tensors_hooks(pack, unpack)

    @torch.no_grad()
    def _place_on_host(self) -> None:
        """Puts the tensors into the host's memory for good, one after the other into pieces."""
        every = [tensor for block in self._blocks for tensor in block.tensors]
        if any(tensor.is_meta for tensor in every):  # what has no memory is in no place
            return
        left = sum(map(_room, every))
        for tensor in every:
            own = self._own(tensor, left)
            own.copy_(tensor)
            tensor.data = own  # in place: whoever refers to a weight still does
            left -= _room(tensor)
        for number, block in enumerate(self._blocks):
            for tensor in block.tensors:
                if tensor.requires_grad:
                    self._trained(number, tensor)


def leaf(p: nn.Parameter) -> Tensor:
    """The tensor that the gradient of a parameter comes to: itself, or what stands for one that waits."""
    own = vars(p).get(_PLACE)
    return p if own is None else own.stand_in


@contextmanager
def with_gradient(p: nn.Parameter) -> Iterator[None]:
    """Within the context a parameter whose gradient has come to its `leaf` is on the device, and has it."""
    own = vars(p).get(_PLACE)
    if own is None:
        yield
        return
    own.home = p.data
    p.data = own.swap.copy_of(own.number, p)
    p.grad, own.stand_in.grad = own.stand_in.grad, None
    try:
        yield
    finally:
        p.grad = None
        p.data, own.home = own.home, None


def with_state(
    p: nn.Parameter, states: Mapping[Any, dict[str, Any]], stay: Collection[str], average: Tensor | None
) -> AbstractContextManager[None]:
    """A context in which a parameter is moved: within `with_gradient`, the optimizer's state of one that waits (but for
    the entries that `stay` on the device) and its average are on the device, too."""
    own = vars(p).get(_PLACE)
    if own is None:
        return nullcontext()
    context: AbstractContextManager[None] = own.swap.lent(own, p, states[p], average, stay)
    return context


def wait_until_back(parameters: Iterable[nn.Parameter]) -> None:
    """Waits until all that was moved of these parameters is where they wait."""
    for swap in {vars(p)[_PLACE].swap for p in parameters if _PLACE in vars(p)}:
        swap.wait_until_back()


def _forward(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        swap, number = vars(self)[_PLACE]
        with swap.at_work(number):
            return plain(self, *args, **kwargs)

    return forward


def _in_backward() -> bool:
    """True while gradients are computed: a block that is called then is recomputed."""
    return torch._C._current_graph_task_id() != -1


def _unbound(tensor: Tensor) -> Tensor:
    # Without its graph: a result that an operation keeps of itself would never be freed.
    return tensor.detach()


def _fill(copies: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for copy, source in zip(copies, sources, strict=True):
            copy.copy_(source, non_blocking=True)


def _room(tensor: Tensor) -> int:
    """Bytes that a tensor takes between its first and its last number, rounded up."""
    last = sum((count - 1) * step for count, step in zip(tensor.size(), tensor.stride(), strict=True))
    return -(-(last + 1) * tensor.element_size() // _ALIGNED) * _ALIGNED if tensor.numel() else 0


def _layout(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """The bytes at which tensors begin in one piece of memory, and the size of that."""
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += _room(tensor)
    return offsets, size


def _view(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    """A tensor of the shape, strides and type of another one, that begins at a byte of some memory."""
    rows = memory[offset : offset + _room(like)].view(like.dtype)
    return rows.as_strided(like.size(), like.stride(), rows.storage_offset())
