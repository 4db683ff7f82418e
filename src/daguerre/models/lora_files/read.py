"""Reads files of LoRA and its kin: diffusers' and peft's, kohya's, LyCORIS' and OneTrainer's, of whatever program.

Every tensor of a file is applied, with the strength that the file's writer gave it, or the file is refused with what is
wrong: a layer that the model does not have, a factor that is missing or of another shape, a number that is not finite.
"""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.models.lora_files import fusing, header, names, numbered, shapes
from daguerre.models.lora_files.addition import ALPHA, COLUMNS, DIFF, DOWN, MAGNITUDE, UP, Addition
from daguerre.models.lora_files.contents import Contents, contents_of, find
from daguerre.models.lora_files.names import BIAS, BIAS_OF_UP, Place
from daguerre.models.lora_files.scales import Scales
from daguerre.models.lora_files.strangers import check_is_lora, check_model, no_weight
from daguerre.models.network import facts_of

_BIASES = (BIAS, BIAS_OF_UP)
_Layer = tuple[str, str]
"""(component, layer)"""
Cut = tuple[tuple[int, int], int]
"""First row and end of a layer in a fused projection, and the rows of all of that."""
_NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""Numbers of 8 bits, for which torch has no arithmetic."""
_NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NUMBER = re.compile(r"\d+")
_SAFE = 1e30
"""A bound of an addition's numbers below which nothing can be infinite in float32."""


def read(
    path: Path, networks: Mapping[str, nn.Module], *, tokens_apart: bool = False, all_ranks: bool = False
) -> dict[str, list[Addition]]:
    """The additions of a file, or of a folder that holds one, by component and the networks' layers.

    Args:
        networks: all components of the model, without additions of their own.
        tokens_apart: new tokens in the file are read as well, by `token_files`; else they are refused.
        all_ranks: all ranks are read of a T-LoRA of ours, too; else it is refused, as its sum is no change of weights.

    Raises:
        UserError: for a file that is not wholly understood, or made for another model.
    """
    place = find(path)
    contents = _with_names(place, contents_of(place), networks)
    if tokens_apart:
        kept = {name: value for name, value in contents.tensors.items() if not name.startswith("bundle_emb.")}
        contents = contents._replace(tensors=kept)
    check_is_lora(place, contents.tensors)
    if not all_ranks and header.TLORA in contents.metadata:
        raise no_weight(str(place))
    modules, cut = _modules(place, contents, networks)
    _take_full_rank(place, modules, networks)
    scales = {component: Scales(place, component, contents.numbers) for component in networks}
    found: dict[str, list[Addition]] = {}
    for where, factors in modules.items():
        component = where[0]
        own = networks[component].get_submodule(where[1])
        for addition in _additions(place, where, factors, scales[component], own, cut.get(where)):
            found.setdefault(component, []).append(addition)
    return {component: found[component] for component in networks if component in found}


def _modules(
    path: Path, contents: Contents, networks: Mapping[str, nn.Module]
) -> tuple[dict[_Layer, dict[str, Tensor]], dict[_Layer, Cut]]:
    """The factors of each layer, and where those of a part of a fused projection lie in it. UserError for a layer that
    is unknown, or there twice."""
    layers, cut = names.layers(networks), dict[_Layer, Cut]()
    found: dict[_Layer, dict[str, Tensor]] = {}
    spelt: dict[tuple[_Layer, str], str] = {}
    unknown = set[str]()
    for name, value in contents.tensors.items():
        stem, factor = names.parted(name, path)
        if (place := layers.get(stem)) is None:
            unknown.add(stem)
            continue
        for layer, part in _parts(path, name, factor, _checked(path, name, factor, value), place, networks):
            if (other := spelt.setdefault((layer, factor), name)) != name:
                raise UserError(f"{path} has {'.'.join(layer)} twice: {other} and {name}", code="conflict")
            found.setdefault(layer, {})[factor] = part
        if factor.startswith(fusing.LOKR) and len(place.layers) > 1:
            rows = fusing.outputs(networks[place.component], place.layers)
            own = [(place.component, layer) for layer in place.layers]
            cut |= {layer: (each, sum(rows)) for layer, each in zip(own, fusing.cuts(rows), strict=True)}
    if unknown:
        if not found:  # one layer alone may be missing of what is this model's
            check_model(path, contents.tensors)
        raise UserError(_lost(path, sorted(unknown), layers, contents.metadata), code="unknown")
    if not found:
        raise UserError(f"{path} has no additions in it", code="empty")
    return found, cut


