"""The addition to one layer that files of LoRA and its kin hold, whatever their names: factors, and a scale.

Factors have peft's names. `Addition.weight` computes in float32 what `adapters/lora.py` says of each kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from daguerre.errors import UserError

DIFFUSERS_FILE, KOHYA_FILE = "pytorch_lora_weights.safetensors", "kohya.safetensors"
METADATA = "lora_adapter_metadata"
"""Key of a file's header under which diffusers keeps peft's configs, by component."""
MAGNITUDE = "lora_magnitude_vector"
DOWN, UP, MIDDLE = "lora_A.weight", "lora_B.weight", "lora_mid.weight"
ALPHA = "alpha"
DIFF = "diff"
"""What is added as it is: LyCORIS' full and norm, and biases."""
COLUMNS = "dora_scale"
"""LyCORIS' and OneTrainer's DoRA over the inputs of a weight; over its outputs it is MAGNITUDE."""
_STRONG = (UP, "hada_w1_a", "lokr_w1", "lokr_w1_a", DIFF)
"""Factors into which a strength can be multiplied."""
_MOST_OFF = 1e-6
"""Share of a factor's norm that is more than a multiplication in float32 rounds."""
_OF_16_BITS = (torch.float16, torch.bfloat16)
_RANKED = (DOWN, "hada_w1_b", "lokr_w1_b", "lokr_w2_b")
"""Factors whose first dimension is the rank, the one that other programs look at first."""


@dataclass(frozen=True)
class Addition:
    """Addition to the weight or the bias of one layer."""

    layer: str
    """Name of the layer in its component."""
    factors: Mapping[str, Tensor]
    """By peft's names: lora_A.weight and lora_B.weight (and lora_mid.weight, of a Tucker decomposition), hada_w1_a and
    so on, lokr_w1 and so on; of DoRA lora_magnitude_vector [out], or dora_scale [in], which peft does not have."""
    scale: float
    """The product of the factors is multiplied by it."""
    tensor: Literal["weight", "bias"] = "weight"
    """What of the layer it is added to. Norms and biases have `DIFF` alone."""
    rows: tuple[int, int] | None = None
    """First row and end of what is this layer's of a LoKr that is for a whole fused projection; None: all rows."""
    origin: str = field(default="", compare=False)
    """The file that it is from, for messages."""

    @property
    def name(self) -> str:
        """Name of the tensor in its component that it is added to."""
        return f"{self.layer}.{self.tensor}"

    @property
    def rank(self) -> int | None:
        """The rank that programs read off the factors; None of a Kronecker product of two whole matrices, and of what
        is no product."""
        return next((len(self.factors[name]) for name in _RANKED if name in self.factors), None)

    @property
    def strong(self) -> str:
        """The factor into which a strength is multiplied."""
        return next(name for name in _STRONG if name in self.factors)

    def agrees(self, other: Addition) -> bool:
        """Compares: True if both have the same factors, the strength counted in one of them, to float32's rounding."""
        if (self.name, self.rows, self.factors.keys()) != (other.name, other.rows, other.factors.keys()):
            return False
        if {DOWN, UP} == self.factors.keys() and self.rank != other.rank:
            # Of a part of a fused projection, which a file has in the rank of all parts together.
            (up, down), (its_up, its_down) = self._pair(), other._pair()
            apart = _norm(torch.cat([up, -its_up], 1), torch.cat([down, its_down]))
            return apart <= _MOST_OFF * _norm(up, down)
        for name, value in self.factors.items():
            scales = (self.scale, other.scale) if name == self.strong else (1.0, 1.0)
            mine, its = (
                v.detach().cpu().double() * s for v, s in zip((value, other.factors[name]), scales, strict=True)
            )
            if mine.shape != its.shape or not (its - mine).norm() <= _MOST_OFF * mine.norm():
                return False
        return True

    def to(self, where: torch.device | str | torch.dtype) -> Addition:
        """The addition with its factors on a device, or in a type."""
        return replace(self, factors={name: value.to(where) for name, value in self.factors.items()})

    def weight(self, before: Tensor, strength: float = 1.0) -> Tensor:
        """The layer's weight with the addition, in float32.

        Args:
            before: the weight [out, in] or [out, in, height, width].
            strength: multiplies what changes.
        """
        before = before.float()
        moved = before + self.change(before.shape)
        for name, axis in ((MAGNITUDE, 0), (COLUMNS, 1)):
            if name in self.factors:
                turned = moved.transpose(0, axis)
                each = self.factors[name].float().flatten() / turned.flatten(1).norm(dim=1)
                moved = (turned * each.reshape(-1, *(1 for _ in before.shape[1:]))).transpose(0, axis)
        return moved if strength == 1 else before + strength * (moved - before)  # the difference would round once more

    def change(self, shape: Sequence[int]) -> Tensor:
        """The scaled product of the factors, in float32, as a weight of this shape: of all kinds but DoRA what is
        added."""
        return self.scale * self._product().reshape(*shape)

    def _pair(self) -> tuple[Tensor, Tensor]:
        """Both factors of a plain LoRA as matrices in float64, the scale counted in the second."""
        up, down = (self.factors[name].detach().cpu().flatten(1).double() for name in (UP, DOWN))
        return up, self.scale * down

    def _product(self) -> Tensor:
        t = {name: value.float() for name, value in self.factors.items()}
        if DIFF in t:
            return t[DIFF]
        if DOWN in t:
            if MIDDLE in t:
                return torch.einsum("or,rshw,si->oihw", t[UP].flatten(1), t[MIDDLE], t[DOWN].flatten(1))
            return t[UP].flatten(1) @ t[DOWN].flatten(1)
        if "hada_w1_a" in t:
            return _half(t, "1") * _half(t, "2")
        one = t["lokr_w1"] if "lokr_w1" in t else t["lokr_w1_a"] @ t["lokr_w1_b"]
        if "lokr_t2" in t:
            two = torch.einsum("rshw,ro,si->oihw", t["lokr_t2"], t["lokr_w2_a"], t["lokr_w2_b"])
        else:
            two = t["lokr_w2"] if "lokr_w2" in t else t["lokr_w2_a"] @ t["lokr_w2_b"].flatten(1)
        product = torch.kron(one.reshape(*one.shape, *(1 for _ in two.shape[2:])), two.contiguous())
        return product if self.rows is None else product[slice(*self.rows)]


