"""Additions to the parts of a fused projection, such as query, key and value, as one addition to the whole of it."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.models.lora_files import shapes
from daguerre.models.lora_files.addition import ALPHA, COLUMNS, DIFF, DOWN, MAGNITUDE, UP, Addition
from daguerre.models.lora_files.names import BIAS, BIAS_OF_UP

BY_ROWS = (UP, DIFF, "hada_w1_a", "hada_w2_a", BIAS, BIAS_OF_UP, MAGNITUDE)
"""Factors with a row for each output of the layer."""
_OF_BLOCKS = ("lokr_w1", "lokr_w1_a")
"""Factors with a row for each block of the layer's outputs."""
_SHARED = (DOWN, ALPHA, "hada_w1_b", "hada_w2_b")
"""Factors that all outputs have in common."""
WITH_ITS_PROGRAM = (
    "Merge it into a model with that program, and make a LoRA of that: `daguerre convert extract MERGED base=BASE "
    "rank=64 out=style.safetensors`"
)
"""The way out for a file that only the program which wrote it can add up."""
LOKR = "lokr_"
"""The start of the names of a LoKr's factors, of which no part is one of the outputs' rows: their product is cut."""


def parts(path: Path, name: str, factor: str, value: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
    """The factor of each part of a fused projection, of the one that a file has for the whole.

    Args:
        rows: outputs of each part.

    Raises:
        UserError: for a factor that cannot be cut, or has another number of rows.
    """
    if factor in _SHARED or factor.startswith(LOKR):
        return [value] * len(rows)
    count = len(value) if value.ndim else 0
    by_rows = factor in BY_ROWS or (factor == COLUMNS and count == sum(rows))
    if not by_rows:
        raise UserError(
            f"{path}: {name} is {factor} of a projection that is {len(rows)} layers here, and a DoRA over inputs "
            "cannot be cut in parts. LyCORIS with wd_on_output=False and OneTrainer without lora_decompose_output_axis "
            f"write such files. {WITH_ITS_PROGRAM}",
            code="unsupported",
        )
    if count != sum(rows):
        raise UserError(
            f"{path} was made for another model: {name} is {list(value.shape)}, for a projection with {sum(rows)} "
            "outputs here",
            code="unsupported",
        )
    return value.split([*rows])


def swapped(addition: Addition) -> Addition:
    """The addition to a layer whose two halves of outputs are in the other order. UserError for a LoKr without one."""
    turned = {name: halves(addition.layer, name, value) for name, value in addition.factors.items()}
    return replace(addition, factors=turned)


def halves(layer: str, factor: str, value: Tensor) -> Tensor:
    """The factor of a layer whose two halves of outputs are in the other order. UserError for a LoKr whose first matrix
    has no two halves."""
    over_inputs = factor == COLUMNS and value.ndim and len(value) == 1
    if not value.ndim or over_inputs or factor not in (*BY_ROWS, COLUMNS, *_OF_BLOCKS):
        return value
    if factor in _OF_BLOCKS and len(value) % 2:
        raise UserError(
            f"{layer} has its two halves of outputs in another order in the layout of other programs, and {factor} of "
            f"{len(value)} rows (LyCORIS' LoKr) cannot be cut in two. {WITH_ITS_PROGRAM}",
            code="unsupported",
        )
    return torch.cat(value.chunk(2)[::-1])


def joined(
    network: nn.Module, layers: Sequence[str], additions: Mapping[str, Sequence[Addition]]
) -> Iterator[Addition]:
    """The additions to the parts as one to the weight of the whole, and one to its bias.

    Products of factors stay exact: the ranks follow each other, and each part's rows are zero in the ranks of others.
    UserError for kinds that have no such form.
    """
    for tensor in ("weight", "bias"):
        found = {layer: each for layer in layers for each in additions.get(layer, ()) if each.tensor == tensor}
        if not found:
            continue
        kinds = {frozenset(each.factors) for each in found.values()}
        rows = outputs(network, layers)
        if kinds == {frozenset({DIFF})}:
            first = next(iter(found.values()))
            values = [
                found[layer].factors[DIFF] * found[layer].scale
                if layer in found
                else first.factors[DIFF].new_zeros(count, *first.factors[DIFF].shape[1:])
                for layer, count in zip(layers, rows, strict=True)
            ]
            yield replace(first, layer=layers[0], factors={DIFF: torch.cat(values)}, scale=1.0)
        elif kinds == {frozenset({DOWN, UP})}:
            yield _product(layers, rows, found)
        elif (whole := _whole(layers, rows, found)) is not None:
            yield whole
        else:
            raise UserError(
                f"kohya's layout has {', '.join(layers)} as one projection, for which only LoRAs and whole differences "
                "have a form: write format=diffusers or format=peft, or make a LoRA of it first by `daguerre convert "
                "resize` (of a LoKr there is no other way)",
                code="unsupported",
            )


def outputs(network: nn.Module, layers: Sequence[str]) -> list[int]:
    """Outputs of each of these layers."""
    return [shapes.of_weight(network.get_submodule(layer))[0] for layer in layers]


def cuts(rows: Sequence[int]) -> list[tuple[int, int]]:
    """First row and end of each part of a fused projection, of the outputs of each."""
    ends = [*itertools.accumulate(rows)]
    return [*zip([0, *ends], ends, strict=False)]


def _whole(layers: Sequence[str], rows: Sequence[int], found: Mapping[str, Addition]) -> Addition | None:
    """The LoKr for all of a fused projection that its parts were read from; None where they are not of one."""
    parts = [found.get(layer) for layer in layers]
    first = parts[0]
    if first is None or [each and each.rows for each in parts] != cuts(rows):
        return None
    same = all(
        each and each.scale == first.scale and all(torch.equal(v, first.factors[n]) for n, v in each.factors.items())
        for each in parts
    )
    return replace(first, rows=None) if same else None


def _product(layers: Sequence[str], rows: Sequence[int], found: Mapping[str, Addition]) -> Addition:
    downs = [found[layer].factors[DOWN] for layer in layers if layer in found]
    # As where the file had one for the whole: written again, its rank stays what it was.
    if len(downs) == len(layers) and all(torch.equal(down, downs[0]) for down in downs):
        ups = [found[layer].factors[UP] * found[layer].scale for layer in layers]
        return Addition(layers[0], {DOWN: downs[0], UP: torch.cat(ups)}, 1.0)
    up = downs[0].new_zeros(sum(rows), sum(map(len, downs)))
    row = column = 0
    for layer, count in zip(layers, rows, strict=True):
        if layer in found:
            own = found[layer].factors[UP]
            up[row : row + count, column : column + own.shape[1]] = own * found[layer].scale
            column += own.shape[1]
        row += count
    return Addition(layers[0], {DOWN: torch.cat(downs), UP: up}, 1.0)
