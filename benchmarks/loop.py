"""The training step beside a bare PyTorch loop: same UNet, batches, AdamW, clipping, EMA; interleaved in one process.

    python benchmarks/loop.py [--recipe quickstart] [--rounds 12] [--steps 8] [--out FILE] [key=value ...]

Three variants: `daguerre` (training.step.update), `plain` (AdamW as torch builds it, diffusers' EMAModel) and `fused`
(the same fused pieces as ours, written out bare). No number without parity: losses over 20 steps and EMA weights must
agree first. Latents, text features and noise are precomputed. Reported: the median over rounds of the paired ratio of
times (above 1: Daguerre is faster), with the range that holds the middle half of the rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

from daguerre.assembly import parts as building
from daguerre.assembly.batch_sizes import batch_sizes
from daguerre.config import config as configs
from daguerre.data.dataset import open_dataset
from daguerre.objectives.objective import Example
from daguerre.training import step
from daguerre.training.ema import decay_at
from daguerre.training.state import TrainState
from daguerre.types import IMAGE, Batch, LossTerms

Item = tuple[Batch, Tensor, dict[str, Tensor], dict[str, Tensor]]
PARITY_STEPS = 20


def precomputed(parts: building.Components, config: configs.Config, count: int) -> list[Item]:
    """Batches with clean latents, text features and draws."""
    source, size = open_dataset(config.data, "train").members[0].source, batch_sizes(config).micro
    items = []
    for number in range(count):
        records = [source.record(number * size + i) for i in range(size)]
        keys = np.array([[source.sample_id(number * size + i), 0, 0] for i in range(size)])
        pixels = torch.from_numpy(np.stack([record.image for record in records])).permute(0, 3, 1, 2).contiguous()
        texts, names = [r.texts["text"] for r in records], [r.key for r in records]
        batch = Batch(keys, {"image": pixels}, texts, torch.ones(size), names, np.zeros((size, 6), np.int32))
        batch = Batch(**{**vars(batch), "draws": parts.draws(batch)})
        x0, cond = parts.family.encode(batch)
        items.append((batch, x0, dict(cond), dict(batch.draws)))
    return items


def loss_of(parts: building.Components, net: nn.Module, item: Item) -> LossTerms:
    """The objective's loss on precomputed inputs."""
    _, x0, cond, draws = item
    return parts.loss_of(net, Example({IMAGE: x0}, {IMAGE: cond}, parts.objective.drawn.of(draws)))


class Daguerre:
    """Our update."""

    def __init__(self, parts: building.Components, config: configs.Config, net: nn.Module) -> None:
        self.net = net
        self.state = TrainState.start(net, parts.objective.learnt, config.optimizer, config.ema)
        self.parts, self.config = parts, config

    def step(self, item: Item) -> None:
        step.update(
            self.state,
            [item[0]],
            lambda net, batch: loss_of(self.parts, net, item),
            learning_rate=self.config.optimizer.learning_rate,
            max_grad_norm=self.config.training.max_grad_norm,
            autocast=nullcontext,
        )

    def last_loss(self) -> float:
        return self.state.meter.read()["learning/loss"]

    def averages(self) -> list[Tensor]:
        return list(self.state.ema.averages.values())


