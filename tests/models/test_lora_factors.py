"""Factors of additions: each one's own shape and numbers are checked before a layer gets them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from measured_peak import peak
from safetensors.torch import save_file
from torch import Tensor, nn

from daguerre.errors import UserError
from daguerre.models.lora_files import fusing, shapes
from daguerre.models.lora_files.addition import Addition, merged
from daguerre.models.lora_files.read import read
from daguerre.training.precision import quantized

RANK = 4


class Network(nn.Module):
    """One layer of each shape that programs treat apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 36)
        self.square = nn.Linear(24, 24)
        self.conv = nn.Conv2d(6, 10, 3)
        self.point = nn.Conv2d(6, 10, 1)
        self.norm = nn.GroupNorm(2, 6)


NETWORK = {"net": Network()}
LORA = {"lora_A.weight", "lora_B.weight"}


def right(layer: str, kind: str) -> dict[str, tuple[int, ...]]:
    """The shapes that peft 0.21.2 and LyCORIS 4.1.3 write."""
    weight = NETWORK["net"].get_submodule(layer).weight
    out, inputs, *kernel = weight.shape
    ones, flat = [1] * len(kernel), inputs * math.prod(kernel)
    rows, columns = 2, 3
    rest = (out // rows, inputs // columns)
    found: dict[str, dict[str, tuple[int, ...]]] = {
        "lora": {"lora_A.weight": (RANK, inputs, *kernel), "lora_B.weight": (out, RANK, *ones)},
        "loha": {"hada_w1_a": (out, RANK), "hada_w1_b": (RANK, flat), "hada_w2_a": (out, RANK),
                 "hada_w2_b": (RANK, flat)},
        "lokr": {"lokr_w1": (rows, columns), "lokr_w2": (*rest, *kernel)},
        "lokr, one in two": {"lokr_w1": (rows, columns), "lokr_w2_a": (rest[0], RANK),
                             "lokr_w2_b": (RANK, rest[1] * math.prod(kernel))},
        "lokr, both in two": {"lokr_w1_a": (rows, RANK), "lokr_w1_b": (RANK, columns), "lokr_w2_a": (rest[0], RANK),
                              "lokr_w2_b": (RANK, rest[1] * math.prod(kernel))},
        "diff": {"diff": (out, inputs, *kernel)},
    }  # fmt: skip
    tucker: dict[str, dict[str, tuple[int, ...]]] = {
        "lora, Tucker": {"lora_A.weight": (RANK, inputs, *ones), "lora_mid.weight": (RANK, RANK, *kernel),
                         "lora_B.weight": (out, RANK, *ones)},
        "loha, Tucker": {name: (RANK, out if name.endswith("a") else inputs)
                         for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")}
        | {f"hada_t{half}": (RANK, RANK, *kernel) for half in "12"},
        "lokr, Tucker": {"lokr_w1": (rows, columns), "lokr_w2_a": (RANK, rest[0]), "lokr_w2_b": (RANK, rest[1]),
                         "lokr_t2": (RANK, RANK, *kernel)},
    }  # fmt: skip
    return {**found, **(tucker if kernel else {})}[kind]


KINDS = ("lora", "loha", "lokr", "lokr, one in two", "lokr, both in two", "diff")
CASES = [(layer, kind) for layer in ("linear", "square", "conv", "point") for kind in KINDS]
CASES += [("conv", kind) for kind in ("lora, Tucker", "loha, Tucker", "lokr, Tucker")]


def written(folder: Path, layer: str, factors: dict[str, Tensor], numbers: dict[str, Any] | None = None) -> Path:
    named = {f"net.{layer}.{name}": value.contiguous() for name, value in factors.items()}
    header = (
        None if numbers is None else {"lora_adapter_metadata": json.dumps({f"net.{k}": v for k, v in numbers.items()})}
    )
    save_file(named, folder / "x.safetensors", header)
    return folder / "x.safetensors"


def made(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def others(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every other shape of as many numbers, of up to four dimensions: transposed, flattened, channels last ..."""
    count = math.prod(shape)
    for dimensions in range(1, 5):
        for sizes in itertools.product([n for n in range(1, count + 1) if count % n == 0], repeat=dimensions):
            if math.prod(sizes) == count and shapes.plain(sizes) != shapes.plain(shape):
                yield sizes


@pytest.mark.parametrize(("layer", "kind"), CASES)
def test_a_factor_of_any_other_shape_is_refused(layer, kind):
    """All reshapes of each factor, also those that the product would take after another reshape."""
    given, weight = right(layer, kind), NETWORK["net"].get_submodule(layer).weight.shape
    assert {*given} in shapes.WHOLE
    assert shapes.misfit(made(given), weight) == ""
    tried = 0
    for name, shape in given.items():
        for other in others(shape):
            of_convolution = kind.startswith("lokr,") and name == "lokr_w2_b" and len(weight) == 4
            if of_convolution and other == (RANK, weight[1] // 3, *weight[2:]):
                continue  # the same numbers in the same order, not flattened yet
            meant = {**given, name: other}
            assert shapes.misfit({key: torch.empty(size) for key, size in meant.items()}, weight), (name, other)
            tried += 1
    assert tried > 10


def swapped(shapes: dict[str, tuple[int, ...]], *names: str) -> dict[str, tuple[int, ...]]:
    return {name: shape[::-1] if name in names else shape for name, shape in shapes.items()}


LINEAR = {kind: right("linear", kind) for kind in KINDS}
CONV = right("conv", "lora")
WRONG: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "a LoRA of the transposed layer": ("linear", {"lora_A.weight": (RANK, 36), "lora_B.weight": (24, RANK)}),
    "lokr_w1 transposed": ("linear", swapped(LINEAR["lokr"], "lokr_w1")),
    "lokr_w2 transposed": ("linear", swapped(LINEAR["lokr"], "lokr_w2")),
    "both factors of LoKr transposed": ("linear", swapped(LINEAR["lokr"], "lokr_w1", "lokr_w2")),
    "both factors of LoKr flat": ("linear", {"lokr_w1": (6,), "lokr_w2": (144,)}),
    "half of LoHa is broadcast": ("linear", {**LINEAR["loha"], "hada_w2_a": (1, RANK)}),
    "half of LoHa is a row": ("linear", {**LINEAR["loha"], "hada_w2_b": (RANK, 1)}),
    "channels last": ("conv", {**CONV, "lora_A.weight": (RANK, 3, 3, 6)}),
    "a kernel on B": ("conv", {"lora_A.weight": (RANK, 6, 1, 1), "lora_B.weight": (10, RANK, 3, 3)}),
    "both w1 and w1_a, w1_b": ("linear", {**LINEAR["lokr"], "lokr_w1_a": (2, RANK), "lokr_w1_b": (RANK, 3)}),
    "both w2 and w2_a, w2_b": ("linear", {**LINEAR["lokr"], "lokr_w2_a": (18, RANK), "lokr_w2_b": (RANK, 8)}),
    "LoRA and LoHa": ("linear", {**LINEAR["lora"], **LINEAR["loha"]}),
    "LoRA and a sum": ("linear", {**LINEAR["lora"], **LINEAR["diff"]}),
    "lengths of one number": ("linear", {**LINEAR["lora"], "lora_magnitude_vector": (1,)}),
    "lengths of inputs": ("linear", {**LINEAR["lora"], "lora_magnitude_vector": (24,)}),
    "lengths of no axis": ("linear", {**LINEAR["lora"], "dora_scale": (24, 1)}),
    "one length of each": ("linear", {**LINEAR["lora"], "dora_scale": (1, 1)}),
    "a number for a factor": ("linear", {**LINEAR["lora"], "lora_A.weight": ()}),
    "a number for lengths": ("linear", {**LINEAR["lora"], "dora_scale": ()}),
    "rank 0": ("linear", {"lora_A.weight": (0, 24), "lora_B.weight": (36, 0)}),
    "a Tucker decomposition of a linear layer": ("linear", {**LINEAR["lora"], "lora_mid.weight": (RANK, RANK)}),
    "half of a Tucker decomposition": (
        "conv",
        {k: v for k, v in right("conv", "loha, Tucker").items() if k != "hada_t2"},
    ),
    "a sum for a norm": ("norm", {"w_norm": (1, 6)}),
    "a LoRA of a norm": ("norm", {"lora_A.weight": (1, 6), "lora_B.weight": (6, 1)}),
    "a bias of another": ("linear", {"diff_b": (24,)}),
    "a bias without its product": ("linear", {"lora_B.bias": (36,)}),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_of_other_shapes_are_refused(name, tmp_path):
    layer, given = WRONG[name]
    with pytest.raises(UserError, match=f"x.safetensors.*net.{layer}"):
        read(written(tmp_path, layer, made(given)), NETWORK)


@pytest.mark.parametrize("lengths", [(36,), (36, 1), (1, 36)])
@pytest.mark.parametrize("name", ["lora_magnitude_vector", "lora_magnitude_vector.weight", "magnitude"])
def test_lengths_in_the_shapes_of_programs(name, lengths, tmp_path):
    given = made({**LINEAR["lora"], name: lengths})
    ((one,),) = read(written(tmp_path, "linear", given), NETWORK).values()
    assert one.factors["lora_magnitude_vector"].shape == (36,)


def test_sums_are_added_as_they_are(tmp_path):
    """LyCORIS' full and norm, and peft's biases: to the weight and the bias, by the strength."""
    given = made({"diff": (36, 24), "diff_b": (36,)})
    found = read(written(tmp_path, "linear", given), NETWORK)["net"]
    layer = NETWORK["net"].linear
    for each, value in zip(found, given.values(), strict=True):
        before = layer.get_parameter(each.tensor).detach()
        torch.testing.assert_close(merged(before, [(each, 0.5)], "net"), before + 0.5 * value)
    given = made({**LINEAR["lora"], "lora_B.bias": (36,), "alpha": ()})
    product, bias = read(written(tmp_path, "linear", given), NETWORK)["net"]
    assert (bias.name, bias.scale) == ("linear.bias", product.scale) != ("linear.bias", 1.0)
    given = made({"w_norm": (6,), "b_norm": (6,)})
    assert [each.name for each in read(written(tmp_path, "norm", given), NETWORK)["net"]] == [
        "norm.weight",
        "norm.bias",
    ]


def with_alpha(alpha: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return made(LINEAR["lora"]) | {"alpha": torch.tensor(alpha, dtype=dtype)}


def times(factor: float, **more: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: value * factor for name, value in made({**LINEAR["lora"], **more}).items()}


NUMBERS: dict[str, tuple[dict[str, Tensor], dict[str, Any] | None, str]] = {
    "alpha 1e300 in a tensor": (with_alpha(1e300, torch.float64), None, "has NaN or infinity in it .its alpha"),
    "alpha infinite in a tensor": (with_alpha(math.inf), None, "has NaN or infinity"),
    "alpha false": (with_alpha(True, torch.bool), None, "is bool"),
    "alpha complex": (with_alpha(1j, torch.complex64), None, "is complex64"),
    "factors of 1e30": (times(1e30), None, "what it adds to net.linear.weight has NaN or infinity"),
    "complex factors": ({k: v.to(torch.complex64) for k, v in times(1).items()}, None, "is complex64, and not a real"),
    "whole numbers": ({k: v.to(torch.int8) for k, v in times(1).items()}, None, "is int8, and not a real"),
    **{f"{key} {value!r} in the header": (times(1), {"r": RANK, key: value}, f"config of net has {key}=.*: it must")
       for key in ("lora_alpha", "alpha") for value in (0, math.nan, math.inf, -math.inf, True)},
    "alpha 1e300 in the header": (times(1), {"r": 4, "lora_alpha": 1e300}, "NaN or infinity in it .its alpha multipl"),
    "alpha of 400 digits": (times(1), {"r": 4, "lora_alpha": 10**400}, "it has a number of 401 digits"),
    "alpha 0 by pattern": (times(1), {"r": 4, "lora_alpha": 4, "alpha_pattern": {"linear": 0}}, "alpha_pattern=0: it"),
    "rank 0": (times(1), {"r": 0, "lora_alpha": 4}, "r=0: it must be a number above 0"),
    "rank below 0": (times(1), {"r": -4, "lora_alpha": 4}, "r=-4: it must be a number above 0"),
    "neither true nor false": (times(1), {"r": 4, "lora_alpha": 4, "use_rslora": "often"}, "neither true nor false"),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_of_an_addition_is_refused(name, tmp_path):
    factors, header, said = NUMBERS[name]
    with pytest.raises(UserError, match=f"x.safetensors.*{said}"):
        read(written(tmp_path, "linear", factors, header), NETWORK)


@pytest.mark.parametrize(
    ("given", "root"), [(True, True), ("true", True), (False, False), ("false", False), (None, False)]
)
def test_rslora_in_words(given, root, tmp_path):
    header = {"r": RANK, "lora_alpha": 2.0, "use_rslora": given}
    ((one,),) = read(written(tmp_path, "linear", times(1), header), NETWORK).values()
    assert one.scale == pytest.approx(2 / (2 if root else 4))


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float64]
)
def test_factors_of_any_floating_point(dtype, tmp_path):
    factors = {name: value.to(dtype) for name, value in with_alpha(2.0).items()}
    ((one,),) = read(written(tmp_path, "linear", factors), NETWORK).values()
    a, b = (factors[name].float() for name in ("lora_A.weight", "lora_B.weight"))
    torch.testing.assert_close(one.change((36, 24)), 0.5 * b @ a)
    assert one.scale == 0.5


def test_an_alpha_of_whole_numbers(tmp_path):
    ((one,),) = read(written(tmp_path, "linear", with_alpha(8, torch.int64)), NETWORK).values()
    assert one.scale == 2


def test_a_dora_that_takes_away_its_base_is_refused_with_its_layer():
    """The rows of the sum have no length to be divided by."""
    weight = NETWORK["net"].square.weight.detach()
    factors = {"lora_A.weight": torch.eye(24), "lora_B.weight": -weight, "lora_magnitude_vector": torch.ones(24)}
    own = Addition("square", factors, 1.0, origin="style.safetensors")
    with pytest.raises(
        UserError, match=r"style.safetensors: with it net.square.weight has NaN or infinity in it: noth"
    ):
        merged(weight, [(own, 1.0)], "net")
    broken = weight.clone().index_fill(0, torch.tensor([0]), math.nan)
    plain = Addition("square", {"diff": torch.ones(24, 24)}, 1.0, origin="style.safetensors")
    with pytest.raises(UserError, match="where the model itself has NaN"):
        merged(broken, [(plain, 1.0)], "net")


def test_an_addition_is_compared_over_ranks_without_its_whole_product():
    """As of a fused projection, which a file has in the rank of all its parts: memory goes by factors."""
    down, up = torch.randn(4, 600), torch.randn(900, 4)
    given = Addition("linear", {"lora_A.weight": down, "lora_B.weight": up}, 0.5)
    wider = {"lora_A.weight": torch.cat([torch.randn(8, 600), down]), "lora_B.weight": up.new_zeros(900, 12)}
    wider["lora_B.weight"][:, 8:] = up / 2
    changed = {**wider, "lora_A.weight": wider["lora_A.weight"] * (1 + 1e-5)}
    found = list[bool]()
    taken = peak(lambda: found.extend(given.agrees(Addition("linear", each, 1.0)) for each in (wider, changed)))
    assert found == [True, False]
    assert taken < 900 * 600 * 8, "a whole product in float64"


def test_files_over_a_base_of_few_bits_need_none_of_its_weights(tmp_path, monkeypatch):
    """Neither where they are read, nor where the parts of a projection become one."""
    base = Network()
    base.linear, base.square = (quantized.quantized(layer, "int8") for layer in (base.linear, base.square))
    monkeypatch.setattr(quantized, "dequantize", lambda *given: pytest.fail("a weight is made of its codes"))
    ((one,),) = read(written(tmp_path, "linear", times(1)), {"net": base}).values()
    (joined,) = fusing.joined(base, ["square", "linear"], {"linear": [one]})
    up = one.scale * one.factors["lora_B.weight"]
    assert torch.equal(joined.factors["lora_B.weight"], torch.cat([torch.zeros(24, RANK), up]))
