"""A part of benchmarks/gpu.sh: are the Triton kernels right on the device at hand, and how many bytes a second do they
move? The roof is a copy on the same device. Shapes are those of SD at 512 px and SDXL at 1024, in bf16.

python benchmarks/gpu_kernels.py out=OUT.json training.device=cuda        (other words are those of `daguerre bench`)
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daguerre.kernels import adamw_ema, geglu, group_norm_silu, response_norm, rotary, row_norms
from daguerre.training.performance import peak_rates

MOST_AWAY = 1e-2
"""Norm of the difference from float64 over the result's: one rounding to bf16 is 2e-3."""
Row = dict[str, Any]


def seconds(call: Callable[[], object], device: torch.device, times: int = 20) -> float:
    """Median of some calls after the first, which compiles."""
    call()
    found = []
    for _ in range(times if device.type == "cuda" else 1):
        done(device)
        before = time.perf_counter()
        call()
        done(device)
        found.append(time.perf_counter() - before)
    return statistics.median(found)


def done(device: torch.device) -> None:
    """Waits until the device has computed all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def away(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of what is expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def measured(
    name: str,
    what: str,
    call: Callable[..., Tensor],
    given: tuple[Tensor, ...],
    exact: Callable[..., Tensor],
    some: int,
    moved: tuple[int, int],
) -> Row:
    """Times a kernel forward and backward, and holds the first `some` rows of both against float64.

    Args:
        given: its input, and weights that are trained.
        exact: the same by torch, in float64.
        moved: bytes of both directions for a number of the result.
    """
    x, y = given[0], call(*given)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    wide = x[:some].detach().double().requires_grad_()
    expected = exact(wide, *(t.detach().double() for t in given[1:]))
    (expected_dx,) = torch.autograd.grad(expected, wide, dy[:some].double())
    device = x.device
    forward = seconds(lambda: call(*given), device)
    backward = seconds(lambda: torch.autograd.grad(y, given, dy, retain_graph=True), device)
    gap = max(away(y[:some].detach(), expected.detach()), away(dx[:some], expected_dx))
    rates = {"forward": moved[0] * y.numel() / forward, "backward": moved[1] * y.numel() / backward}
    return {"name": name, "what": what, "gap": gap, "bytes_per_second": rates}


def norm(device: torch.device, B: int, C: int, size: int) -> Row:
    """group_norm_silu: reads its image twice and writes one; backward it reads two twice and writes one."""
    x = torch.randn(B, C, size, size, device=device, dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    weight, bias = (torch.randn(C, device=device, requires_grad=True) for _ in "wb")

    def act(*given: Tensor) -> Tensor:
        return group_norm_silu.group_norm_silu(*given, 32, 1e-5, True)

    def exact(*given: Tensor) -> Tensor:
        return group_norm_silu.plain(*given, 32, 1e-5, True)

    return measured("group_norm_silu", f"{B} x {C} x {size} x {size}", act, (x, weight, bias), exact, 2, (6, 10))


def gate(device: torch.device, rows: int, D: int) -> Row:
    """geglu: reads two numbers a result and writes one; backward it reads three and writes two."""
    x = torch.randn(rows, 2 * D, device=device, dtype=torch.bfloat16, requires_grad=True)
    return measured("geglu", f"{rows} x {D}", geglu.geglu, (x,), geglu.plain, 8, (6, 10))


def rows(device: torch.device, N: int, D: int) -> Row:
    """layer_norm: reads a number and writes one; backward it reads two and writes one."""
    x = torch.randn(N, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = (torch.randn(D, device=device, requires_grad=True) for _ in "wb")

    def exact(wide: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(wide, (D,), weight, bias)

    return measured("layer_norm", f"{N} x {D}", row_norms.layer_norm, (x, weight, bias), exact, 64, (4, 6))


def scale(device: torch.device, N: int, D: int) -> Row:
    """rms_norm of a weight that is not trained: reads a number and writes one; backward it reads two and writes one."""
    x = torch.randn(N, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(D, device=device, dtype=torch.bfloat16)

    def act(x: Tensor) -> Tensor:
        return row_norms.rms_norm(x, weight, 1e-6)

    def exact(wide: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(wide, (D,), weight.double(), 1e-6)

    return measured("rms_norm", f"{N} x {D}", act, (x,), exact, 64, (4, 6))


def turn(device: torch.device, B: int, S: int, H: int, paired: bool) -> Row:
    """rotary: reads a number and writes one, forward and backward, and a table that is small beside them."""
    x = torch.randn(B, S, H, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = (torch.randn(S, 128, device=device) for _ in "cs")

    def act(x: Tensor) -> Tensor:
        return rotary.rotary(x, cos, None if paired else sin, H)

    def exact(wide: Tensor) -> Tensor:
        a, b = wide.unflatten(-1, (-1, 2)).unbind(-1)
        c, s = (t.double()[:, None].unflatten(-1, (-1, 2)) for t in (cos, cos if paired else sin))
        of = (c[..., 0], c[..., 0], s[..., 1], s[..., 1]) if paired else (c[..., 0], c[..., 1], s[..., 0], s[..., 1])
        return torch.stack([a * of[0] - b * of[2], b * of[1] + a * of[3]], -1).flatten(-2)

    return measured("rotary", f"{B} x {S} x {H} x 128{', complex' * paired}", act, (x,), exact, 1, (4, 4))


def response(device: torch.device, B: int, size: int, C: int) -> Row:
    """response_norm with its GELU: reads its image twice and writes it once; backward it reads two twice."""
    x = torch.randn(B, size, size, C, device=device, dtype=torch.bfloat16, requires_grad=True)
    gamma, beta = (torch.randn(C, device=device, requires_grad=True) for _ in "gb")

    def act(*given: Tensor) -> Tensor:
        return response_norm.response_norm(*given, gelu=True)

    def exact(wide: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        u = torch.nn.functional.gelu(wide)
        norm = u.square().sum((1, 2), keepdim=True).sqrt()
        return gamma * u * norm / (norm.mean(-1, keepdim=True) + 1e-6) + beta + u

    return measured("response_norm", f"{B} x {size} x {size} x {C}", act, (x, gamma, beta), exact, 1, (6, 10))


def update(device: torch.device, numbers: int) -> Row:
    """adamw_ema: 36 bytes a parameter, beside torch's fused AdamW and a pass over the averages, which move 40."""
    torch.manual_seed(0)
    held = [torch.rand(numbers, device=device) for _ in range(5)]
    step, skip, one = (torch.zeros((), device=device, dtype=t) for t in (torch.float32, torch.bool, torch.float32))
    one += 1
    rule = adamw_ema.Rule(1e-5, 0.01, 0.9, 0.999, 1e-8, 0.1)

    def tensors(columns: list[Tensor]) -> adamw_ema.Tensors:
        weight, gradient, first, second, average = ([column] for column in columns)
        return adamw_ema.Tensors(weight, gradient, first, second, step, average)

    ours, theirs = ([t.clone() for t in held] for _ in range(2))
    adamw_ema.move(tensors(ours), rule, skip, one)
    step.zero_()
    adamw_ema._by_torch(tensors(theirs), rule, skip, one)
    gap = max(away(ours[i], theirs[i]) for i in (0, 2, 3, 4))
    del ours, theirs
    fast = seconds(lambda: adamw_ema.move(tensors(held), rule, skip, one), device)
    slow = seconds(lambda: adamw_ema._by_torch(tensors(held), rule, skip, one), device)
    moved = {"one pass": 36 * numbers / fast, "by torch": 40 * numbers / slow}
    return {"name": "adamw_ema", "what": f"{numbers} numbers", "gap": gap, "bytes_per_second": moved}


