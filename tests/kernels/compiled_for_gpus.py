"""Compiles every Triton kernel for a GPU of compute capability 9.0 with Triton's own tools; needs no GPU. Run by
test_compiled.py in a process of its own: within the interpreter's nothing is compiled."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from daguerre.kernels import adamw_ema_triton, geglu_triton, group_norm_silu_triton

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {"addresses": "*i64", "pieces": "*i32", "sizes": "*i64", "skips": "*i32"}
FLOATS = {"found", "mean", "rstd", "whole", "of_group", "corrections", "factors"}
WHOLE = {"B", "S", "C", "D", "groups", "size", "parts", "count"}
IMAGES = {"x", "y", "dy", "dx"}
CONSTANTS = {
    "ROWS": 32, "COLUMNS": 128, "ROUNDS": 4, "SPAN": 128, "TOGETHER": 32, "SIZE": 16, "DOUBLE": False, "SILU": True,
    "CLIPS": True, "AVERAGES": True, "ALIGNED": True, "BLOCK": 1024,
}  # fmt: skip


def kind(name, image):
    if name in IMAGES:
        return image
    if name in ("weight", "bias") or name in FLOATS:
        return "*fp32"
    return POINTERS.get(name) or ("i32" if name in WHOLE else "fp32")


def compile_for(function, image, ones):
    constants = {name: CONSTANTS[name] for name in function.arg_names if name in CONSTANTS}
    constants |= {name: 1 for name in function.arg_names if name in ones}  # as Triton treats whole numbers that are 1
    signature = {name: "constexpr" if name in constants else kind(name, image) for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    made = triton.compile(ASTSource(fn=function, signature=signature, constexprs=places), target=TARGET)
    assert made.asm["cubin"], function.__name__


GROUP_NORM = ("_sums", "_meet", "_write", "_sums_back", "_meet_back", "_write_back")
FUNCTIONS = [getattr(group_norm_silu_triton, name) for name in GROUP_NORM]
FUNCTIONS += [geglu_triton._geglu, geglu_triton._geglu_back]

if __name__ == "__main__":
    for function in FUNCTIONS:
        for image in ("*bf16", "*fp16", "*fp32"):
            for ones in ((), ("B",), ("S", "parts"), ("size",)):
                compile_for(function, image, ones)
    for ones in ((), ("count",)):
        compile_for(adamw_ema_triton._kernel, "*fp32", ones)
    print("compiled")
