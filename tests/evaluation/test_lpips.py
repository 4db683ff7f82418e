"""LPIPS with random weights against torchmetrics' own, by the names of both published files."""

from __future__ import annotations

import re

import pytest
import torch
from outside_inputs import images, pair, vgg_weights
from recorded_metrics import recorded

from daguerre.errors import UserError
from daguerre.evaluation.networks import lpips
from daguerre.evaluation.networks.place import NetworkPlace

CPU = torch.device("cpu")


def test_distances_are_those_of_torchmetrics_from_either_file(tmp_path):
    weights = {name: torch.from_numpy(value.copy()) for name, value in vgg_weights().items()}
    torch.save({k: v for k, v in weights.items() if k.startswith("lin")}, tmp_path / "vgg.pth")
    torch.save({k: v for k, v in weights.items() if not k.startswith("lin")}, tmp_path / "vgg16-397923af.pth")
    levels = dict(
        zip((0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28), (1, 1, 2, 2, *[3] * 3, *[4] * 3, *[5] * 3), strict=True)
    )
    whole = {
        re.sub(r"features\.(\d+)\.", lambda m: f"net.slice{levels[int(m[1])]}.{m[1]}.", name): value
        for name, value in weights.items()
    }
    torch.save(whole, tmp_path / "whole.pt")
    first, second = recorded()["lpips"]
    networks = [lpips.load(NetworkPlace(path=str(path)), CPU) for path in (tmp_path, tmp_path / "whole.pt")]
    assert networks[0].digest == networks[1].digest
    assert networks[0].distance(*pair()) == pytest.approx(first, rel=1e-5)
    assert networks[1].distance(images()[0], images()[0][::-1].copy()) == pytest.approx(second, rel=1e-5)
    assert networks[1].distance(images()[0], images()[0]) == 0
    (tmp_path / "vgg.pth").unlink()
    with pytest.raises(UserError, match=r"lacks 5 weights, such as lin\.0\.weight: it needs vgg\.pth"):
        lpips.load(NetworkPlace(path=str(tmp_path)), CPU)
