"""ControlNets of Stage C against Stability's own code, whose files, outputs and gradients record_controlnet.py has
recorded."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenes
import torch
from diffusers import StableCascadeUNet
from safetensors.torch import load_file, save_file

from daguerre.conditions import canny, inpaint, qr, tile
from daguerre.conditions.condition import computed
from daguerre.errors import UserError
from daguerre.families.cascade import files, sizes
from daguerre.families.cascade.controlnets import files as stage_c_files
from daguerre.families.cascade.controlnets import stage_c
from daguerre.families.cascade.controlnets.beside_stage_c import OfStageC
from daguerre.families.cascade.efficientnet import EfficientNetEncoder
from daguerre.families.stable_diffusion import controlnet_files as unet_files
from daguerre.models.controlnets.controlled import Wanted
from daguerre.models.export.about import About
from daguerre.models.weights import load as weights_load

HERE = Path(__file__).parent
DIGESTS = {
    "controlnet.npz": "97916011516b9d7c",
    "controlnet_colour.safetensors": "63eb5e1fb9ef882d",
    "controlnet_grey.safetensors": "e6804d9f5cbb3215",
    "controlnet_holes.safetensors": "0db3368fff79ed80",
    "controlnet_latent.safetensors": "7a73117118f58e6c",
    "controlnet_simple.safetensors": "e16bb1884b883090",
}
KINDS = ("grey", "holes", "colour", "simple", "latent")
BLOCKS = (0, 1, 4, 5)
SCENE = scenes.scene(96, 128)


@pytest.fixture(scope="module")
def recorded() -> Any:
    return np.load(HERE / "controlnet.npz")


@pytest.fixture(scope="module")
def given() -> dict[str, torch.Tensor]:
    with np.load(HERE / "stability.npz") as file:
        return {name: torch.from_numpy(file[f"given/{name}"]) for name in ("x_c", "text", "pooled", "image")}


def of_component(component: str, kind: Any) -> Any:
    path = HERE / f"{component}.safetensors"
    shapes = files.shapes(path, component)
    network = kind(**(sizes.told(shapes) if component == "prior" else sizes.effnet_told(shapes)))
    weights_load.fill(network, files.read(path, component), path)
    return network.eval().requires_grad_(False)


@pytest.fixture
def family() -> OfStageC:
    return OfStageC("prior", of_component("prior", StableCascadeUNet), of_component("effnet", EfficientNetEncoder))


def path(kind: str) -> str:
    return str(HERE / f"controlnet_{kind}.safetensors")


def test_files_are_those_that_were_recorded():
    found = {name: hashlib.sha256((HERE / name).read_bytes()).hexdigest()[:16] for name in DIGESTS}
    assert found == DIGESTS


@pytest.mark.parametrize("kind", KINDS)
def test_prediction_and_gradients_are_theirs(kind: str, family: OfStageC, recorded: Any, given: Any):
    network = family.read(path(kind), Wanted(blocks=BLOCKS)).train()
    hint = torch.from_numpy(recorded[f"{kind}/hint"])
    residuals = family.residuals(network, given["x_c"], torch.tensor([0.2, 0.9]), {}, hint, 1.0)
    assert [number for number, y in enumerate(residuals) if y is not None] == list(BLOCKS)
    inputs = (given["x_c"], torch.tensor([0.2, 0.9]), given["pooled"], given["text"], given["image"])
    y = family.unet(*inputs, residuals=residuals).sample
    torch.testing.assert_close(y, torch.from_numpy(recorded[f"{kind}/y"]), rtol=1e-4, atol=1e-4)
    assert (y - family.unet(*inputs).sample).abs().max() > 0.1
    y.square().sum().backward()
    prefix = f"{kind}/grad/"
    wanted = {name.removeprefix(prefix): recorded[name] for name in recorded.files if name.startswith(prefix)}
    assert len(wanted) > 8
    for name, p in network.named_parameters():
        assert p.grad is not None
        if name in wanted:
            scale = float(np.abs(wanted[name]).max()) + 1e-6
            assert (p.grad.numpy() - wanted[name]).__abs__().max() < 1e-3 * scale, name
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network(hint)
    assert all(torch.equal(buffer, before[name]) for name, buffer in network.named_buffers())


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_written_as_it_was_read(kind: str, family: OfStageC, tmp_path: Path):
    """To the bit; ours then says before which blocks its residuals are added."""
    network = family.read(path(kind), Wanted(blocks=BLOCKS, latent_factor=4 if kind in ("simple", "latent") else None))
    stage_c_files.write(tmp_path, network, About(title="mine"))
    before, after = load_file(path(kind)), load_file(tmp_path / "controlnet.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    again = family.read(str(tmp_path), Wanted())
    assert dict(again.config) == dict(network.config)
    with (tmp_path / "controlnet.safetensors").open("rb") as file:
        head = json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]
    assert head["daguerre.blocks"] == "[0, 1, 4, 5]"
    assert head["modelspec.architecture"] == "stable-cascade-v1-stage-c/controlnet"
    assert head["modelspec.title"] == "mine"


class TestNew:
    def test_it_starts_without_effect_from_the_encoder(self, family: OfStageC, given: Any):
        own = family.effnet.state_dict()
        inputs = (given["x_c"], torch.tensor([0.2, 0.9]), given["pooled"], given["text"], given["image"])
        plain = of_component("prior", StableCascadeUNet)(*inputs).sample
        for reads, channels in {"grey": 1, "colour": 3, "holes": 4}.items():
            network = family.new(Wanted(reads=reads), 3)
            pixels = torch.randint(0, 256, (2, 4, 96, 128), dtype=torch.uint8)
            hint = family.hint(network, pixels)
            assert hint.shape == (2, channels, 96, 128)
            residuals = family.residuals(network, given["x_c"], torch.zeros(2), {}, hint, 1.0)
            assert torch.equal(family.unet(*inputs, residuals=residuals).sample, plain)
            for name, tensor in network.state_dict().items():
                if name.startswith("backbone.") and name != "backbone.0.0.weight":
                    assert torch.equal(tensor, own[name]), name
            first = network.backbone[0][0].weight
            assert torch.equal(first[:, :3], own["backbone.0.0.weight"][:, :channels])
            assert not first[:, 3:].any()
            assert network.backbone[0][0].padding == ((1, 1) if reads == "colour" else (0, 0))

    def test_its_weights_follow_from_the_seed(self, family: OfStageC):
        made = [family.new(Wanted("random"), seed).state_dict() for seed in (1, 1, 2)]
        assert all(torch.equal(value, made[1][name]) for name, value in made[0].items())
        assert not torch.equal(made[0]["backbone.0.0.weight"], made[2]["backbone.0.0.weight"])

    def test_usual_blocks_are_stabilitys_and_half_of_them_for_the_smaller_stage(self):
        assert stage_c_files.usual_blocks(64) == (0, 4, 8, 12, 51, 55, 59, 63)
        assert stage_c_files.usual_blocks(32) == (0, 2, 4, 6, 25, 27, 29, 31)
        assert stage_c_files.usual_blocks(4) == (0, 1, 2, 3)

    @pytest.mark.long
    def test_published_sizes(self):
        """54.3 M, 203.5 M and 102.8 M trained parameters at 3.6B; any width for 1B."""
        with torch.device("meta"):
            unets = {size: StableCascadeUNet(**numbers) for size, numbers in sizes.STAGE_C.items()}
            effnet = EfficientNetEncoder()
            counts = {}
            of_faces = Wanted(reads="faces", blocks="all")
            asked = {"canny": Wanted(reads="grey"), "sr": Wanted(reads="latent"), "identity": of_faces}
            for name, wanted in asked.items():
                network = OfStageC("prior", unets["3.6B"], effnet).new(wanted, 0)
                counts[name] = round(sum(p.numel() for p in network.parameters()) / 1e6, 1)
            small = OfStageC("prior", unets["1B"], effnet).new(Wanted(reads="grey"), 0)
        assert counts == {"canny": 54.3, "sr": 203.5, "identity": 102.8}
        assert [p[2].weight.shape[0] for p in small.projections] == [1536] * 8

    @pytest.mark.parametrize(
        ("wanted", "message"),
        [
            (Wanted(blocks=(0, 6)), "6 residual blocks, 0 to 5, and no number 6"),
            (Wanted(blocks=(1, 1)), "twice"),
            (Wanted(bottleneck="large", reads="grey"), "large cannot read grey"),
            (Wanted(bottleneck="effnet", reads="latent"), "effnet cannot read latent"),
            (Wanted(latent_factor=2.0), "latent_factor is for reads=latent"),
        ],
    )
    def test_what_cannot_be_is_refused(self, wanted: Wanted, message: str, family: OfStageC):
        with pytest.raises(UserError, match=message):
            family.new(wanted, 0)


class TestPictures:
    """Of the recorded filters, by our conditions and what a ControlNet reads of them."""

    def hint(self, family: OfStageC, reads: str, condition: Any, **more: Any) -> np.ndarray:
        pixels = computed(condition, SCENE, lambda purpose, count: np.zeros(count))
        network = family.new(Wanted(reads=reads, **more), 0)
        return family.hint(network, torch.from_numpy(pixels).permute(2, 0, 1)[None])[0].numpy()

    @pytest.mark.parametrize(("name", "side"), [("canny", 48), ("canny_224", 224)])
    def test_canny(self, name: str, side: int, family: OfStageC, recorded: Any):
        """But where a sum's last digit makes another level of a pixel."""
        found = self.hint(family, "grey", canny.Settings(side_px=side))[0]
        assert (np.abs(found - recorded[f"filter/{name}"]) > 3e-3).mean() < 5e-3  # of 8 bits
        assert 0.005 < found.mean() < 0.5

    def test_qr(self, family: OfStageC, recorded: Any):
        plain = self.hint(family, "grey", qr.Settings(side_px=None, blobs=False))[0]
        assert np.abs(plain - recorded["filter/qr_plain"]).max() < 3e-3
        own = qr.Settings()
        sigma = (0.7 - 0.1) / 1.9
        pixels = computed(own, SCENE, lambda purpose, count: np.array([0, 0, sigma]))[:, :, 0] / 255
        assert (np.abs(pixels - recorded["filter/qr"]) > 5e-3).mean() < 2e-3  # a threshold's last digit

    @pytest.mark.long  # of the quick tests, the recorded prediction of what reads latents
    def test_super_resolution(self, family: OfStageC, recorded: Any):
        """Of their picture, and of ours, which shows the other pixel of each block."""
        picture = torch.from_numpy(recorded["filter/latent_picture"])[None]
        network = family.new(Wanted(reads="latent"), 0)
        found = family.hint(network, torch.cat([picture, torch.full_like(picture[:, :1], 255)], 1))[0].numpy()
        np.testing.assert_allclose(found, recorded["filter/latent"], rtol=1e-4, atol=1e-4)
        ours = self.hint(family, "latent", tile.Settings(factor=2, down="nearest", up="nearest"))
        assert 0 < np.abs(ours - found).mean() < 0.2 * np.abs(found).mean()

    def test_holes(self, family: OfStageC, recorded: Any):
        """White and a fourth channel where nothing is known."""
        network = family.new(Wanted(reads="holes"), 0)
        pixels = np.concatenate([SCENE, np.full_like(SCENE[:, :, :1], 255)], axis=2)
        pixels[20:60, 30:90] = 0
        found = family.hint(network, torch.from_numpy(pixels).permute(2, 0, 1)[None])
        np.testing.assert_allclose(found[0].numpy(), recorded["filter/holes"], rtol=0, atol=1e-6)
        assert family.blank(network, found).min() == 1
        masked = computed(inpaint.Settings(share=0.4), SCENE, lambda purpose, count: np.full(count, 0.4))
        of_mask = family.hint(network, torch.from_numpy(masked).permute(2, 0, 1)[None])
        assert torch.equal(of_mask[0, 3] > 0, torch.from_numpy(masked[:, :, 3] == 0))