def _take_full_rank(path: Path, modules: dict[_Layer, dict[str, Tensor]], networks: Mapping[str, nn.Module]) -> None:
    """Takes the matrices of ai-toolkit's network `fullrank` for the sums that they are: each layer has a first factor
    of the size of its weight, and none a second one. UserError where there is an alpha, too, as the rank by which
    ai-toolkit divides it is in no file."""
    if any(UP in factors or DOWN not in factors for factors in modules.values()):
        return
    for (component, layer), factors in modules.items():
        weight = networks[component].get_submodule(layer).weight
        if factors[DOWN].shape != weight.shape:
            return
        if ALPHA in factors:
            raise UserError(
                f"{path} is a LoRA of ai-toolkit's type fullrank with an alpha ({component}.{layer}), of which it "
                f"does not say by what it is divided. {fusing.WITH_ITS_PROGRAM}",
                code="unsupported",
            )
    for factors in modules.values():
        factors[DIFF] = factors.pop(DOWN)


def _parts(
    path: Path, name: str, factor: str, value: Tensor, place: Place, networks: Mapping[str, nn.Module]
) -> Iterator[tuple[_Layer, Tensor]]:
    """A file's factor by the layers of the model: several where the file has one for a fused projection."""
    network = networks[place.component]
    if len(place.layers) > 1:
        values = fusing.parts(path, name, factor, value, fusing.outputs(networks[place.component], place.layers))
    else:
        own = facts_of(network).names
        turned = place.is_original and own is not None and place.layers[0] in own.swapped
        # Rows alone are in another order: both layouts have the inputs in one.
        values = [fusing.halves(place.layers[0], factor, value) if turned else value]
    yield from (((place.component, layer), part) for layer, part in zip(place.layers, values, strict=True))


def _with_names(place: Path, contents: Contents, networks: Mapping[str, nn.Module]) -> Contents:
    """The tensors by the names of the model's layers, where the file only numbers them."""
    own = next((each for each in numbered.readers() if each.is_numbered(contents.tensors)), None)
    if own is None:
        return contents
    for component, network in networks.items():
        if own.is_for(network):
            tensors = own.named(place, contents.tensors, component, network, own.config(place))
            return contents._replace(tensors=tensors)
    raise UserError(f"{place} is a LoRA for {own.model}, which this model is not", code="unsupported")


def _checked(path: Path, name: str, factor: str, value: Tensor) -> Tensor:
    """The tensor, of 8 bits as float32. UserError for NaN, for what is no number of a factor, and for an alpha of which
    programs make different things."""
    of_alpha = factor == ALPHA
    whole = of_alpha and not value.is_floating_point() and not value.is_complex() and value.dtype is not torch.bool
    if value.dtype in _NARROW:
        value = value.float()
    elif value.dtype not in _NUMBERS and not whole:
        kind = str(value.dtype).removeprefix("torch.")
        raise UserError(f"{path}: {name} is {kind}, and not a real number of floating point", code="unsupported")
    # ai-toolkit's LoKr of two whole matrices, whose alpha says nothing, has 1e10 for it: infinite in float16.
    if not (~value.isnan() if of_alpha else value.isfinite()).all():
        raise UserError(f"{path}: {name} has NaN or infinity in it", code="damaged")
    if of_alpha and (value.numel() != 1 or float(value) == 0):
        given = (
            "0, which sd-scripts takes for the rank and others for no addition" if value.numel() == 1 else "no number"
        )
        raise UserError(f"{path}: {name} is {given}: write the file again with another alpha", code="damaged")
    return value


