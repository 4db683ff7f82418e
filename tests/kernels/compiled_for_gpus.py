"""Compiles Triton kernels ahead of time with Triton's own tools, which need no GPU, and looks at the machine code.

    python tests/kernels/compiled_for_gpus.py 90 adamw_ema     # capabilities, modules of kernels; default: all

The kernels' own modules launch them, on tensors without memory in the shapes of Stable Diffusion and SDXL; a launch is
caught, and compiled for what it was given: whole numbers that are 1, or multiples of 16, are known to the compiler, as
when it is run. Run by test_compiled.py in a process of its own: within the interpreter's nothing is compiled.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from daguerre.kernels import adamw_ema
from daguerre.kernels.triton import adamw_ema as one_pass
from daguerre.kernels.triton import geglu, group_norm_silu, response_norm, rotary, row_norms

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CAPABILITIES = (80, 89, 90, 100)
MOST_REGISTERS = {"adamw_ema": 64, "geglu": 64, "group_norm_silu": 128, "row_norms": 128, "response_norm": 160}
MOST_REGISTERS |= {"rotary": 64}
"""A thread. With 64, half of a GPU's threads have room at once; with 128, a fourth."""
KINDS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64"}
KINDS |= {torch.int32: "*i32"}
WIDE = {"_sums": (1, 0), "_write": (1, 1), "_sums_back": (2, 0), "_write_back": (2, 1), "_meet": (0, 0)}
WIDE |= {"_meet_back": (0, 0), "_geglu": (2, 1), "_geglu_back": (3, 2), "_kernel": (4, 3)}
WIDE |= {
    "_turn": (1, 1),
    "_forward": (1, 1),
    "_backward": (2, 1),
    "_squares": (1, 0),
    "_scaled": (1, 1),
    "_gradient": (2, 1),
}
"""Fewest loads and stores of 16 bytes in each: one for each image, or tensor of numbers, that it reads and writes."""


class Caught:
    """In the place of a kernel: keeps what it is launched with."""

    def __init__(self, function, launches):
        self.function, self.launches = function, launches

    def __getitem__(self, grid):
        return self

    def __call__(self, *values, num_warps=4, **constants):
        signature, places, attributes = {}, {}, {}
        for i, (name, value) in enumerate(zip(self.function.arg_names, (*values, *constants.values()), strict=True)):
            if name in constants or value is None or (isinstance(value, int) and value == 1):
                signature[name], places[i,] = "constexpr", value
                continue
            signature[name] = KINDS[value.dtype] if isinstance(value, torch.Tensor) else kind(value)
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[i,] = [["tt.divisibility", 16]]
        self.launches[repr((self.function.__name__, signature, places, attributes, num_warps))] = (
            self.function, signature, places, attributes, num_warps,
        )  # fmt: skip


def kind(value):
    return "fp32" if isinstance(value, float) else "i32"


def caught(module, launch):
    """The different launches that `launch` makes of a module's kernels."""
    launches, own = {}, dict(vars(module))
    for name, function in own.items():
        if isinstance(function, triton.JITFunction):
            setattr(module, name, Caught(function, launches))
    launch()
    vars(module).update(own)
    return list(launches.values())


# Batch, channels and size of images: the levels of SD at 512 px, of SDXL at 1024, and of their autoencoder.
IMAGES = [(64, c, 64) for c in (320, 640, 960)] + [(64, c, 32) for c in (640, 1280, 1920)]
IMAGES += [(64, c, 8) for c in (1280, 2560)] + [
    (8, 320, 128),
    (8, 960, 128),
    (1, 1280, 1),
    (32, 128, 512),
    (32, 512, 64),
]


def norms():
    for B, C, size in IMAGES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32) if (B, C, size) == IMAGES[0] else (torch.bfloat16,):
            for silu in (True, False):
                x = torch.empty(B, C, size, size, dtype=dtype, device="meta").to(memory_format=torch.channels_last)
                weight = torch.empty(C, device="meta")
                _, mean, rstd = group_norm_silu.forward(x, weight, weight, 32, 1e-5, silu)
                group_norm_silu.backward(x, x, weight, weight, mean, rstd, silu)


def gates():
    for D in (1280, 2560, 5120):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = torch.empty(64, 2 * D, dtype=dtype, device="meta")
            geglu.backward(geglu.forward(x), x)