class TestRefused:
    @pytest.mark.parametrize(
        ("place", "message"),
        [
            ("prior.safetensors", "the weights of Stage C, not a ControlNet"),
            ("lora_attn.safetensors", "a LoRA of Stage C, not a ControlNet"),
            ("sd.safetensors", "a ControlNet of Stable Diffusion, not"),
            ("controlnet_grey.pt", "is pickled"),
        ],
    )
    def test_files_of_something_else(self, place: str, message: str, family: OfStageC, tmp_path: Path):
        save_file({"control_model.zero_convs.0.0.weight": torch.zeros(1)}, tmp_path / "sd.safetensors")
        with pytest.raises(UserError, match=message):
            family.read(str((tmp_path if place.startswith("sd") else HERE) / place), Wanted())

    def test_a_file_without_blocks(self, family: OfStageC, tmp_path: Path):
        """Of four residuals and six blocks."""
        with pytest.raises(
            UserError,
            match=r"has 4 residuals .* which of the 6 blocks .* adapter.blocks.* takes that config as a recipe",
        ):
            family.read(path("grey"), Wanted())
        tensors = load_file(path("grey"))
        last = {name: value for name, value in tensors.items() if name.startswith("projections.3.")}
        more = {name.replace(".3.", f".{number}."): v.clone() for number in (4, 5) for name, v in last.items()}
        save_file({**tensors, **more}, tmp_path / "all.safetensors")
        assert family.read(str(tmp_path / "all.safetensors"), Wanted()).config.blocks == tuple(range(6))

    def test_another_stage_c_and_other_pictures(self, family: OfStageC, tmp_path: Path):
        with pytest.raises(UserError, match=r"another Stage C: it adds 4 residuals .* the 3 blocks here"):
            family.read(path("grey"), Wanted(blocks=(0, 1, 2)))
        tensors = load_file(path("grey"))
        last = {name: value.repeat(2, 1, 1, 1) for name, value in tensors.items() if name.endswith(".2.weight")}
        save_file({**tensors, **last}, tmp_path / "wide.safetensors")
        with pytest.raises(UserError, match=r"of 32 channels, and the 4 blocks here have 16"):
            family.read(str(tmp_path / "wide.safetensors"), Wanted(blocks=BLOCKS))
        tensors["backbone.0.0.weight"] = tensors["backbone.0.0.weight"].repeat(1, 2, 1, 1)
        save_file(tensors, tmp_path / "two.safetensors")
        with pytest.raises(UserError, match=r"reads pictures of 2 channels, and there are: 1 \(grey\)"):
            family.read(str(tmp_path / "two.safetensors"), Wanted(blocks=BLOCKS))

    def test_tensors_that_are_left_out_by_patterns(self, family: OfStageC, tmp_path: Path):
        tensors = load_file(path("grey"))
        save_file({**tensors, "projections.1.0.scale": torch.tensor(3.0)}, tmp_path / "scaled.safetensors")
        with pytest.raises(UserError, match=r"projections\.1\.0\.scale"):
            family.read(str(tmp_path / "scaled.safetensors"), Wanted(blocks=BLOCKS))
        lenient = replace(family, ignored=("*.scale",))
        network = lenient.read(str(tmp_path / "scaled.safetensors"), Wanted(blocks=BLOCKS))
        assert all(torch.equal(network.state_dict()[name], tensor.float()) for name, tensor in tensors.items())

    def test_numbers_that_are_none(self, family: OfStageC, tmp_path: Path):
        tensors = load_file(path("grey"))
        tensors["projections.1.0.weight"][0] = torch.nan
        save_file(tensors, tmp_path / "nan.safetensors")
        with pytest.raises(UserError, match=r"projections.1.0.weight has NaN"):
            family.read(str(tmp_path / "nan.safetensors"), Wanted(blocks=BLOCKS))