def main(words: list[str]) -> int:
    """Writes what was measured after each kernel; 1 if one of them is wrong."""
    given = dict(word.split("=", 1) for word in words)
    device, out = torch.device(given["training.device"]), Path(given["out"])
    on_gpu = device.type == "cuda"
    told: Row = {"device": torch.cuda.get_device_name(device) if on_gpu else "a CPU", "kernels": []}
    told["copy_bytes"] = peak_rates.copy_bytes(device)
    shapes = [(64, 320, 64), (64, 1280, 16), (8, 960, 128)] if on_gpu else [(2, 64, 4)]
    calls = [lambda shape=shape: norm(device, *shape) for shape in shapes]
    calls += [lambda: gate(device, *((1 << 18, 1280) if on_gpu else (8, 64)))]
    calls += [lambda: rows(device, *((1 << 18, 320) if on_gpu else (8, 64)))]
    of_rows = [(1 << 18, 128), (1 << 14, 3840)] if on_gpu else [(8, 64)]
    calls += [lambda shape=shape: scale(device, *shape) for shape in of_rows]
    turned = (4, 4608, 24) if on_gpu else (2, 5, 3)
    calls += [lambda paired=paired: turn(device, *turned, paired) for paired in (False, True)]
    calls += [lambda: response(device, *((16, 24, 8192) if on_gpu else (2, 4, 64)))]
    calls += [lambda: update(device, 1 << 28 if on_gpu else 4097)]
    for call in calls:
        told["kernels"].append(call())
        out.write_text(json.dumps(told))
    return int(any(not row["gap"] <= MOST_AWAY for row in told["kernels"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
