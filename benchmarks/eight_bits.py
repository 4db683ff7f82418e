"""A frozen transformer block in bf16, of weights in 8 bits, and of products of 8 bits: forward and backward, in turns.

    python benchmarks/eight_bits.py [--rounds 5] [--tokens 512] [--compiled] [--forms int8 int8_products]

One block of Z-Image (3840 wide, 30 heads) with random weights, under autocast to bf16, with a gradient of its input
alone, as the base of a LoRA has it; one thread. Reported: the median over rounds of the processor time of a pass, and
of its ratio to bf16 uncompiled in the same round (above 1: faster), with its least and largest; and how far result and
gradient are from those of bf16. `--compiled` adds each variant by torch.compile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from torch import Tensor, nn

from daguerre.training.precision import quantized

WIDTH, HEADS = 3840, 30


def block(form: str) -> nn.Module:
    """A block whose linear layers have this form of few bits; `bf16`: whose weights are bf16."""
    torch.manual_seed(0)
    made = ZImageTransformerBlock(0, WIDTH, HEADS, HEADS, 1e-5, True).requires_grad_(False).bfloat16()
    if form != "bf16":
        for name, layer in [*made.named_modules()]:
            if isinstance(layer, nn.Linear):
                made.set_submodule(name, quantized.quantized(layer, form))
    return made


def one_pass(net: Callable[..., Tensor], tokens: int) -> tuple[float, Tensor, Tensor]:
    """Processor seconds of a forward and backward pass; the result and the gradient of the input."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, tokens, WIDTH, generator=generator).bfloat16().requires_grad_(True)
    time_features = torch.randn(1, 256, generator=generator).bfloat16()
    turns = torch.polar(torch.ones(1, tokens, 64), torch.rand(1, tokens, 64, generator=generator))
    began = time.process_time()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(x, None, turns, time_features)
    y.backward(torch.ones_like(y) + x.detach())
    assert x.grad is not None
    return time.process_time() - began, y.detach(), x.grad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--forms", nargs="*", default=["int8", "int8_products"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    nets: dict[str, Callable[..., Tensor]] = {form: block(form) for form in ("bf16", *options.forms)}
    if options.compiled:
        nets |= {f"{form}, compiled": torch.compile(net, dynamic=False) for form, net in [*nets.items()]}
    seconds: dict[str, list[float]] = {name: [] for name in nets}
    for number in range(-1, options.rounds):  # the first one compiles and warms up
        results = {}
        for name in [*nets][:: -1 if number % 2 else 1]:
            took, *results[name] = one_pass(nets[name], options.tokens)
            if number >= 0:
                seconds[name].append(took)
    for name, own in seconds.items():
        ratios = sorted(plain / each for plain, each in zip(seconds["bf16"], own, strict=True))
        errors = [
            float((found.float() - plain.float()).norm() / plain.float().norm())
            for found, plain in zip(results[name], results["bf16"], strict=True)
        ]
        print(
            f"{name:26} {statistics.median(own):7.3f} s  {statistics.median(ratios):5.2f}x "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})  from bf16: result {errors[0]:.4f}, gradient {errors[1]:.4f}"
        )


if __name__ == "__main__":
    main()
