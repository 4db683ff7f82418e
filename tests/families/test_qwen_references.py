"""Reference images of Qwen-Image-2.1 and Qwen-Image-Edit: read as their pipelines do, by their text encoders too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flow_runs
import numpy as np
import pytest
import reference_pictures
import tiny_texts
import torch
from diffusers import QwenImage21Pipeline, QwenImage21Transformer2DModel, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus
from flow_runs import SEED, STEPS
from PIL import Image
from reference_pictures import picture
from safetensors.torch import load_file
from tiny_families import qwen_image_21, qwen_image_edit
from torch import Tensor

from daguerre import plugins
from daguerre.cli import main
from daguerre.data.images import references
from daguerre.data.settings import SharedSettings
from daguerre.models.parts.qwen.transformer_21 import Interleaved
from daguerre.samplers.draw import initial_noise
from daguerre.types import REFERENCES, as_seen

FAMILIES = ("qwen_image_21", "qwen_image_edit")
TINY = {"qwen_image_21": qwen_image_21, "qwen_image_edit": qwen_image_edit}
AREA, SEEN = 96 * 96, 64 * 80
"""Areas of reference images, and of the copies that the text encoder of Qwen-Image-Edit sees."""
SIZES = [(70, 100), (96, 64)]
"""Heights and widths of two pictures, which become 96 x 128 and 128 x 64 px."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The families' rules, for small pictures."""
    for name in FAMILIES:
        reference_pictures.small_rule(monkeypatch, name, AREA, SEEN)
    monkeypatch.setattr(edit_plus, "VAE_IMAGE_SIZE", AREA)
    monkeypatch.setattr(edit_plus, "CONDITION_IMAGE_SIZE", SEEN)


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Mapping[str, Path]:
    place = tmp_path_factory.mktemp("bases")
    return {name: module.write(place / name) for name, module in TINY.items()}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[Path]:
    return reference_pictures.pictures(tmp_path_factory.mktemp("pictures"), SIZES)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Eight images with one or two reference images of several sizes, and captions of several lengths."""
    captions, counts = [f"make it {n} " + "more " * (n % 3) for n in range(8)], [1, 2] * 4
    folder = tmp_path_factory.mktemp("images")
    return reference_pictures.samples(folder, captions, counts, lambda n, i: (32 + 16 * (n % 4), 48 + 16 * i))


def opened(base: Path) -> Any:
    """The stock pipeline. That of Qwen-Image-Edit leaves out which tokens are of images, without which transformers 5
    gives them places in a row, and transformers 4, with which the model was trained, did not."""
    if "Edit" not in (base / "model_index.json").read_text():
        pipe: Any = QwenImage21Pipeline.from_pretrained(base, processor=tiny_texts.qwen3_vl_processor())
    else:
        pipe = QwenImageEditPlusPipeline.from_pretrained(base, processor=qwen_image_edit.processor())
        encode = pipe.text_encoder.forward

        def forward(input_ids: Tensor, **more: Any) -> Any:
            is_image = (input_ids == pipe.text_encoder.config.image_token_id).int()
            return encode(input_ids=input_ids, mm_token_type_ids=is_image, **more)

        pipe.text_encoder.forward = forward
    pipe.set_progress_bar_config(disable=True)
    return pipe


def theirs(pipe: Any, scale: float, given: list[Path], size: tuple[int, int]) -> np.ndarray:
    """The pipeline's image in this size."""
    latents = initial_noise([SEED], (64, size[0] // 16, size[1] // 16))
    more = {"height": size[0], "width": size[1]}
    if isinstance(pipe, QwenImageEditPlusPipeline):
        latents = initial_noise([SEED], (16, size[0] // 8, size[1] // 8))
    else:
        more["output_resolution"] = int(AREA**0.5)
    latents = pipe._pack_latents(latents, *latents.shape)
    more |= {"true_cfg_scale": scale} | ({"negative_prompt": " "} if scale > 1 else {})
    shown = [Image.open(path).convert("RGB") for path in given]
    image = pipe(
        prompt="make it red", image=shown, latents=latents, num_inference_steps=STEPS, output_type="np", **more
    )
    return (image.images[0][..., :3] * 255).round().astype(int)


def drawn(base: Path, out: Path, scale: float, *given: str) -> np.ndarray:
    args = ["generate", str(base), "prompt=make it red", f"seed={SEED}", f"out={out}", f"guidance_scale={scale}"]
    assert main.run([*args, f"num_inference_steps={STEPS}", *given]) == 0
    return np.asarray(Image.open(out / "000.png")).astype(int)


@pytest.mark.parametrize(
    ("scale", "count", "size"), [pytest.param(1.0, 1, (96, 128), marks=pytest.mark.long), (3.0, 2, (128, 64))]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_images_are_those_of_the_pipeline_with_the_size_of_the_last_picture(
    name, scale, count, size, bases, pictures, tmp_path
):
    given = f"reference=[{','.join(map(str, pictures[:count]))}]"
    found = drawn(bases[name], tmp_path / "out", scale, given)
    assert found.shape == (*size, 3)
    pipe = opened(bases[name])
    assert np.abs(found - theirs(pipe, scale, pictures[:count], size)).max() <= 2
    other = theirs(pipe, scale, pictures[::-1][:count], size)
    assert np.abs(found - other).max() > 2, "they are read"
    about = json.loads((tmp_path / "out" / "000.json").read_text())
    assert [each for each in REFERENCES if each in about] == [*REFERENCES[:count]]


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_features_are_those_of_the_pipeline(name, bases, pictures):
    """Of captions of several lengths with two images, of which the pipeline reads one at a time."""
    family, pipe = loaded(name, bases), opened(bases[name])
    rule = family.prompt_references
    given = dict(zip(REFERENCES, [path.read_bytes() for path in pictures], strict=False))
    frames = references.frames(given, rule, ("png",))
    cut = references.cut(given, frames, SharedSettings(), rule.seen)
    texts = ["make it red", " ", "a longer text, of more words"]
    shown = as_seen(cut)
    tokens = family.text.tokens_of(texts, [pixels.expand(3, -1, -1, -1) for pixels in shown])
    found = family.text.features(tokens)
    whole = [Image.open(path).convert("RGB") for path in pictures]
    resized = [pipe.image_processor.resize(one, *pixels.shape[1:]) for one, pixels in zip(whole, shown, strict=True)]
    for row, text in enumerate(texts):
        wanted, _, *is_image = pipe.encode_prompt([text], image=resized, device="cpu")
        wanted = wanted[0][~is_image[0][0]] if is_image else wanted[0]
        own = found["text"][row][found["text_mask"][row]]
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)


def loaded(name: str, bases: Mapping[str, Path], **settings: Any) -> Any:
    module = plugins.find("families", name)
    return module.load(module.Settings(pretrained_model_name_or_path=str(bases[name]), **settings), 0)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "size",
    [(40, 300), *(pytest.param(each, marks=pytest.mark.long) for each in [(1300, 900), (1024, 1024), (100, 90)])],
)
def test_a_picture_is_resized_as_the_pipeline_does(size, name, tmp_path, monkeypatch):
    monkeypatch.undo()  # the real areas
    rule = plugins.find("families", name).Settings.reference_rule
    path = picture(tmp_path / "a.png", 1, size)
    image, given = Image.open(path), {"reference": path.read_bytes()}
    found = references.cut(given, references.frames(given, rule, ("png",)), SharedSettings(), rule.seen)
    areas = {"reference": edit_plus.VAE_IMAGE_SIZE, "seen_reference": edit_plus.CONDITION_IMAGE_SIZE}
    assert found.keys() <= areas.keys()
    for key, pixels in found.items():
        width, height = edit_plus.calculate_dimensions(areas[key], size[1] / size[0])
        wanted = np.asarray(image.resize((width, height), Image.Resampling.LANCZOS))
        assert np.array_equal(pixels.permute(1, 2, 0), wanted)


@pytest.mark.parametrize("causal", [True, False])
def test_the_transformer_computes_what_the_librarys_own_does(causal):
    """With two reference images, and their gradients."""
    numbers = qwen_image_21.NUMBERS | {"causal_condition": causal}
    own = tiny_texts.seeded(lambda: Interleaved(**numbers))
    stock = QwenImage21Transformer2DModel(**numbers)
    stock.load_state_dict(own.state_dict())
    g = torch.Generator().manual_seed(1)
    x, first, second = (torch.randn((2, 64, *size), generator=g) for size in [(4, 6), (4, 2), (2, 6)])
    text, time = torch.randn(2, 11, tiny_texts.WIDTH, generator=g), torch.tensor([0.3, 0.7])
    y = own(x, time, text, None, [first, second], [3, 5])
    slots = [z.shape[2] * z.shape[3] // 4 for z in (first, second, x)]
    is_image = [False] * 3 + [True] * slots[0] + [False] * 2 + [True] * slots[1] + [False] * 6 + [True] * slots[2]
    # what the text encoder says of the images' tokens is not read
    spread = torch.zeros(2, len(is_image) - slots[2], tiny_texts.WIDTH)
    spread[:, ~torch.tensor(is_image[: -slots[2]])] = text
    (expected,) = stock(
        hidden_states=torch.cat([z.flatten(2).mT for z in (first, second, x)], 1),
        encoder_hidden_states=spread,
        timestep=time,
        img_shapes=[[(1, *z.shape[2:]) for z in (first, second, x)]] * 2,
        img_mask=torch.tensor([is_image] * 2),
        return_dict=False,
    )
    expected = expected[:, -24:].mT.unflatten(2, (4, 6))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)
    y.square().mean().backward()
    expected.square().mean().backward()
    for (key, p), q in zip(own.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=key)
    swapped = own(x, time, text, None, [second, first], [3, 5])
    assert (swapped - y).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_of_unequal_captions_is_each_alone(name, bases):
    family = loaded(name, bases)
    g = torch.Generator().manual_seed(2)
    shown = [torch.randint(0, 256, (3, 3, *size), dtype=torch.uint8, generator=g) for size in ((64, 96), (96, 64))]
    latents = torch.randn(3, *family.latent_shape((3, 64, 96)), generator=g)
    texts, time = ["a", "", "a longer one"], torch.tensor([0.2, 0.5, 0.9])

    def condition(rows: slice) -> Any:
        tokens = family.text.tokens_of(texts[rows], [pixels[rows] for pixels in shown])
        given = {name: latents[rows].roll(n, 2) for n, name in enumerate(REFERENCES[:2])}
        return {**family.text.features(tokens), **given}

    y = family.net(latents, time, condition(slice(3)))
    for row in range(3):
        alone = family.net(latents[row : row + 1], time[row : row + 1], condition(slice(row, row + 1)))
        torch.testing.assert_close(y[row], alone[0], rtol=0, atol=2e-6)


def trained(place: Path, name: str, bases: Mapping[str, Path], images: Path, *given: str, number: int = 2) -> Path:
    model = {"family": name, "pretrained_model_name_or_path": str(bases[name]), "references": number}
    place.mkdir(exist_ok=True)
    data = {"source": "folder", "path": str(images), "resolution": 64, "held_out_fraction": 0}
    return flow_runs.trained(place, model, {}, *given, data=data, batch=4)


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "pipeline" / "transformer" / "diffusion_pytorch_model.safetensors")


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics" / "metrics.jsonl").read_text().splitlines())
    return [line["learning/loss"] for line in lines if "learning/loss" in line]


@pytest.mark.long
def test_samples_without_any_are_text_to_image_to_the_bit(bases, images, tmp_path):
    """So are those of which all are dropped. Weights move where they are read."""
    plain, dropped, read = (
        weights(trained(tmp_path / place, "qwen_image_21", bases, images, *given, number=number))
        for place, number, given in (("plain", 0, ()), ("dropped", 2, ("data.reference_dropout=1",)), ("read", 2, ()))
    )
    assert all(torch.equal(plain[key], dropped[key]) for key in plain)
    assert not all(torch.equal(plain[key], read[key]) for key in plain)


@pytest.mark.parametrize("name", FAMILIES)
def test_other_pictures_and_others_in_the_text_encoder_alone_change_the_loss(name, bases, images, tmp_path):
    """Of the same noise and captions. A change of the copies that the text encoder sees alone shows, too."""
    family = loaded(name, bases, references=1)
    g = torch.Generator().manual_seed(2)
    pixels = torch.randint(0, 256, (2, 3, 64, 96), dtype=torch.uint8, generator=g)
    latents = torch.randn(2, *family.latent_shape((3, 64, 64)), generator=g)

    @torch.no_grad()
    def loss(seen: Tensor, read: Tensor) -> float:
        told = family.text.features(family.text.tokens_of(["make it red"] * 2, [seen]))
        moments = {f"reference.{key}": rows for key, rows in family.images.encode(read).items()}
        condition = {**told, **family.reference_condition(moments)}
        return float(family.net(latents, torch.tensor([0.3, 0.6]), condition).square().mean())

    whole = loss(pixels, pixels)
    assert whole == loss(pixels.clone(), pixels.clone())
    for seen, read in ((pixels.flip(0), pixels.flip(0)), (pixels, pixels.flip(0)), (pixels.flip(0), pixels)):
        assert abs(loss(seen, read) - whole) > 1e-5 * whole


@pytest.mark.long
@pytest.mark.parametrize("adapter", [[], ["adapter.name=lora", "adapter.rank=2"]])
@pytest.mark.parametrize("name", FAMILIES)
def test_cached_pictures_and_captions_teach_the_same(name, adapter, bases, images, tmp_path):
    """With the empty caption, which is read with the pictures, too, and images of the run with guidance."""
    small = ["optimizer.learning_rate=1e-4", "optimizer.epsilon=1e-6", "data.caption_dropout=0.4", *adapter]
    small += ["sampling.num_images=2", "sampling.guidance_scale=3"]
    plain = trained(tmp_path / "plain", name, bases, images, *small)
    cache = [*small, f"cache.path={tmp_path / 'cache'}", "cache.dtype=float32"]
    for place in ("filled", "found"):
        run = trained(tmp_path / place, name, bases, images, *cache)
        assert losses(run) == pytest.approx(losses(plain), rel=1e-6)
        for image in ("000.png", "001.png"):
            ours, wanted = (
                np.asarray(Image.open(*each.glob(f"samples/*/{image}"))).astype(int) for each in (run, plain)
            )
            assert np.abs(ours - wanted).max() <= 1
    rows = {path.name.partition("-")[0] for path in (tmp_path / "cache").iterdir()}
    assert rows >= {"images", "texts"}


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_goes_on_to_the_bit(name, bases, images, tmp_path):
    """Where it was interrupted after an update, without a cache and with one."""
    for place, given in (("plain", []), ("cached", [f"cache.path={tmp_path / 'cache'}"])):
        each = [*given, "logging.every=1 steps"]
        whole = trained(tmp_path / f"{place}-whole", name, bases, images, *each, "training.duration=4 steps")
        for steps in (2, 4):
            again = trained(tmp_path / f"{place}-part", name, bases, images, *each, f"training.duration={steps} steps")
        assert losses(again) == losses(whole)
        found = weights(again)
        assert all(torch.equal(value, found[key]) for key, value in weights(whole).items())


@pytest.mark.long
def test_an_export_of_qwen_image_edit_has_both_folders_of_words(bases, images, tmp_path):
    """Its class asks for a tokenizer and a processor; the stock pipeline draws what the run does."""
    run = trained(tmp_path / "run", "qwen_image_edit", bases, images, "sampling.num_images=1")
    whole = run / "pipeline"
    words = {path.name for path in (whole / "tokenizer").iterdir()}
    assert words == {path.name for path in (whole / "processor").iterdir()} >= {"preprocessor_config.json"}
    given = str(picture(tmp_path / "a.png", 3, (64, 64)))
    found = drawn(run, tmp_path / "out", 3.0, f"reference={given}")
    pipe = opened(whole)
    assert np.abs(found - theirs(pipe, 3.0, [Path(given)], (96, 96))).max() <= 2
    (listing,) = (run / "samples").glob("step-*/samples.json")
    (one,) = json.loads(listing.read_text())
    assert one["control_files"].keys() == {"reference"}
