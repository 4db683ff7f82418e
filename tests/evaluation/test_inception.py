"""The Inception network of FID: names and shapes of the published files, features and resize policies of other
codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from outside_inputs import images
from recorded_metrics import recorded
from safetensors.torch import save_file
from torch.nn import functional

from daguerre.errors import UserError
from daguerre.evaluation.networks import inception
from daguerre.evaluation.networks.place import NetworkPlace
from daguerre.evaluation.networks.resize import POLICIES

OUTSIDE = recorded()
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network():
    return inception.load(NetworkPlace(path="random"), CPU, "tensorflow")


def test_names_and_shapes_are_those_of_the_published_files():
    """torch-fidelity's module loads its file strictly, and pytorch-fid's has the same digest in its name."""
    with torch.device("meta"):
        ours = {f"{name} {list(value.shape)}" for name, value in inception.Inception().state_dict().items()}
    published = set(OUTSIDE["names"].tolist())
    assert published - ours == {"fc.weight [1008, 2048]", "fc.bias [1008]"}
    assert ours <= published


def test_features_are_those_of_torch_fidelity(network):
    found = np.concatenate([network.compute([one]) for one in images()])
    assert found.shape == (3, 2048)
    assert np.abs(found - OUTSIDE["inception"]).max() < 1e-5
    assert OUTSIDE["inception"].std() > 0.1


def test_random_weights_have_one_digest(network):
    assert network.digest.startswith("a017e31d")
    assert network.label == "random-inception-a017e31d-tensorflow"
    with pytest.raises(UserError, match="asks for others"):
        NetworkPlace(path="random", digest="0" * 64).checked(network.digest)


@pytest.mark.long  # of the quick tests, test_lpips.py reads either file
def test_files_are_read_by_their_names(network, tmp_path):
    weights = {name: value.clone() for name, value in network.net.state_dict().items()}
    published = weights | {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
    torch.save(published, tmp_path / "weights.pth")
    save_file(
        {name: value for name, value in weights.items() if not name.endswith("num_batches_tracked")},
        tmp_path / "weights.safetensors",
    )
    small = images()[:1]
    for name in ("weights.pth", "weights.safetensors"):
        again = inception.load(NetworkPlace(path=str(tmp_path / name)), CPU, "tensorflow")
        assert np.array_equal(again.compute(small), network.compute(small))
        assert again.label.startswith("inception-")


def test_other_files_are_refused_in_words(network, tmp_path):
    weights = {name: value.clone() for name, value in network.net.state_dict().items() if "Mixed_7c" not in name}
    save_file(weights, tmp_path / "part.safetensors")
    with pytest.raises(UserError, match=r"lacks 45 weights.*pt_inception-2015-12-05-6726825d\.pth"):
        inception.load(NetworkPlace(path=str(tmp_path / "part.safetensors")), CPU, "tensorflow")
    with pytest.raises(UserError, match=r"pt_inception-2015-12-05-6726825d\.pth \(96 MB\)"):
        inception.load(NetworkPlace(path=str(tmp_path / "none.pth")), CPU, "tensorflow")


def test_tensorflow_and_pillow_policies_are_those_of_their_codes():
    for name in ("tensorflow", "pillow_bicubic"):
        found = POLICIES[name](images()[0], 299)[:, ::13, ::13].numpy()
        assert np.abs(found - OUTSIDE[name]).max() < 2e-4, name


def test_each_policy_follows_its_formula():
    """On one row of pixels: where each pixel of the result is read, in float64."""
    row = images()[0][5, :40, 0].astype(np.float64)
    pixels = np.repeat(np.repeat(row[None, :, None], 40, axis=0), 3, axis=2).astype(np.uint8)
    for side in (97, 13):
        scale, places = 40 / side, np.arange(side)
        plain = np.interp((places + 0.5) * scale - 0.5, np.arange(40), row)
        expected = {"tensorflow": np.interp(places * scale, np.arange(40), row), "torch": plain}
        expected["antialias"] = filtered(row, side, lambda x: np.maximum(0, 1 - np.abs(x)), 1)
        expected["pillow_bicubic"] = filtered(row, side, cubic, 2).clip(0, 255)
        for name, values in expected.items():
            assert np.abs(POLICIES[name](pixels, side)[1, 7].numpy() - values).max() < 1e-3, (name, side)


def filtered(row: np.ndarray, side: int, kernel, reach: float) -> np.ndarray:
    """A filter that is as wide as the pixels of the result, where these are wider."""
    scale = len(row) / side
    wide = max(1.0, scale)
    found = []
    for i in range(side):
        centre = (i + 0.5) * scale
        first, last = max(0, int(centre - reach * wide + 0.5)), min(len(row), int(centre + reach * wide + 0.5))
        weights = kernel((np.arange(first, last) + 0.5 - centre) / wide)
        found.append(weights @ row[first:last] / weights.sum())
    return np.array(found)


def cubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    return np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, np.where(x < 2, ((-0.5 * x + 2.5) * x - 4) * x + 2, 0))


def test_ranges_are_those_of_the_codes():
    """pytorch-fid scales 0..255 to -1..1, the others to (x - 128)/128: a white image tells."""
    seen = {}

    class Net(torch.nn.Module):
        def forward(self, x):
            seen["x"] = x
            return functional.adaptive_avg_pool2d(x, 1).flatten(1)

    white = np.full((20, 20, 3), 255, np.uint8)
    for policy in POLICIES:
        inception.Network(Net(), "0" * 64, False, policy, CPU).compute([white])
        assert seen["x"].max().item() == pytest.approx(1.0 if policy == "torch" else 127 / 128), policy
