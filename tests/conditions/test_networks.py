"""Conditions that compute with networks: numbers beside transformers' own processors, the drawing, and refusals."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import foreign_controlnets
import numpy as np
import pytest
import scenes
import test_conditions
import tiny_networks
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForDepthEstimation, AutoModelForObjectDetection, VitPoseForPoseEstimation
from transformers.models.dpt.image_processing_pil_dpt import DPTImageProcessorPil
from transformers.models.rt_detr.image_processing_pil_rt_detr import RTDetrImageProcessorPil

from daguerre.conditions import condition as conditions
from daguerre.conditions import depth, hed, network, pose, skeleton
from daguerre.errors import UserError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Settings of a network of each kind."""
    make = {"depth": tiny_networks.depth, "pose": tiny_networks.pose, "detector": tiny_networks.detector}
    return {name: made(tmp_path_factory.mktemp(name)) for name, made in make.items()}


outside = test_conditions.outside


@pytest.mark.parametrize("size", [(60, 44), (37, 97), (64, 64)])
def test_depth_is_the_network_behind_transformers_own_processor(folders, size):
    pixels, own = scenes.scene(*size), depth.Settings(**folders["depth"])
    made = conditions.computed(own, pixels, test_conditions.draw())[:, :, 0]
    processor = DPTImageProcessorPil.from_pretrained(own.path)
    model = AutoModelForDepthEstimation.from_pretrained(own.path).eval()
    with torch.no_grad():
        found = model(**processor(pixels, return_tensors="pt")).predicted_depth
    whole = torch.nn.functional.interpolate(found[:, None], size, mode="bicubic", align_corners=False)[0, 0]
    wanted = ((whole - whole.min()) / (whole.max() - whole.min()) * 255).numpy()
    assert np.abs(made - wanted).max() < 0.6  # rounding
    assert (made.min(), made.max()) == (0, 255)


def test_places_of_keypoints_are_those_of_transformers(outside):
    places, heights = pose.peaks(scenes.heatmaps())
    corners, sides = pose._framed(scenes.BOXES, 192 / 256)
    places = corners[:, None] + places * (sides / (47, 63))[:, None]
    assert np.abs(places - outside["pose places"]).max() < 1e-3
    assert np.abs(heights - outside["pose scores"]).max() < 1e-6


def test_crops_of_people_are_those_of_transformers(outside):
    image = Image.fromarray(scenes.scene(120, 90))
    corners, sides = pose._framed(scenes.BOXES, 192 / 256)
    crops = [pose._crop(image, c, s / (191, 255), (192, 256)) for c, s in zip(corners, sides, strict=True)]
    mine, theirs = np.stack(crops).transpose(0, 3, 1, 2)[:, :, ::8, ::8].astype(int), outside["pose crops"].astype(int)
    inside = (mine > 0) & (theirs > 0)  # at the border of the image one of them fades to black
    assert inside.mean() > 0.4
    assert np.abs(mine - theirs)[inside].max() <= 3


def test_a_skeleton_is_openposes(outside):
    seen = np.ones((1, 17), bool)
    seen[0, list(scenes.HIDDEN)] = False
    mine, theirs = skeleton.drawn(scenes.PERSON_SIZE, scenes.person()[None], seen, 4), outside["pose skeleton"]
    assert (mine != theirs).any(axis=2).mean() < 0.03  # rims: OpenCV cuts lengths and angles to whole numbers
    assert {*map(tuple, mine.reshape(-1, 3).tolist())} == {*map(tuple, theirs.reshape(-1, 3).tolist())}
    assert not skeleton.drawn(scenes.PERSON_SIZE, scenes.person()[None], np.zeros((1, 17), bool), 4).any()


def test_a_bone_is_an_ellipse():
    places, seen = np.zeros((1, 17, 2)), np.zeros((1, 17), bool)
    places[0, 6], places[0, 8] = (20.0, 30.0), (80.0, 30.0)  # the right shoulder and elbow
    seen[0, [6, 8]] = True
    made = skeleton.drawn((60, 100), places, seen, 6)
    y, x = np.mgrid[0:60, 0:100]
    inside = ((x - 50) / 30) ** 2 + ((y - 30) / 6) ** 2
    bone = (made == (153, 102, 0)).all(axis=2)
    discs = ((x - 20) ** 2 + (y - 30) ** 2 <= 49) | ((x - 80) ** 2 + (y - 30) ** 2 <= 49)
    assert bone[(inside < 0.8) & ~discs].all()
    assert not bone[inside > 1.3].any()
    assert tuple(made[30, 20]) == (255, 170, 0)
    assert tuple(made[30, 80]) == (255, 255, 0)


