"""kohya's blocks of the UNets of Stable Diffusion 1, 2 and SDXL, as patterns of our names: 25 and 23 of them.

sd-scripts counts from the inputs down to the middle (12; SDXL 10 to 12) and up again. The first, and of SDXL the last,
have no layers with a LoRA. Sources: `networks/lora.py` (get_block_index, get_block_lr_weight) and `sdxl_train.py`
(get_block_params_to_optimize) of kohya-ss/sd-scripts@48d368fa.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from daguerre.errors import UserError
from daguerre.foreign.names.values import number

ARGUMENTS = ("down_lr_weight", "mid_lr_weight", "up_lr_weight", "block_lr_zero_threshold", "block_dims", "block_alphas")
"""Arguments of `networks.lora` that say something of each block."""
_DOWN = 12
"""Blocks of the way down of Stable Diffusion 1 and 2; as many lead up again."""
_DOWN_SDXL, _MIDDLE_SDXL = 9, 3
_COUNTS = {"sd": 2 * _DOWN + 1, "sdxl": 2 * _DOWN_SDXL + _MIDDLE_SDXL + 2}
_ATTENDING: dict[str, dict[str, tuple[int, ...]]] = {
    "sd": {"down": (0, 1, 2), "up": (1, 2, 3)},
    "sdxl": {"down": (1, 2), "up": (0, 1)},
}
"""Blocks of diffusers' UNets that have attention."""


def families() -> tuple[str, ...]:
    """Those whose blocks these are."""
    return tuple(_COUNTS)


class OfLora(NamedTuple):
    """Settings of blocks, by patterns of our layers' names."""

    left_out: list[str]
    """Without a LoRA: their weight is 0."""
    ranks: dict[str, int | None]
    """Of all but convolutions of 3 x 3; None: without a LoRA."""
    alphas: dict[str, float]
    """Of the same."""
    factors: dict[str, float]
    """Of the rate, where it is not 1."""


def of_lora(family: str, given: Mapping[str, str], has_convolutions: bool) -> OfLora:
    """Settings that arguments of a LoRA ask for; UserError for what sd-scripts does not read, either.

    Args:
        given: of `ARGUMENTS`.
        has_convolutions: whether convolutions have a LoRA, too, or attention and feed-forward layers alone.
    """
    where = _of_lora(family, has_convolutions)
    weights = _weights(family, given)
    left_out = [pattern for weight, own in zip(weights, where, strict=True) if not weight for pattern in own]
    ranks = {name: int(value) or None for name, value in _by_block("block_dims", given, where).items()}
    without = {*left_out, *(name for name, rank in ranks.items() if rank is None and ".attentions." in name)}
    factors = {pattern: weight for weight, own in zip(weights, where, strict=True) for pattern in own if weight != 1}
    return OfLora(
        left_out,
        ranks,
        _by_block("block_alphas", given, where),
        {pattern: weight for pattern, weight in factors.items() if pattern not in without},
    )


def _by_block(name: str, given: Mapping[str, str], where: Sequence[Sequence[str]]) -> dict[str, float]:
    """A number for each pattern; {} where the argument is not given."""
    if name not in given:
        return {}
    values = _numbers(name, given[name])
    if len(values) != len(where):
        raise UserError(f"{name} has {len(values)} values, and this model has {len(where)} blocks", code="conflict")
    return {pattern: value for value, own in zip(values, where, strict=True) for pattern in own}


def of_sdxl(text: str) -> dict[str, float]:
    """`block_lr` of a full fine-tune of SDXL: rates of our parameters by pattern. UserError for other than 23 rates, or
    one of 0, with which sd-scripts leaves a block as it is."""
    rates = _numbers("block_lr", text)
    where = _of_sdxl()
    if len(rates) != len(where):
        raise UserError(f"block_lr has {len(rates)} values, and SDXL has {len(where)} blocks", code="conflict")
    if 0 in rates:
        raise UserError(
            "block_lr has a rate of 0, which leaves a block untrained there: whole components are trained here",
            code="unsupported",
        )
    return {pattern: rate for rate, patterns in zip(rates, where, strict=True) for pattern in patterns}


