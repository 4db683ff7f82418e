"""The condition `faces` beside Stability's own code, whose outputs record_faces.py has recorded with tiny networks, and
the vectors that a ControlNet reads of its pictures."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import scenes
import torch
from PIL import Image

from daguerre.conditions import faces
from daguerre.conditions.condition import check, computed
from daguerre.errors import UserError
from daguerre.families.cascade.controlnets import faces as faces_read
from daguerre.families.cascade.controlnets.faces import vectors

HERE = Path(__file__).parent
DIGESTS = {
    "faces.npz": "7e8306a755a061a6487b4b1b8c21d754cb0d3b01dbe22668c9652002c99db3f3",
    "faces_detector.onnx": "1bac6199bbf702fa3df46ee2c0ef646e0b0e448409a2174e3f689913261840f7",
    "faces_recogniser.onnx": "ea8060c2f49d95b881ce003cd9f8a104230e85edf9df6f3e4583e9f5474f1b91",
}
SIZES = {"wide": (160, 224), "tall": (200, 96)}


def network(name: str) -> dict[str, str]:
    file = f"faces_{name}.onnx"
    return {"path": str(HERE / file), "digest": DIGESTS[file]}


def settings(**more: Any) -> faces.Settings:
    return faces.Settings(detector=network("detector"), recogniser=network("recogniser"), **more)


def session(name: str) -> Any:
    return onnxruntime.InferenceSession(network(name)["path"], providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def recorded() -> Any:
    return np.load(HERE / "faces.npz")


def test_files_are_those_that_were_recorded():
    assert {name: hashlib.sha256((HERE / name).read_bytes()).hexdigest() for name in DIGESTS} == DIGESTS


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("most", [4, 50])
def test_faces_are_where_their_code_finds_them(name: str, most: int, recorded: Any):
    """Within a pixel, as OpenCV resizes in few bits; a score at the threshold may fall on either side."""
    boxes, points = faces.detected(session("detector"), scenes.scene(*SIZES[name]), most)
    wanted = recorded[f"{name}/{most}/boxes"][:, :4]
    near = np.abs(boxes[:, None] - wanted[None]).max(2)
    assert (near.min(0) < 1).mean() >= 0.9
    assert abs(len(boxes) - len(wanted)) <= 2
    for i, j in zip(*np.nonzero(near < 1), strict=True):
        assert np.abs(points[i] - recorded[f"{name}/{most}/points"][j]).max() < 1


@pytest.mark.parametrize("name", SIZES)
def test_vectors_are_theirs(name: str, recorded: Any):
    pixels = scenes.scene(*SIZES[name])
    for i, points in enumerate(recorded[f"{name}/4/points"]):
        apart = np.abs(faces.upright(pixels, points)[::4, ::4] - recorded[f"{name}/aligned"][i])
        assert np.quantile(apart, 0.99) <= 3  # OpenCV's places are 32nds of a pixel
        found = faces.vector(session("recogniser"), pixels, points)
        assert found @ recorded[f"{name}/vectors"][i] > 0.999


def test_a_cell_holds_a_vector_and_a_controlnet_reads_it():
    """To 8 bits of its largest number."""
    random = np.random.default_rng(0)
    for spread in (1.0, 1e-3):
        wanted = random.normal(size=512) * spread
        cell = faces.code(wanted)
        found = vectors(torch.from_numpy(cell).permute(2, 0, 1)[None])[0, :, 0, 0].numpy()
        assert abs(np.linalg.norm(found) - 1) < 1e-6
        assert found @ wanted / np.linalg.norm(wanted) > 0.9998


def test_vectors_are_in_the_boxes_of_faces():
    pixels = scenes.scene(*SIZES["wide"])
    made = computed(settings(), pixels, lambda purpose, count: np.full(count, 0.5))
    found = vectors(torch.from_numpy(made).permute(2, 0, 1)[None])[0]
    assert found.shape == (512, 5, 7)
    boxes, points = faces.detected(session("detector"), pixels, 4)
    left, top, right, bottom = np.rint(np.trunc(boxes[-1]) / 32).astype(int)
    there = found.square().sum(0)
    assert torch.allclose(there[top : max(bottom, top + 1), left : max(right, left + 1)], torch.ones(()))
    last = torch.from_numpy(faces.vector(session("recogniser"), pixels, points[-1]))
    assert last @ found[:, top, left] > 0.999
    assert there.min() == 0
    assert computed(settings(dropout=0.9), pixels, lambda purpose, count: np.full(count, 0.5)).max() == 0
    whole = computed(settings(max_faces=1, everywhere=0.6), pixels, lambda purpose, count: np.full(count, 0.5))
    lonely = (whole[:, :, 3] > 0).all()
    assert lonely == (len(faces.detected(session("detector"), pixels, 1)[0]) == 1)


def test_pictures_that_hold_something_else_are_refused():
    made = computed(settings(), scenes.scene(*SIZES["wide"]), lambda purpose, count: np.full(count, 0.5))
    resized = np.asarray(Image.fromarray(made).resize((192, 160)))
    photo = np.concatenate([scenes.scene(64, 64), np.full((64, 64, 1), 255, np.uint8)], axis=2)
    for pixels in (resized, photo):
        with pytest.raises(UserError, match="parts that are no faces, or was resized"):
            faces_read.check(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None])


@pytest.mark.parametrize(
    ("detector", "message"),
    [
        ({"path": "none.onnx"}, "faces, detector: 'none.onnx' is not a file"),
        ({**network("detector"), "digest": "0" * 64}, "digest=0000"),
        ({"path": network("detector")["path"]}, r"set digest=\w{64}, so that"),
        ({"path": "TMP/text.onnx", "digest": hashlib.sha256(b"text").hexdigest()}, "cannot be read as ONNX"),
        (network("recogniser"), "has 1 outputs, and a detector has 9"),
    ],
)
def test_networks_that_cannot_be_used_are_refused(detector: dict[str, str], message: str, tmp_path: Path):
    (tmp_path / "text.onnx").write_bytes(b"text")
    own = {key: value.replace("TMP", str(tmp_path)) for key, value in detector.items()}
    with pytest.raises(UserError, match=message):
        check({"control": faces.Settings(detector=own, recogniser=network("recogniser"))})
