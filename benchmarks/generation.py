"""Images a second beside diffusers' stock pipeline: the same networks, prompts, starting noise and number of steps.

    python benchmarks/generation.py RUN [--steps 20] [--batch 8] [--rounds 12] [key=value ...]

RUN is a run of the family `sd`, whose RUN/pipeline diffusers opens; key=value are settings of `daguerre generate`.
Turns alternate; the ratio is the median of pairs with its 95 % interval, by the clock and in processor time. No number
without parity: the images of both must agree to one level of 255.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusionPipeline

import daguerre
from daguerre.bench.report import ratio

PROMPT = "a small red circle on a blue background"
GUIDANCE = 3.0


def starting_noise(model: daguerre.Model, ours: Callable[[], np.ndarray], batch: int) -> torch.Tensor:
    """What our first step is given, [B, C, H, W]."""
    seen: list[torch.Tensor] = []
    hook = model.parts.net.register_forward_pre_hook(
        lambda _, inputs, named: seen.append((inputs or [*named.values()])[0].clone()), with_kwargs=True
    )
    ours()
    hook.remove()
    return seen[0][:batch].contiguous()


def main(run: str, steps: int, batch: int, rounds: int, settings: Sequence[str]) -> None:
    model = daguerre.load(run, *settings)
    pipeline = StableDiffusionPipeline.from_pretrained(Path(run) / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    prompts = [PROMPT] * batch
    asked = ("seed=0", f"num_inference_steps={steps}", f"guidance_scale={GUIDANCE}", f"batch_size={batch}")

    def ours() -> np.ndarray:
        return np.stack([np.asarray(image) for image in model.generate(prompts, *asked)])

    noise = starting_noise(model, ours, batch)

    def theirs() -> np.ndarray:
        given = {"num_inference_steps": steps, "guidance_scale": GUIDANCE, "latents": noise}
        return np.stack([np.asarray(image) for image in pipeline(prompts, **given).images])

    apart = np.abs(ours().astype(int) - theirs()).max()
    if apart > 1:
        raise SystemExit(f"no parity: images are up to {apart} of 255 apart")
    clock: list[list[float]] = [[], []]
    cpu: list[list[float]] = [[], []]
    for _ in range(rounds):
        for call, seconds, of_cpu in zip((ours, theirs), clock, cpu, strict=True):
            start, before = time.perf_counter(), time.process_time()
            call()
            seconds.append(time.perf_counter() - start)
            of_cpu.append(time.process_time() - before)
    print(f"{torch.get_num_threads()} threads, images up to {apart} of 255 apart")
    for kind, (own, other) in (("by the clock", clock), ("in processor time", cpu)):
        print(f"{kind}: {batch / np.median(own):.2f} and {batch / np.median(other):.2f} images/s, {ratio(other, own)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    for name, number in (("steps", 20), ("batch", 8), ("rounds", 12)):
        parser.add_argument(f"--{name}", type=int, default=number)
    given, rest = parser.parse_known_args()
    main(given.run, given.steps, given.batch, given.rounds, rest)
