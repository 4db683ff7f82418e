"""Ranks, alphas and learning rates of single blocks of a UNet in kohya's configs."""

from collections.abc import Mapping, Sequence
from typing import Any

from daguerre.errors import UserError
from daguerre.foreign import peers
from daguerre.foreign.names import blocks, lora
from daguerre.foreign.reader import Reading


def rates(reading: Reading, family: str, finds_rate: bool) -> None:
    """The rate of each block of SDXL's UNet, of a full fine-tune; `finds_rate`: its optimizer has one for all."""
    text = reading.get("block_lr")
    if family != "sdxl" or not peers.asks(text) or peers.asks(reading.get("network_module")):
        return
    try:
        found = {**reading.values.get("optimizer.learning_rates", {}), **blocks.of_sdxl(str(text))}
    except UserError as error:
        reading.refuse("block_lr", str(error))
        return
    if finds_rate:
        reading.refuse("block_lr", peers.ONE_RATE)
    else:
        reading.carry("block_lr", "optimizer.learning_rates", found)


def parted(words: Sequence[str], module: str, family: str) -> tuple[list[str], dict[str, str]]:
    """The arguments of a network that do not speak of blocks, and those that do, where they can be carried: for a
    `family` with such blocks."""
    given = lora.parted(words)
    own = {name: given[name] for name in blocks.ARGUMENTS if given.get(name)}
    # A factor of a block and one of LoRA+ would be of the same weights, and each weight has one.
    if family not in blocks.families() or module != "networks.lora" or lora.has_ratio(given):
        return [*words], {}
    return [word for word in words if word.partition("=")[0].strip() not in own], own


def lay(reading: Reading, found: dict[str, Any], family: str, given: Mapping[str, str]) -> None:
    """Adds ranks, alphas and rates of blocks to a LoRA's settings; convolutions of 3 x 3 keep their own ranks and
    alphas, which sd-scripts reads of other arguments."""
    if not given:
        return
    has_kernels = "conv" in found["adapter.targets"]
    try:
        own = blocks.of_lora(family, given, has_kernels)
    except UserError as error:
        reading.refuse("network_args", str(error))
        return
    for name, more in (("rank", own.ranks), ("alpha", own.alphas)):
        path = f"adapter.{name}_pattern"
        left_out = dict.fromkeys(own.left_out) if name == "rank" else {}
        usual = dict.fromkeys(lora.WITH_KERNEL, found[f"adapter.{name}"]) if more and has_kernels else {}
        if patterns := {**left_out, **found.get(path, usual), **more} | left_out:  # first in order, and last in value
            found[path] = patterns
    found |= {"optimizer.learning_rate_factors": own.factors} if own.factors else {}
