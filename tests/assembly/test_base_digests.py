"""The digest by which a checkpoint names the base that it was trained on."""

from __future__ import annotations

import pytest
import torch

from daguerre.assembly.base_digests import digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_elements_that_change_or_change_places_change_it(dtype: torch.dtype) -> None:
    numbers = (torch.randperm(9001) % 127).to(dtype)
    pairs = [(0, 1), (3, 3 + 2048), (4096, 8191), (8999, 9000)]
    others = []
    for one, other in pairs:
        numbers[one], numbers[other] = 5, 7
    for one, other in pairs:
        moved = numbers.clone()
        moved[[one, other]] = moved[[other, one]]
        others.append(moved)
    changed = numbers.clone()
    changed[9000] += 1
    assert len({digest({"x": each}) for each in [numbers, changed, *others]}) == 2 + len(pairs)


def test_names_and_shapes_count_and_where_the_numbers_lie_does_not() -> None:
    numbers = torch.arange(24.0)
    assert digest({"x": numbers[1:]}) == digest({"x": torch.arange(1.0, 24.0)})
    assert digest({"x": numbers.view(4, 6).T}) == digest({"x": numbers.view(4, 6).T.contiguous()})
    assert digest({"x": numbers, "y": numbers[:2]}) == digest({"y": numbers[:2], "x": numbers})
    others = [{"y": numbers}, {"x": numbers.view(4, 6)}, {"x": numbers[:2], "y": numbers}, {"x": torch.tensor(1.0)}]
    assert len({digest(each) for each in [{"x": numbers}, {"x": torch.empty(0)}, *others]}) == 6