def test_a_stage_c_that_takes_residuals_is_still_diffusers(family: OfStageC, given: Any, tmp_path: Path):
    """By name, so that exports open there; with activations computed again as without, to the bit."""
    family.new(Wanted(), 0)
    assert type(family.unet) is not StableCascadeUNet
    family.unet.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["_class_name"] == "StableCascadeUNet"
    inputs = (given["x_c"], torch.tensor([0.2, 0.9]), given["pooled"], given["text"], given["image"])
    residuals = [torch.randn(2, 16, 2, 3, requires_grad=True), None, torch.randn(2, 16, 3, 4, requires_grad=True)]
    found = []
    for again in (False, True):
        family.unet.enable_gradient_checkpointing() if again else family.unet.disable_gradient_checkpointing()
        family.unet.train().requires_grad_(True)
        for module in family.unet.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        y = family.unet(*inputs, residuals=residuals).sample
        y.square().sum().backward()
        grads = [r.grad for r in residuals if r is not None] + [p.grad for p in family.unet.parameters()]
        found.append([y.detach(), *(g.clone() for g in grads if g is not None)])
        for tensor in (*(r for r in residuals if r is not None), *family.unet.parameters()):
            tensor.grad = None
    assert len(found[0]) == len(found[1]) > 50
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_residual_blocks_are_in_the_order_of_stability():
    assert stage_c.residual_blocks(of_component("prior", StableCascadeUNet)) == [16] * 6


def test_stable_diffusion_refuses_it_by_name():
    with pytest.raises(UserError, match="a ControlNet for Stage C of Stable Cascade"):
        unet_files.read(path("grey"), unet_files.Base(None, 8))