class Bare:
    """What a script has: forward, backward, clip, AdamW, EMA; `fused` takes torch's fused and foreach kernels."""

    def __init__(self, parts: building.Components, config: configs.Config, net: nn.Module, fused: bool) -> None:
        self.parts, self.config, self.net, self.fused, self.count = parts, config, net, fused, 0
        self.parameters = list(net.parameters())
        o = config.optimizer
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": o.weight_decay},
                {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=o.learning_rate,
            betas=(o.beta1, o.beta2),
            eps=o.epsilon,
            fused=fused or None,
        )
        if fused:
            self.shadow = [p.detach().clone() for p in self.parameters]
        else:
            self.ema = EMAModel(self.parameters, decay=config.ema.decay)

    def step(self, item: Item) -> None:
        _, x0, cond, draws = item
        a, s, p, q, c_in, weight = (draws[n].view(-1, 1, 1, 1) for n in ("a", "s", "p", "q", "c_in", "weight"))
        noise = draws["noise"]
        prediction = self.net(c_in * (a * x0 + s * noise), draws["c_noise"], cond)
        loss = (weight * (prediction - (p * x0 + q * noise)).square()).mean()
        loss.backward()
        if self.config.training.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.config.training.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.count += 1
        if self.fused:
            with torch.no_grad():
                torch._foreach_lerp_(self.shadow, self.parameters, 1 - decay_at(self.config.ema, self.count))
        else:
            self.ema.step(self.parameters)
        self.loss = loss.detach()

    def last_loss(self) -> float:
        return float(self.loss)

    def averages(self) -> Sequence[Tensor]:
        return self.shadow if self.fused else self.ema.shadow_params


def check_parity(variants: dict[str, Daguerre | Bare], items: list[Item]) -> float:
    """Losses over 20 steps and EMA weights agree within float32 rounding; returns the worst gap. Else SystemExit."""
    losses: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(PARITY_STEPS):
        for name, variant in variants.items():
            variant.step(items[number % len(items)])
            losses[name].append(variant.last_loss())
    ours = variants["daguerre"]
    worst = 0.0
    for name, variant in variants.items():
        gap = max(abs(a - b) / b for a, b in zip(losses["daguerre"], losses[name], strict=True))
        drift = max(float((a - b).abs().max()) for a, b in zip(ours.averages(), variant.averages(), strict=True))
        if gap > 1e-3 or drift > 1e-3:
            raise SystemExit(f"no parity with {name}: losses differ by {gap:.1e}, EMA weights by {drift:.1e}")
        worst = max(worst, gap)
    return worst


def timed(run: Callable[[Item], None], items: list[Item], steps: int) -> float:
    start = time.perf_counter()
    for number in range(steps):
        run(items[number % len(items)])
    return (time.perf_counter() - start) / steps


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--recipe", default="quickstart")
    arguments.add_argument("overrides", nargs="*", help="key=value, as for `daguerre train`")
    arguments.add_argument("--rounds", type=int, default=12)
    arguments.add_argument("--steps", type=int, default=8)
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    config = configs.load(given.recipe, ["run_name=benchmark", *given.overrides]).config
    parts = building.build(config)
    items = precomputed(parts, config, 4)
    net = parts.net.train()
    variants: dict[str, Daguerre | Bare] = {
        "daguerre": Daguerre(parts, config, net),
        "plain": Bare(parts, config, copy.deepcopy(net), fused=False),
        "fused": Bare(parts, config, copy.deepcopy(net), fused=True),
    }
    gap = check_parity(variants, items)
    print(f"parity: losses over {PARITY_STEPS} steps agree within {gap:.1e}")
    rounds: list[dict[str, float]] = []
    for number in range(given.rounds):
        order = list(variants) if number % 2 else list(reversed(variants))
        times = {name: timed(variants[name].step, items, given.steps) for name in order}
        rounds.append(times)
    size = len(items[0][0].names)
    result = {"recipe": given.recipe, "threads": torch.get_num_threads(), "torch": torch.__version__, "rows": {}}
    print(f"{'variant':10} {'ms/step':>8} {'img/s':>7} {'speed of daguerre against it':>30}")
    for name in variants:
        seconds = statistics.median(times[name] for times in rounds)
        ratios = sorted(times[name] / times["daguerre"] for times in rounds)
        low, middle, high = (float(np.quantile(ratios, q)) for q in (0.25, 0.5, 0.75))
        result["rows"][name] = {"ms_per_step": seconds * 1e3, "ratio": middle, "ratio_middle_half": [low, high]}
        print(f"{name:10} {seconds * 1e3:8.1f} {size / seconds:7.1f} {middle:12.3f}x ({low:.3f} to {high:.3f})")
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