def _norm(up: Tensor, down: Tensor) -> float:
    """The norm of a product of factors, without the product: that of a wide layer takes hundreds of megabytes."""
    return float((torch.linalg.qr(up).R @ torch.linalg.qr(down.T).R.T).norm())


def _half(t: Mapping[str, Tensor], number: str) -> Tensor:
    """One of the two matrices of LoHa, or of its Tucker form for convolutions."""
    a, b = t[f"hada_w{number}_a"], t[f"hada_w{number}_b"]
    middle = t.get(f"hada_t{number}")
    return a @ b if middle is None else torch.einsum("rshw,ro,si->oihw", middle, a, b)


def stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor on the CPU as files hold it: in `dtype` if that has 16 bits and holds all of its numbers, else in
    float32."""
    wide = value.detach().to("cpu", torch.float32)
    narrow = wide.to(dtype)
    return narrow if dtype in _OF_16_BITS and torch.equal(narrow.float(), wide) else wide


def merged(weight: Tensor, own: Sequence[tuple[Addition, float]], component: str) -> Tensor:
    """A weight in float32 with the sum of all differences from it, each with its strength: their order does not
    matter. UserError where the sum is no number, such as of a DoRA that takes away what it is a length of."""
    before = weight.float()
    changes = [each.to(weight.device).weight(before, strength) - before for each, strength in own]
    found = before + sum(changes[1:], changes[0])
    if not torch.isfinite(found).all():
        wrong = [each for (each, _), change in zip(own, changes, strict=True) if not torch.isfinite(change).all()]
        sources = " and ".join(dict.fromkeys(each.origin or "the LoRA" for each in wrong or [each for each, _ in own]))
        why = "" if torch.isfinite(before).all() else ", where the model itself has NaN or infinity"
        raise UserError(
            f"{sources}: with it {component}.{own[0][0].name} has NaN or infinity in it{why}: nothing is written. "
            "Leave it out, or use another copy",
            code="damaged",
        )
    return found