def test_a_pose_of_a_whole_image_and_of_detected_people(folders, monkeypatch):
    pixels = scenes.scene(80, 60)
    own = pose.Settings(**folders["pose"], threshold=0.0)
    found = network.opened(own, "pose", "VitPoseForPoseEstimation", ("vitpose",))
    _, heights = pose.keypoints(found, pixels, np.array([[0, 0, 60, 80.0]]))
    model = VitPoseForPoseEstimation.from_pretrained(own.path).eval()
    corners, sides = pose._framed(np.array([[0, 0, 60, 80.0]]), 48 / 64)
    crop = pose._crop(Image.fromarray(pixels), corners[0], (sides / (47, 63))[0], (48, 64))
    values = torch.from_numpy(found.normalised(crop).transpose(2, 0, 1)[None].copy())
    with torch.no_grad():
        heat = model(values).heatmaps.numpy()
    assert np.abs(heights - heat.max((2, 3))).max() < 1e-6
    assert conditions.computed(own, pixels, test_conditions.draw())[:, :, :3].any() == (heights > 0).any()
    detector = RTDetrImageProcessorPil.from_pretrained(folders["detector"]["path"])
    theirs = AutoModelForObjectDetection.from_pretrained(folders["detector"]["path"]).eval()
    with torch.no_grad():
        outputs = theirs(**detector(pixels, return_tensors="pt"))
    likely = torch.sigmoid(outputs.logits[0, :, 0])
    level = float(likely.sort().values[-3]) - 1e-6
    many = pose.Settings(**folders["pose"], detector={**folders["detector"], "threshold": level})
    boxes = pose._people(many, pixels)
    x, y, width, height = (
        outputs.pred_boxes[0, likely.argsort(descending=True)[:3]] * torch.tensor([60, 80, 60, 80])
    ).T
    wanted = torch.stack([x - width / 2, y - height / 2, width, height], dim=1).numpy()
    assert np.abs(boxes - wanted).max() < 0.05
    nobody = pose.Settings(**folders["pose"], detector={**folders["detector"], "threshold": 1.0})
    assert not conditions.computed(nobody, pixels, test_conditions.draw())[:, :, :3].any()


@pytest.fixture(scope="module")
def whole_hed(tmp_path_factory):
    """A file with the names and shapes of ControlNetHED, and what its authors' code made of it."""
    outputs, facts = foreign_controlnets.recorded("hed")
    path = tmp_path_factory.mktemp("hed") / "ControlNetHED.pth"
    torch.save(foreign_controlnets.hed(facts["hed"]), path)
    return {"path": str(path), "digest": hashlib.sha256(path.read_bytes()).hexdigest()}, outputs


@pytest.mark.parametrize("name", ["small", "large"])
def test_soft_edges_are_those_of_controlnets_authors(whole_hed, name):
    given, outputs = whole_hed
    pixels = foreign_controlnets.photos()[name]
    made = conditions.computed(hed.Settings(**given), pixels, test_conditions.draw())[:, :, 0]
    theirs = outputs[name].numpy()
    assert np.abs(made.astype(int) - theirs).max() <= 1
    assert theirs.std() > 20
    safe = conditions.computed(hed.Settings(**given, safe=True), pixels, test_conditions.draw())[:, :, 0]
    assert {*np.unique(safe)} <= {0, 127, 255}
    assert (safe[theirs < 84] == 0).all()
    assert (safe[(theirs > 86) & (theirs < 169)] == 127).all()


# ---- refusals


def test_a_file_that_is_not_hed_is_refused(folders, tmp_path):
    own = tiny_networks.hed(tmp_path)
    (tmp_path / "hed.onnx").write_bytes(b"x")
    (tmp_path / "broken.pth").write_bytes(b"x" * 64)
    save_file({"block1.convs.0.weight": torch.ones(1)}, tmp_path / "other.safetensors")
    wide = load_file(own["path"]) | {"block2.convs.0.bias": torch.zeros(9)}
    save_file(wide, tmp_path / "wide.safetensors")
    torch.save({"norm": Path("x")}, tmp_path / "code.pth")

    def pinned(name):
        path = tmp_path / name
        return {"path": str(path), "digest": hashlib.sha256(path.read_bytes()).hexdigest()}

    for given, said in (
        (own | {"path": str(tmp_path)}, "is not a file"),
        (pinned("hed.onnx"), "is no .safetensors or .pth file"),
        ({"path": own["path"]}, f"set digest={own['digest']}"),
        (own | {"digest": "0" * 64}, "asks for others"),
    ):
        with pytest.raises(UserError, match=said):
            conditions.check({"control": hed.Settings(**given)})
    for name, said in (
        ("broken.pth", "cannot be read as weights"),
        ("code.pth", "cannot be read as weights"),
        ("other.safetensors", "holds another network: missing or unknown: block1.convs.0.bias"),
        ("wide.safetensors", "block2.convs.0 has a shape that does not fit"),
    ):
        with pytest.raises(UserError, match=said):
            conditions.computed(hed.Settings(**pinned(name)), scenes.scene(20, 20), test_conditions.draw())