def _of_lora(family: str, has_convolutions: bool) -> list[list[str]]:
    """The patterns of each block's layers that have a LoRA."""
    if family == "sdxl":
        conv_in_and_out = ("unet.conv_in", "unet.conv_norm_out", "unet.conv_out", "unet.time_e", "unet.add_e")
        every = [[name for name in own if not name.startswith(conv_in_and_out)] for own in _of_sdxl()]
    else:
        every = _of_sd()
    kept = (".attentions.",) if not has_convolutions else (".attentions.", ".resnets.", "samplers.")
    return [[name for name in own if any(part in name for part in kept)] for own in every]


def _of_sd() -> list[list[str]]:
    found: list[list[str]] = [[] for _ in range(_COUNTS["sd"])]
    for side, first, layers in (("down", 1, 2), ("up", _DOWN + 1, 3)):
        for i in range(4):
            for j in range(layers):
                found[first + 3 * i + j] += _layers("sd", side, i, j)
            # The last block has no sampler; on the way up it shares the place of the third layer.
            if i < 3:
                found[first + 3 * i + 2].append(f"unet.{side}_blocks.{i}.{side}samplers.0.*")
    found[_DOWN] = [f"unet.mid_block.{name}.*" for name in ("resnets.0", "attentions.0", "resnets.1")]
    return found


def _of_sdxl() -> list[list[str]]:
    """The patterns of all parameters of each block."""
    found: list[list[str]] = [["unet.time_embedding.*", "unet.add_embedding.*"], ["unet.conv_in.*"]]
    for i in range(3):
        found += [_layers("sdxl", "down", i, j) for j in range(2)]
        found += [[f"unet.down_blocks.{i}.downsamplers.0.*"]] if i < 2 else []
    found += [[f"unet.mid_block.{name}.*"] for name in ("resnets.0", "attentions.0", "resnets.1")]
    for i in range(3):
        found += [_layers("sdxl", "up", i, j) for j in range(3)]
        found[-1] += [f"unet.up_blocks.{i}.upsamplers.0.*"] if i < 2 else []
    return [*found, ["unet.conv_norm_out.*", "unet.conv_out.*"]]


def _layers(family: str, side: str, block: int, layer: int) -> list[str]:
    kinds = ("resnets", "attentions") if block in _ATTENDING[family][side] else ("resnets",)
    return [f"unet.{side}_blocks.{block}.{kind}.{layer}.*" for kind in kinds]


def _weights(family: str, given: Mapping[str, str]) -> list[float]:
    """The factor of the rate of each block: 1 where nothing is said."""
    count = _DOWN_SDXL if family == "sdxl" else _DOWN
    threshold = number("network_args: block_lr_zero_threshold", given.get("block_lr_zero_threshold", "0"))

    def of(name: str, length: int) -> list[float]:
        if not given.get(name):
            return [1.0] * length
        values = [value if value > threshold else 0.0 for value in _listed(name, given[name], length)]
        return [*values, *[1.0] * length][:length]  # as sd-scripts fills and cuts them

    middle = _MIDDLE_SDXL if family == "sdxl" else 1
    whole = [*of("down_lr_weight", count), *of("mid_lr_weight", middle), *of("up_lr_weight", count)]
    return [1.0, *whole, 1.0] if family == "sdxl" else whole


_CURVES: dict[str, Callable[[float], float]] = {
    "cosine": lambda x: math.sin(math.pi * (1 - x) / 2),
    "sine": lambda x: math.sin(math.pi * x / 2),
    "linear": lambda x: x,
    "reverse_linear": lambda x: 1 - x,
    "zeros": lambda x: 0.0,
}
"""Weights that have a name, from the first block (0) to the last (1) of a side."""


def _listed(name: str, text: str, length: int) -> list[float]:
    curve, _, more = text.partition("+")
    if curve in _CURVES and name != "mid_lr_weight":
        least = number(f"network_args: {name}", more) if more else 0.0
        return [_CURVES[curve](i / (length - 1)) + least for i in range(length)]
    if "," not in text and name != "mid_lr_weight":
        raise UserError(f"network_args: {name}={text} is no list and none of {', '.join(_CURVES)}", code="unsupported")
    return _numbers(name, text)


def _numbers(name: str, text: str) -> list[float]:
    return [number(f"network_args: {name}", part.strip() or "0") for part in text.split(",")]
