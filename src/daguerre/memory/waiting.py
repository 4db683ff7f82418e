"""The blocks that wait in the host's memory where a recipe leaves their number open (training.swap_blocks=auto)."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from daguerre.assembly import swapped
from daguerre.assembly.batch_sizes import BatchSizes
from daguerre.config.config import Config
from daguerre.distributed.mesh import Mesh
from daguerre.errors import UserError
from daguerre.memory import estimate, static
from daguerre.memory.estimate import Say, Target
from daguerre.memory.peak import images_at_once
from daguerre.memory.report import format_size
from daguerre.training.performance.swapping import AT_ONCE

_Find = Callable[[], tuple[int, str]]
_STEP = 1 / 16
"""Share of the blocks by which more of them wait, where the first number has no room."""


def fixed(
    config: Config, mesh: Mesh, sizes: BatchSizes, device: torch.device, led: Callable[[_Find], Any] = lambda act: act()
) -> tuple[Config, list[str]]:
    """The config of a run with a number of blocks that has room in what is free of this device, and a line about it;
    one that says a number stays. `led` has one of several processes find it, and gives its result to all."""
    if config.training.swap_blocks != swapped.AUTO:
        return config, []

    def target_of(given: Config) -> Target:
        target = estimate.of(given, mesh, None, sizes)
        if device.type != "cuda":
            return target
        free = torch.cuda.mem_get_info(device)[0]
        return replace(target, card=free if target.card is None else min(free, target.card))

    count, line = led(lambda: found(config, target_of))
    return swapped.fixed(config, count), [line]


def found(config: Config, target_of: Callable[[Config], Target], say: Say = lambda stage: None) -> tuple[int, str]:
    """The fewest blocks, or a few more, with which a planned step has room, and a line that says so. UserError where
    none could wait, or all of them would not be enough."""
    setting = f"{swapped.SETTING}={swapped.AUTO}"
    if target_of(swapped.fixed(config, 0)).card is None:
        return 0, f"{setting}: no block waits, as a CPU's memory is the host's"

    def left(count: int) -> tuple[float, int]:
        """Bytes that stay free, and the blocks that could wait."""
        say(f"planning a step with {count} blocks in the host's memory")
        target = target_of(swapped.fixed(config, count))
        parts = target.parts()
        counted, every = static.count(target.config, parts, target.mesh), swapped.there(parts.family)
        steps = estimate.simulated_step(target, parts, counted)
        return target.left(steps.peak(images_at_once(target.config, target.sizes.micro))), every

    whole, every = left(0)
    if whole >= 0:
        return 0, f"{setting}: no block needs to wait, {format_size(whole)} stay free"
    least, _ = left(every)
    if least < 0:
        raise UserError(
            f"{setting}: {format_size(-whole)} are missing on the device, and {format_size(-least)} with all {every} "
            f"blocks in the host's memory: `daguerre plan RECIPE card=SIZE {swapped.SETTING}=100%` looks for other "
            "settings",
            code="resources",
            setting=swapped.SETTING,
        )
    count, free = max(AT_ONCE + 1, math.ceil(every * whole / (whole - least))), least
    while count < every and (free := left(count)[0]) < 0:
        count += math.ceil(every * _STEP)
    if count >= every:
        count, free = every, least
    return count, f"{setting}: {count} of {every} blocks wait, {format_size(free)} stay free on the device"
