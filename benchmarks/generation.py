"""Images a second beside diffusers' stock pipeline: the same networks, prompts, starting noise and number of steps.

    python benchmarks/generation.py RUN [--bf16] [--steps 20] [--batch 8] [--rounds 12] [key=value ...]

RUN is a run of the family `sd`, whose RUN/pipeline diffusers opens; key=value are settings of `daguerre generate`.
Turns alternate; the ratio is the median of pairs with its 95 % interval, by the clock and in processor time. No number
without parity: the images must agree with those of the pipeline in float32 to one level of 255. `--bf16`: the settings
compute in bf16, and the pipeline does so, too, besides; ours must be no farther from float32 than that one.
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


def main(run: str, bf16: bool, steps: int, batch: int, rounds: int, settings: Sequence[str]) -> None:
    model = daguerre.load(run, *settings)
    prompts = [PROMPT] * batch
    asked = ("seed=0", f"num_inference_steps={steps}", f"guidance_scale={GUIDANCE}", f"batch_size={batch}")

    def ours() -> np.ndarray:
        return np.stack([np.asarray(image) for image in model.generate(prompts, *asked)])

    noise = starting_noise(model, ours, batch).float()

    def theirs(dtype: torch.dtype) -> Callable[[], np.ndarray]:
        pipeline = StableDiffusionPipeline.from_pretrained(Path(run) / "pipeline", torch_dtype=dtype)
        pipeline.set_progress_bar_config(disable=True)
        given = {"num_inference_steps": steps, "guidance_scale": GUIDANCE, "latents": noise.to(dtype)}
        return lambda: np.stack([np.asarray(image) for image in pipeline(prompts, **given).images])

    contestants = {"daguerre": ours, "diffusers": theirs(torch.float32)}
    if bf16:
        contestants["diffusers in bf16"] = theirs(torch.bfloat16)
    exact = contestants["diffusers"]().astype(int)
    apart = {name: np.abs(call() - exact) for name, call in contestants.items()}
    told = ", ".join(f"{name} {gap.mean():.3f} on average, {gap.max()} at most" for name, gap in apart.items())
    print(f"{torch.get_num_threads()} threads; of 255 from diffusers in float32: {told}")
    if apart["daguerre"].mean() > apart["diffusers in bf16"].mean() if bf16 else apart["daguerre"].max() > 1:
        raise SystemExit("no parity: ours are farther away than is allowed")
    clock, cpu = ({name: list[float]() for name in contestants} for _ in range(2))
    for _ in range(rounds):
        for name, call in contestants.items():
            start, before = time.perf_counter(), time.process_time()
            call()
            clock[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - before)
    for kind, seconds in (("by the clock", clock), ("in processor time", cpu)):
        for name, each in seconds.items():
            print(f"{kind}: {name} {batch / np.median(each):.2f} images/s; ours {ratio(each, seconds['daguerre'])}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--bf16", action="store_true")
    for name, number in (("steps", 20), ("batch", 8), ("rounds", 12)):
        parser.add_argument(f"--{name}", type=int, default=number)
    given, rest = parser.parse_known_args()
    main(given.run, given.bf16, given.steps, given.batch, given.rounds, rest)