def _lost(path: Path, unknown: list[str], layers: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    near = _nearest(unknown[0], layers)
    hint = f"; the nearest are {', '.join(near)}" if near else ""
    named = header.architecture(metadata)
    return (
        f"{path} was made for another model{f' ({named})' if named else ''}: this one has no {unknown[0]} "
        f"({len(unknown):,} of the file's modules are unknown{hint})"
    )


def _nearest(name: str, layers: Iterable[str]) -> list[str]:
    """At most two names of layers that are close to a name. Networks repeat their blocks, so names are compared without
    their numbers first: to compare with thousands takes a second."""
    kinds: dict[str, list[str]] = {}
    for layer in layers:
        kinds.setdefault(_NUMBER.sub("0", layer), []).append(layer)
    close = difflib.get_close_matches(_NUMBER.sub("0", name), kinds, n=2)
    return difflib.get_close_matches(name, [layer for kind in close for layer in kinds[kind]], n=2)


def _additions(
    path: Path, place: _Layer, factors: dict[str, Tensor], scales: Scales, module: nn.Module, cut: Cut | None
) -> Iterator[Addition]:
    """Those to the weight and the bias of one layer, with the scale that the file gives them: alpha / rank, of files
    without alpha 1."""
    alpha = factors.pop(ALPHA, None)
    biases = {name: factors.pop(name) for name in _BIASES if name in factors}
    (component, layer), where, weight = place, ".".join(place), shapes.of_weight(module)
    scale = 1.0
    if factors or not biases:
        if COLUMNS in factors:
            lengths = factors.pop(COLUMNS)
            factors[_axis(path, where, lengths)] = lengths
        _check_whole(path, where, factors)
        rows, count = cut or (None, weight[0])
        # The lengths of DoRA have been cut where the projection's were counted.
        whole = {name: value for name, value in factors.items() if cut is None or name != MAGNITUDE}
        _check_shape(path, where, whole, (count, *weight[1:]))
        factors = {name: _plain(name, value, weight) for name, value in factors.items()}
        rank = Addition(layer, factors, 1.0).rank
        if DIFF not in factors:  # of a sum all programs leave an alpha out
            of_alpha = (
                float(alpha) / rank if alpha is not None and rank else 1.0
            )  # LyCORIS: of two whole matrices it is 1
            scale = scales.of(layer, rank) if alpha is None else of_alpha
        yield _finite(path, component, Addition(layer, factors, scale, rows=rows, origin=str(path)), weight)
    for name, value in biases.items():
        bias = getattr(module, "bias", None)
        if bias is None or (name == BIAS_OF_UP and MAGNITUDE in factors):
            why = "which that layer does not have here" if bias is None else "which DoRA has no place for"
            raise UserError(f"{path} changes the bias of {where}, {why}", code="unsupported")
        _check_shape(path, f"{where}.bias", {DIFF: value}, bias.shape)
        if name == BIAS_OF_UP and not factors:
            raise UserError(f"{path}: {where} has only a bias ({name}): parts are missing", code="damaged")
        own = scale if name == BIAS_OF_UP else 1.0
        yield _finite(path, component, Addition(layer, {DIFF: value}, own, "bias", origin=str(path)), bias.shape)


def _plain(factor: str, value: Tensor, weight: Sequence[int]) -> Tensor:
    """The factor in the shape that peft has for it, of several that mean the same; `weight` is the layer's shape."""
    if factor == MAGNITUDE and len(weight) > 2:
        return value.reshape(1, -1, *(1 for _ in weight[2:]))
    if factor in (MAGNITUDE, COLUMNS):
        return value.flatten()
    return value.flatten(1) if factor == "lokr_w2_b" and value.dim() > 2 else value


def _check_whole(path: Path, where: str, factors: Mapping[str, Tensor]) -> None:
    """UserError for factors that are not an addition, and for those of more than one."""
    given = factors.keys() - {MAGNITUDE, COLUMNS}
    if given in shapes.WHOLE and not (DIFF in given and len(factors) > 1):
        return
    parts = ", ".join(sorted(factors)) or "an alpha"
    if any(whole < given or whole == {DIFF} == given for whole in shapes.WHOLE):
        raise UserError(
            f"{path}: {where} has {parts}, of which one part alone can be what is added: write the file again without "
            "the others",
            code="conflict",
        )
    raise UserError(f"{path}: {where} has only {parts}: parts are missing", code="damaged")


def _axis(path: Path, where: str, lengths: Tensor) -> str:
    """The factor that a `dora_scale` is: [out, 1, ...] or [1, in, ...], as LyCORIS and OneTrainer write it."""
    others = {MAGNITUDE: lengths.shape[1:], COLUMNS: (lengths.shape[:1] + lengths.shape[2:])}
    found = [name for name, sizes in others.items() if lengths.dim() > 1 and all(size == 1 for size in sizes)]
    if not found:
        raise UserError(
            f"{path}: {where}.dora_scale is {list(lengths.shape)}, which does not say whether outputs or inputs are "
            "scaled: write it again as [out, 1] or [1, in]",
            code="unsupported",
        )
    return found[0]


def _check_shape(path: Path, where: str, factors: Mapping[str, Tensor], weight: Sequence[int]) -> None:
    if said := shapes.misfit(factors, weight):
        given = {name: tuple(value.shape) for name, value in factors.items()}
        raise UserError(
            f"{path} was made for another model: {where} is {tuple(weight)} here, and the file has {given} for "
            f"it: {said}",
            code="unsupported",
        )


def _finite(path: Path, component: str, addition: Addition, shape: Sequence[int]) -> Addition:
    """The addition. UserError where its product is no number: factors or an alpha are too large."""
    # A bound first: the product of every layer would take longer than all the rest of reading.
    most = max(1.0, abs(addition.scale))
    for value in addition.factors.values():
        most *= max(1.0, float(value.abs().max()) * max(value.shape))
    if not most < _SAFE and not torch.isfinite(addition.change(shape)).all():
        numbers = "" if math.isclose(addition.scale, 1) else f" (its alpha multiplies by {addition.scale:g})"
        raise UserError(
            f"{path}: what it adds to {component}.{addition.name} has NaN or infinity in it{numbers}: its numbers are "
            "too large, or it is damaged",
            code="damaged",
        )
    return addition
