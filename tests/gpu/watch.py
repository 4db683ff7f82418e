"""Sees every operator that a GPU would be given: how many there are, and for which of them the host waits."""

import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_NO_KERNEL = {
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "slice", "select", "unsqueeze", "squeeze",
    "split", "split_with_sizes", "chunk", "detach", "alias", "as_strided", "unbind", "unflatten", "narrow", "unfold",
    "lift_fresh", "_reshape_alias", "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach_",
    "is_same_size", "set_", "diagonal", "view_as_real", "device",
}  # fmt: skip
"""Operators that only look at memory another way, or take some."""
_OURS = ("/daguerre/", "/diffusers/", "/transformers/", "/peft/")


class Watch(TorchDispatchMode):
    """Counts what is done on `cuda` within the context, beneath which is a FakeTensorMode."""

    def __init__(self, fake: FakeTensorMode, pinned: set[int]) -> None:
        super().__init__()
        self._fake, self._pinned = fake, pinned
        self.kernels: Counter[str] = Counter()
        """By name of the operator."""
        self.waits: Counter[str] = Counter()
        """What the host waits for the device by, and from where it was called."""

    def forget(self) -> None:
        """Begins to count anew."""
        self.kernels.clear()
        self.waits.clear()

    def waited(self, why: str) -> None:
        """Notes a wait, with the two innermost places of this project or of the networks' libraries."""
        places, frame = [], sys._getframe(1)
        while frame is not None and len(places) < 2:
            file = frame.f_code.co_filename
            if any(part in file for part in _OURS):
                places.append(f"{file.split('/src/')[-1].split('site-packages/')[-1]}:{frame.f_lineno}")
            frame = frame.f_back  # type: ignore[assignment]
        self.waits[f"{why} at {' < '.join(places)}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.split("::")[1]
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if name in ("_to_copy", "copy_"):
            self._look_at_copy(name, given, args, kwargs)
            # A tensor with memory, copied to a device of tensors without.
            args, kwargs = tree_map(lambda each: self._without_memory(each), (args, kwargs))
        try:
            made = func(*args, **kwargs)
        except DataDependentOutputException:  # .item(), .tolist(), bool(), which wait for a device but not for the host
            if given[0].device.type == "cuda":
                self.waited(name)
            if name != "_local_scalar_dense":
                raise
            return 1.0 if given[0].is_floating_point() else 1
        outs = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
        if name not in _NO_KERNEL and any(each.device.type == "cuda" for each in (*given, *outs)):
            self.kernels[name] += 1
            hosts = [each for each in given if each.device.type == "cpu" and each.ndim]
            assert not hosts or name in ("_to_copy", "copy_"), f"{name} has tensors of the host beside the device's"
        return made

    def _look_at_copy(self, name: str, given: list[Tensor], args: Any, kwargs: Any) -> None:
        source = given[-1] if name == "copy_" else given[0]
        device = given[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
        unasked = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if (source.device.type, device.type) == ("cuda", "cpu"):
            self.waited(f"device to host {tuple(source.shape)}")
        if (source.device.type, device.type) == ("cpu", "cuda"):
            pageable = isinstance(source, FakeTensor) or source.untyped_storage().data_ptr() not in self._pinned
            if unasked or pageable:
                how = "pageable" if pageable else "blocking"
                self.waited(f"host to device, {how} {tuple(source.shape)} {source.dtype}")

    def _without_memory(self, each: Any) -> Any:
        if isinstance(each, FakeTensor):
            each.constant = None  # numbers of Python, which torch would copy to the device that is not there
        plain = isinstance(each, Tensor) and not isinstance(each, FakeTensor)
        return self._fake.from_tensor(each) if plain else each


def see_constants(watch: Watch) -> None:
    """torch.tensor and its kin with numbers of Python on a GPU make a tensor of the host first, and wait for its copy;
    torch does that beneath what a mode can see."""
    tensor, new_tensor, as_tensor = torch.tensor, Tensor.new_tensor, torch.as_tensor

    def constant(data: Any, *, dtype: Any = None, device: Any = None, **more: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda":
            return tensor(data, dtype=dtype, device=device, **more)
        with torch._C._DisableTorchDispatch():
            made = tensor(data, dtype=dtype)
        watch.waited(f"torch.tensor {tuple(made.shape)}")
        return torch.empty(made.shape, dtype=made.dtype, device=device)

    def new_constant(self: Tensor, data: Any, *, dtype: Any = None, device: Any = None, **more: Any) -> Tensor:
        device = device or self.device
        if torch.device(device).type != "cuda":
            return new_tensor(self, data, dtype=dtype, device=device, **more)
        return constant(data, dtype=dtype or self.dtype, device=device)

    def as_constant(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        if isinstance(data, Tensor) or device is None or torch.device(device).type != "cuda":
            return as_tensor(data, dtype=dtype, device=device)
        return constant(data, dtype=dtype, device=device)

    torch.tensor, torch.as_tensor, Tensor.new_tensor = constant, as_constant, new_constant  # type: ignore[assignment]