def rows():
    for D in (320, 640, 1280, 768, 1024, 2048):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x, weight = torch.empty(4096, D, dtype=dtype, device="meta"), torch.empty(D, device="meta")
            for affine in (weight, None):
                _, mean, rstd = row_norms.forward(x, affine, affine, 1e-5)
                row_norms.backward(x, x, affine, mean, rstd, affine is not None, affine is not None)


def scales():
    """Of heads of 128 features, and of the widths of today's transformers."""
    for D in (128, 2560, 3072, 3840, 4096, 6144):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x, weight = torch.empty(4096, D, dtype=dtype, device="meta"), torch.empty(D, device="meta")
            for affine, result in ((weight, torch.float32), (weight.to(dtype), dtype), (None, dtype)):
                y, _, rstd = row_norms.forward(x, affine, None, 1e-6, result, False)
                row_norms.backward(y, x, affine, None, rstd, affine is not None and D == 3840, False)


def positions():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, table = torch.empty(2, 4096, 24, 128, dtype=dtype, device="meta"), torch.empty(4096, 128, device="meta")
        for sines, halves in ((table, False), (table, True), (None, False)):
            for back in (False, True):
                rotary.turned(x, table, sines, 24, halves, back)


def responses():
    for C in (4096, 8192):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x, numbers = torch.empty(16, 24, 24, C, dtype=dtype, device="meta"), torch.empty(C, device="meta")
            for gelu in (False, True):
                scale = response_norm.squares(x, gelu)
                response_norm.scaled(x, scale, numbers, gelu)
                response_norm.sums(x, x, gelu)
                response_norm.gradient(x, x, scale, scale, gelu)


def updates():
    for factor in (None, torch.empty((), device="meta")):
        for share in (0.0, 0.1):
            for tensors in (1, 686):
                column = [torch.empty(4097, device="meta") for _ in range(tensors)]
                step = torch.empty((), device="meta")
                given = adamw_ema.Tensors(column, column, column, column, step, column)
                rule = adamw_ema.Rule(1e-4, 0.01, 0.9, 0.999, 1e-8, share)
                one_pass.move(given, rule, step > 0, factor)


MODULES = {
    "adamw_ema": (one_pass, updates),
    "geglu": (geglu, gates),
    "group_norm_silu": (group_norm_silu, norms),
    "row_norms": (row_norms, lambda: (rows(), scales())),
    "rotary": (rotary, positions),
    "response_norm": (response_norm, responses),
}


def machine_code(capability, function, signature, places, attributes, warps):
    """Registers a thread, and how often each instruction that moves memory stands in the code."""
    source = ASTSource(fn=function, signature=signature, constexprs=places, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        used, code = (
            subprocess.run([TOOLS / tool[0], *tool[1:], file.name], capture_output=True, text=True, check=True).stdout
            for tool in (["cuobjdump", "-res-usage"], ["nvdisasm"])
        )
    return int(re.search(r"REG:(\d+)", used)[1]), re.findall(r"\b(?:LDG|STG|LDL|STL)\.?[A-Z0-9.]*", code)


def check(name, capability, launch):
    function, signature, places, _, warps = launch
    constants = {function.arg_names[i]: value for (i,), value in places.items()}
    registers, moves = machine_code(capability, *launch)
    loads, stores = (sum(m.startswith(op) and ".128" in m for m in moves) for op in ("LDG", "STG"))
    said = f"{capability} {function.__name__} {[*signature.values()]} {constants}: {registers} registers, wide loads "
    said += f"{loads}, stores {stores}"
    assert registers <= MOST_REGISTERS[name], said
    assert not [m for m in moves if m.startswith(("LDL", "STL"))], f"spills: {said}"
    held = constants.get("BLOCK") or constants.get("ROWS", 0) * constants.get("COLUMNS", constants.get("WIDTH", 0))
    if held >= 8 * 32 * warps or name == "adamw_ema":  # else a program has not 16 bytes of bf16 for each thread
        read, written = (n + constants.get("AVERAGES", False) for n in WIDE[function.__name__])
        assert loads >= read, said
        assert stores >= written, said
    print(said)


if __name__ == "__main__":
    capabilities = [int(word) for word in sys.argv[1:] if word.isdigit()] or CAPABILITIES
    names = [word for word in sys.argv[1:] if not word.isdigit()] or list(MODULES)
    for name in names:
        launches = caught(*MODULES[name])
        assert launches
        for capability in capabilities:
            for launch in launches:
                check(name, capability, launch)
    print("compiled")
