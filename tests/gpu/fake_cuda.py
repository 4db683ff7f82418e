"""A GPU that is not there: what torch's Python asks of CUDA, answered as an H100 would, on top of fake_cuda.cpp.

For a process of its own, which loads the library before torch, and never computes: its tensors of `cuda` have no
memory. What cannot be had without memory is made by hand: which kernel attention takes, and pinned memory.
"""

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

KERNELS: list[Any] = []
"""Registrations with torch's dispatcher, which last as long as they are held."""
SOURCE = Path(__file__).with_name("fake_cuda.cpp")
KNOWN = ("2.13.0",)
"""Versions of torch whose interfaces the source is written for."""


def build(folder: Path) -> Path:
    """Compiles the library, unless it is there. Loads it, too: for a process that does nothing else."""
    from torch.utils import cpp_extension

    # ninja lies beside the interpreter of a virtual environment that nobody has activated.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    folder.mkdir(parents=True, exist_ok=True)
    made = cpp_extension.load(
        "fake_cuda", [str(SOURCE)], extra_cflags=["-O0"], build_directory=str(folder), with_cuda=False,
        is_python_module=False,
    )  # fmt: skip
    return Path(made)


def load(library: Path) -> None:
    """Loads it between torch's own libraries and torch, which asks for the device while it is imported."""
    assert "torch" not in sys.modules
    found = importlib.util.find_spec("torch")
    assert found is not None
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(Path(found.submodule_search_locations[0]) / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))


class Stream:
    """A stream, or an event, on which nothing happens."""

    cuda_stream = 0

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def record_event(self, *args: Any) -> "Stream":
        return self

    def wait_stream(self, other: "Stream") -> None:
        pass

    wait_event = wait = record = wait_stream


def pretend() -> set[int]:
    """Answers of torch.cuda; returns the addresses of what is pinned, as it will be."""
    import torch

    torch.autograd.set_multithreading_enabled(False)  # a device's thread would ask CUDA itself
    stream = Stream()
    properties = SimpleNamespace(name="NVIDIA H100", total_memory=85_017_493_504, major=9, minor=0)
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "set_device": None,
        "get_device_properties": properties, "get_device_capability": (9, 0), "get_device_name": properties.name,
        "is_bf16_supported": True, "manual_seed_all": None, "manual_seed": None, "_lazy_init": None,
        "current_stream": stream, "stream": stream, "max_memory_allocated": 0, "memory_allocated": 0,
        "is_current_stream_capturing": False,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *args, _value=value, **named: _value)
    torch.cuda.Stream = torch.cuda.Event = Stream  # type: ignore[misc, assignment]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]
    torch.nn.functional.scaled_dot_product_attention = _attention
    # Without a kernel for the device autograd itself would make it of seven operators.
    KERNELS.append(torch.library.Library("aten", "IMPL"))
    KERNELS[0].impl("silu_backward", _on_a_device, "CUDA")
    kept, addresses = [], set()

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():  # memory of the host is real, whatever mode is on
            kept.append(self.clone())
        addresses.add(kept[-1].untyped_storage().data_ptr())
        return kept[-1]

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]
    return addresses


def _on_a_device(*given: Any) -> Any:
    raise NotImplementedError("tensors without memory have no numbers")


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Flash attention for 16 bits without a mask, else the memory-efficient kernel, as torch chooses on an H100."""
    import torch
    from torch.nn.functional import pad

    if torch.is_autocast_enabled("cuda"):
        query, key, value = (t.to(torch.get_autocast_dtype("cuda")) for t in (query, key, value))
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        query, key, value = (pad(t, (0, -width % 8)) for t in (query, key, value)) if width % 8 else (query, key, value)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return kernel(query, key, value, dropout_p, is_causal, False, scale=scale)[0][..., :width]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, float("-inf"))
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    trained = query.requires_grad or key.requires_grad
    return kernel(query, key, value, attn_mask, trained, dropout_p, is_causal, scale=scale)[0]


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