def test_networks_that_cannot_be_are_refused_before_training(folders, tmp_path):
    own = folders["depth"]
    other = {"digest": own["digest"], "path": str(tmp_path)}
    (tmp_path / "config.json").write_text("{")
    listed = tmp_path / "listed"
    listed.mkdir()
    (listed / "config.json").write_text(json.dumps({"model_type": "depth_anything"}))
    (listed / "pytorch_model.bin").write_bytes(b"x")
    for given, said in (
        (own | {"path": str(tmp_path / "no")}, "is not a folder"),
        (own | {"digest": "0" * 64}, f"has the weights {own['digest']}, and digest=000"),
        ({"path": own["path"]}, f"set digest={own['digest']}"),
        (other, "config.json cannot be read"),
        (folders["pose"], "holds a vitpose, and this condition takes dpt or depth_anything"),
        (other | {"path": str(listed)}, "no safetensors file"),
    ):
        with pytest.raises(UserError, match=said):
            conditions.check({"control": depth.Settings(**given)})
    with pytest.raises(UserError, match=r"condition pose, detector: .*holds a depth_anything.*rt_detr"):
        conditions.check({"control": pose.Settings(**folders["pose"], detector=own)})
    conditions.check(
        {"control": None, "control_2": depth.Settings(**own), "control_3": pose.Settings(**folders["pose"])}
    )


def test_a_network_that_lacks_weights_is_refused(folders, tmp_path):
    for path in Path(folders["depth"]["path"]).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("head.conv1.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="set digest=") as error:
        conditions.check({"control": depth.Settings(path=str(tmp_path))})
    digest = str(error.value).partition("set digest=")[2][:64]
    with pytest.raises(UserError, match=r"lacks 1 of the network's weights, such as head\.conv1\.weight"):
        conditions.computed(
            depth.Settings(path=str(tmp_path), digest=digest), scenes.scene(20, 20), test_conditions.draw()
        )


def pinned(folder: Path) -> depth.Settings:
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return depth.Settings(path=str(folder), digest=digest)


QUANTISED = ["scale_weight", "weight_scale", "weight_scale_inv", "weight.absmax", "SCB", "int8", "config"]


@pytest.mark.parametrize("form", QUANTISED)
def test_a_network_of_few_bits_is_refused(folders, tmp_path, form):
    """Its numbers mean something with their scales alone: the picture would be noise."""
    for path in Path(folders["depth"]["path"]).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    own = "head.conv1"
    if form == "int8":
        tensors[f"{own}.weight"] = (tensors[f"{own}.weight"] * 100).to(torch.int8)
    elif form == "config":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    else:
        tensors[f"{own}.weight"] = (tensors[f"{own}.weight"] * 100).to(torch.float8_e4m3fn)
        tensors[f"{own}.{form}"] = torch.tensor(0.01)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"condition depth: .*quantised weights: take a copy of whole ones"):
        conditions.computed(pinned(tmp_path), scenes.scene(20, 20), test_conditions.draw())


@pytest.mark.parametrize("odd", [torch.ones(4, dtype=torch.int8), 3])
def test_a_file_of_numbers_that_are_no_weights_is_refused(tmp_path, odd):
    made = tiny_networks.hed(tmp_path)
    tensors = load_file(made["path"])
    tensors[sorted(tensors)[0]] = odd
    torch.save(tensors, tmp_path / "odd.pth")
    digest = hashlib.sha256((tmp_path / "odd.pth").read_bytes()).hexdigest()
    with pytest.raises(UserError, match="holds no floating-point weights"):
        conditions.computed(
            hed.Settings(path=str(tmp_path / "odd.pth"), digest=digest), scenes.scene(20, 20), test_conditions.draw()
        )


@pytest.mark.parametrize("text", ["[]", "1", "null", "[" * 100_000, '{"model_type": []}'])
def test_a_config_of_another_form_is_refused(folders, tmp_path, text):
    for path in Path(folders["depth"]["path"]).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="condition depth: "):
        conditions.check({"control": pinned(tmp_path)})
