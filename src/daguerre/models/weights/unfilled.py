"""Networks without memory are made without filling it: of an outline's time, torch spends two fifths on random weights
that nothing holds, as its `uniform_` of a tensor on the meta device is Python."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_FILLING = {nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, Tensor.uniform_, Tensor.normal_}


class Unfilled(TorchFunctionMode):
    """Leaves tensors of the meta device as they are, where they would be filled with random numbers."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if function in _FILLING:
            tensor = args[0] if args else given["tensor"]
            if tensor.is_meta:
                return tensor
        return function(*args, **given)


@contextmanager
def outlining() -> Iterator[None]:
    """Makes networks on the meta device: shapes alone."""
    with torch.device("meta"), Unfilled():
        yield
