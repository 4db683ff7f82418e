"""Images that others are generated from: files and folders, sizes, masks, lists, resuming, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import tiny_drawings
import torch
from PIL import Image
from tiny_drawings import documents, drawn, generate

from daguerre.assembly.parts import Components
from daguerre.cli import generate as generate_command
from daguerre.errors import UserError
from daguerre.generation import generate as generation_generate
from daguerre.generation import images
from daguerre.generation.generate import ImageRequest
from daguerre.generation.images import InputImage
from daguerre.generation.prompts import inline
from daguerre.samplers.settings import SamplingSettings
from daguerre.types import IMAGE, MASK, Latents, Prompt, References

SMALL = ("num_inference_steps=4", "guidance_scale=3")


@pytest.fixture(scope="module")
def run(tiny_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_drawings.write_run(tiny_drawings.write_recipe(tmp_path_factory.mktemp("recipe"), tiny_sd))


@pytest.fixture(scope="module")
def built(tiny_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Components:
    return tiny_drawings.build(tmp_path_factory.mktemp("r"), tiny_sd)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three photos of three sizes, and a folder of their masks."""
    place = tmp_path_factory.mktemp("photos")
    (place / "masks").mkdir()
    for name, (width, height) in {"a": (32, 32), "b": (48, 32), "c": (43, 70)}.items():
        picture(place / f"{name}.png", width, height)
        mask = np.zeros((height, width), np.uint8)
        mask[8:20, 8:24] = 255
        Image.fromarray(mask).save(place / "masks" / f"{name}.png")
    return place


def picture(path: Path, width: int, height: int, **options: object) -> np.ndarray:
    """Writes an image in which every pixel differs from its neighbours; returns it."""
    cells = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(cells).save(path, **options)
    return cells


def test_an_image_of_its_own_size_with_all_that_decides_it_in_its_json(run, photos, tmp_path, capsys):
    given = [run, "prompt=red", f"image={photos / 'b.png'}", "num_images=2", f"out={tmp_path / 'out'}", *SMALL]
    assert generate(*given) == 0
    assert "32x48 px" in capsys.readouterr().out
    first, _ = documents(tmp_path / "out")
    assert (first["height"], first["width"], first["strength"]) == (32, 48, 0.8)
    assert first["image"] == str(photos / "b.png")
    assert first["image_sha256"] == sha256((photos / "b.png").read_bytes()).hexdigest()
    assert "mask" not in first
    one, two = drawn(tmp_path / "out")
    assert one.shape == (32, 48, 3)
    assert np.abs(one - two).mean() > 1, "each seed has its own noise"
    assert generate(*given) == 0
    assert "2 of 2 images already exist" in capsys.readouterr().out
    assert generate(*given, "strength=0.5") == 2
    assert "strength: null -> 0.5" in capsys.readouterr().err
    alone = [run, "prompt=red", f"out={tmp_path / 'alone'}", "height=32", "width=48", *SMALL]
    assert generate(*alone) == 0
    assert np.abs(drawn(tmp_path / "alone")[0] - one).mean() > 1
    assert "strength" not in documents(tmp_path / "alone")[0]


@pytest.mark.long  # of the quick tests, several strengths in one list
def test_strength_decides_how_far_an_image_is_from_the_one_it_starts_from(built, photos):
    """The least gives it back as the autoencoder renders it."""
    image = InputImage(IMAGE, photos / "a.png")

    def started(steps: int, strength: float) -> np.ndarray:
        sampling = SamplingSettings(num_inference_steps=steps, guidance_scale=1)
        one = ImageRequest(0, Prompt("red"), 7, (32, 32), 1.0, images={IMAGE: image}, strength=strength)
        return next(generation_generate.generate(built, sampling, [one])).pixels_HWC.astype(int)

    pixels_HWC = images.pixels({IMAGE: image}, (32, 32), (32, 32))[IMAGE]
    x0 = built.family.encode_images(torch.from_numpy(pixels_HWC)[None].permute(0, 3, 1, 2), [7])
    rendered = built.family.decode(Latents(x0, [Prompt("")], [7]))[0].astype(int)
    apart = [float(np.abs(started(*each) - rendered).mean()) for each in ((1000, 0.001), (20, 0.3), (20, 1.0))]
    assert apart[0] < 4
    assert apart == sorted(apart)
    assert apart[2] > 5 * apart[0]


@pytest.mark.parametrize("strength", [pytest.param("0.5", marks=pytest.mark.long), "1"])
def test_what_is_black_in_a_mask_stays_to_the_pixel(run, photos, tmp_path, strength):
    given = [
        run,
        "prompt=red",
        f"image={photos / 'c.png'}",
        f"mask={photos / 'masks' / 'c.png'}",
        f"strength={strength}",
    ]
    assert generate(*given, f"out={tmp_path / 'out'}", *SMALL) == 0
    found, photo = drawn(tmp_path / "out")[0], np.asarray(Image.open(photos / "c.png")).astype(int)
    assert found.shape == (64, 40, 3)
    photo = photo[3:67, 1:41]  # its middle, cropped without a resize
    anew = np.zeros((64, 40), bool)
    anew[5:17, 7:23] = True
    assert np.array_equal(found[~anew], photo[~anew])
    assert np.abs(found[anew] - photo[anew]).mean() > 10
    assert generate(*given, f"out={tmp_path / 'latent'}", "keep_unmasked=false", *SMALL) == 0
    latent = drawn(tmp_path / "latent")[0]
    assert np.array_equal(latent[anew], found[anew])
    assert np.abs(latent[~anew] - photo[~anew]).mean() > 1, "as the autoencoder renders them"
    told = [documents(tmp_path / name)[0]["keep_unmasked"] for name in ("out", "latent")]
    assert told == [True, False]


def test_a_line_of_one_pixel_is_painted_anew(built, tmp_path):
    """A cell of the latent is, in which any pixel is white: by one pixel of each cell thin lines would be lost."""
    photo, mask = picture(tmp_path / "photo.png", 32, 32), np.zeros((32, 32), np.uint8)
    mask[:, 17] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    files = {name: InputImage(name, tmp_path / f"{file}.png") for name, file in ((IMAGE, "photo"), (MASK, "mask"))}
    one = ImageRequest(0, Prompt("red"), 7, (32, 32), 1.0, images=files, strength=1.0)
    sampling = SamplingSettings(num_inference_steps=2, guidance_scale=1)
    found = next(generation_generate.generate(built, sampling, [one])).pixels_HWC
    changed = (found != photo).any(-1)
    assert changed[:, 17].mean() > 0.9
    known = generation_generate._known(built, [generation_generate._pixels(built, one)], [7], 1.0, (4, 16, 16))
    assert known.anew_B1HW is not None
    assert known.anew_B1HW.any(2).flatten().nonzero().flatten().tolist() == [8]
    assert not np.delete(changed, 17, axis=1).any()


@pytest.mark.long
def test_a_folder_makes_an_image_of_each_named_after_it_in_any_parts(run, photos, tmp_path, capsys):
    given = [run, "prompt=red", f"image={photos}", f"mask={photos / 'masks'}", "seed=5", *SMALL]
    assert generate(*given, f"out={tmp_path / 'whole'}") == 0
    assert [path.name for path in sorted((tmp_path / "whole").glob("*.png"))] == ["a.png", "b.png", "c.png"]
    whole = {document["file"]: document for document in documents(tmp_path / "whole")}
    assert [whole[f"{name}.png"]["seed"] for name in "abc"] == [5, 6, 7]
    assert [whole[f"{name}.png"]["mask"] for name in "abc"] == [str(photos / "masks" / f"{name}.png") for name in "abc"]
    for part in ("2/2", "1/2"):
        assert generate(*given, f"out={tmp_path / 'parts'}", f"shard={part}", "batch_size=1") == 0
    for name in "abc":
        one, two = (
            np.asarray(Image.open(tmp_path / place / f"{name}.png")).astype(int) for place in ("whole", "parts")
        )
        assert np.abs(one - two).max() <= 1
    capsys.readouterr()
    listed = [
        f"image=[{photos / 'b.png'}, {photos / 'a.png'}]",
        f"mask=[{photos / 'masks' / 'b.png'}, {photos / 'masks' / 'a.png'}]",
    ]
    assert generate(run, "prompt=red", *listed, f"out={tmp_path / 'list'}", *SMALL) == 0
    assert {d["file"]: d["mask"] for d in documents(tmp_path / "list")} == {
        f"{name}.png": str(photos / "masks" / f"{name}.png") for name in "ba"
    }


def test_a_folder_as_for_training_has_its_masks_and_control_images_beside_its_images(tmp_path):
    for name in ("cat.jpg", "cat.mask.png", "cat.control.png", "dog.png", "dog-masklabel.png", "dog.control.png"):
        picture(tmp_path / name, 16, 16)
    options = [images.given(name, str(tmp_path)) for name in (IMAGE, MASK, "control")]
    found = {row.file_name: row.images for row in images.with_images(inline(["red"]), options).rows()}
    assert {stem: {name: path.name for name, path in own.items()} for stem, own in found.items()} == {
        "cat": {"image": "cat.jpg", "mask": "cat.mask.png", "control": "cat.control.png"},
        "dog": {"image": "dog.png", "mask": "dog-masklabel.png", "control": "dog.control.png"},
    }
    alone = images.with_images(inline(["red"]), [images.given("control", str(tmp_path))])
    assert [row.file_name for row in alone.rows()] == ["cat", "dog"]
    (tmp_path / "dog-masklabel.png").unlink()
    lacking = [images.given(name, str(tmp_path)) for name in (IMAGE, MASK)]
    with pytest.raises(UserError, match="mask: 0 of its 1 files are named dog"):
        list(images.with_images(inline(["red"]), lacking).rows())


def test_another_content_is_another_request(run, tmp_path):
    given = [str(run), "prompt=red", f"image={tmp_path / 'a.png'}", *SMALL]
    digests = []
    for side in (32, 40):
        picture(tmp_path / "a.png", side, side)
        images._sha256.cache_clear()  # of another process
        images._size_px.cache_clear()
        digests.append(generate_command.prepare(given).parameters["images_sha256"])
    assert digests[0] != digests[1]


def test_images_of_several_strengths_in_one_list_are_each_as_alone(built, photos):
    files = {IMAGE: InputImage(IMAGE, photos / "a.png")}
    sampling = SamplingSettings(num_inference_steps=4, guidance_scale=1)
    wanted = [
        ImageRequest(i, Prompt("red"), 7, (32, 32), 1.0, images={} if strength is None else files, strength=strength)
        for i, strength in enumerate((0.5, 0.75, None))
    ]
    mixed = list(generation_generate.generate(built, sampling, wanted))
    for image in mixed:
        (alone,) = generation_generate.generate(built, sampling, [image.request])
        assert np.abs(alone.pixels_HWC.astype(int) - image.pixels_HWC).max() <= 1
    one, other, none = (image.pixels_HWC.astype(int) for image in sorted(mixed, key=lambda image: image.request.number))
    assert min(np.abs(one - other).mean(), np.abs(one - none).mean(), np.abs(other - none).mean()) > 1


@pytest.mark.long
def test_a_stopped_list_goes_on_and_a_changed_photo_is_another_request(run, photos, tmp_path, capsys, monkeypatch):
    own = tmp_path / "photos"
    own.mkdir()
    for number in range(3):
        picture(own / f"{number}.png", 32, 32 + 8 * number)
    given = [run, "prompt=red", f"image={own}", f"out={tmp_path / 'out'}", "batch_size=1", *SMALL]
    made = generation_generate.generate_batch

    def once(*arguments):
        monkeypatch.setattr(generation_generate, "generate_batch", failing)
        return made(*arguments)

    def failing(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(generation_generate, "generate_batch", once)
    with pytest.raises(KeyboardInterrupt):
        generate_command.run([str(each) for each in given])
    monkeypatch.setattr(generation_generate, "generate_batch", made)
    assert generate(*given) == 0
    assert "1 of 3 images already exist" in capsys.readouterr().out
    assert generate(*given[:3], f"out={tmp_path / 'whole'}", *SMALL) == 0
    assert all(
        np.abs(np.asarray(Image.open(path)).astype(int) - np.asarray(Image.open(tmp_path / "whole" / path.name))).max()
        <= 1
        for path in (tmp_path / "out").glob("*.png")
    )
    picture(own / "1.png", 32, 48)
    images._sha256.cache_clear()  # of another process
    images._size_px.cache_clear()
    assert generate(*given) == 2
    assert "images_sha256" in capsys.readouterr().err


@pytest.mark.long  # of the quick tests, a folder names them, and rows are refused
def test_rows_name_their_own_images_beside_those_without(run, photos, tmp_path):
    rows = [
        {"prompt": "red", "image": str(photos / "a.png"), "strength": 0.5, "file_name": "own"},
        {"prompt": "red", "file_name": "none"},
        {"prompt": "red", "image": "near.png", "mask": "near.mask.png", "height": 48, "file_name": "near"},
    ]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    picture(tmp_path / "near.png", 64, 64)
    Image.new("L", (32, 32), 255).save(tmp_path / "near.mask.png")
    out = tmp_path / "out"
    assert generate(run, f"prompts_file={tmp_path / 'list.jsonl'}", f"out={out}", *SMALL) == 0
    found = {document["file"]: document for document in documents(out)}
    assert [found[f"{name}.png"].get("strength") for name in ("own", "none", "near")] == [0.5, None, 1.0]
    assert [found[f"{name}.png"]["width"] for name in ("own", "none", "near")] == [32, 64, 48]
    assert found["near.png"]["mask"] == str(tmp_path / "near.mask.png")
    header = "prompt,image,strength,file_name\n"
    (tmp_path / "list.csv").write_text(f"{header}red,{photos / 'a.png'},.5,own\nred,,,none\n")
    assert generate(run, f"prompts_file={tmp_path / 'list.csv'}", f"out={tmp_path / 'table'}", *SMALL) == 0
    same = [np.asarray(Image.open(place / "own.png")).astype(int) for place in (out, tmp_path / "table")]
    assert np.abs(same[0] - same[1]).max() <= 1


@pytest.mark.long
def test_shards_of_images_that_start_from_others(run, photos, tmp_path):
    given = [run, "prompt=red", f"image={photos}", "format=webdataset", "shard_samples=2", f"out={tmp_path / 'out'}"]
    assert generate(*given, *SMALL) == 0
    assert len(list((tmp_path / "out").glob("*.tar"))) == 2
    assert generate(*given, *SMALL) == 0


@pytest.mark.parametrize(
    ("own", "height", "width", "expected"),
    [
        ((515, 300), None, None, (512, 296)),
        ((4, 5), None, None, (8, 8)),
        ((1500, 3000), None, None, (720, 1448)),  # 4 times 512 x 512
        ((1500, 3001), None, None, (720, 1448)),
        ((1024, 1024), None, None, (1024, 1024)),
        ((600, 400), 300, None, (300, 200)),
        ((600, 400), None, 300, (448, 300)),
    ],
)
def test_sizes_follow_the_image(own, height, width, expected):
    assert images.fitting(own, height, width, 4 * 512 * 512) == expected


def test_a_small_model_keeps_the_shape_of_a_large_image():
    """Of the sizes that have no more pixels than the model's own, the nearest in shape."""
    assert images.fitting((300, 400), None, None, 64 * 64) == (56, 72)
    for own in ((300, 401), (4000, 900), (77, 78), (65, 64)):
        height, width = images.fitting(own, None, None, 64 * 64)
        sizes = [(h, w) for h in range(8, 700, 8) for w in range(8, 700, 8) if 0.75 * 4096 < h * w <= 4096]
        nearest = min(abs(np.log(h * own[1] / (w * own[0]))) for h, w in sizes)
        assert height * width <= 64 * 64
        assert abs(np.log(height * own[1] / (width * own[0]))) <= max(nearest, 0.09), own


def test_pixels_are_upright_without_transparency_and_cover_the_size(tmp_path):
    pixels = picture(tmp_path / "plain.png", 40, 32)
    exif = Image.Exif()
    exif[274] = 6  # turned to the right
    Image.fromarray(np.rot90(pixels)).save(tmp_path / "turned.png", exif=exif)
    turned = InputImage(IMAGE, tmp_path / "turned.png")
    assert turned.size_px == (32, 40)
    assert np.array_equal(images.pixels({IMAGE: turned}, (32, 40), (32, 40))[IMAGE], pixels)
    clear = np.dstack([pixels, np.full((32, 40), 255, np.uint8)])
    clear[:, :8, 3] = 0
    Image.fromarray(clear).save(tmp_path / "clear.png")
    over = images.pixels({IMAGE: InputImage(IMAGE, tmp_path / "clear.png")}, (32, 40), (32, 40))[IMAGE]
    assert (over[:, :8] == 255).all()
    assert np.array_equal(over[:, 8:], pixels[:, 8:])
    for size in ((16, 16), (64, 32), (200, 8)):
        assert images.pixels({IMAGE: turned}, size, size)[IMAGE].shape == (*size, 3)
    left = Image.new("RGB", (100, 50), (255, 0, 0))
    left.paste((0, 0, 255), (50, 0, 100, 50))
    left.save(tmp_path / "wide.png")
    square = images.pixels({IMAGE: InputImage(IMAGE, tmp_path / "wide.png")}, (32, 32), (32, 32))[IMAGE]
    assert square[16, 4].tolist() == [255, 0, 0]
    assert square[16, 28].tolist() == [0, 0, 255]


def test_a_large_photo_is_scaled_down_in_words(run, tmp_path, capsys):
    Image.new("RGB", (400, 200)).save(tmp_path / "large.png")
    job = generate_command.prepare([str(run), "prompt=red", f"image={tmp_path / 'large.png'}", *SMALL])
    assert (
        "large.png of 200x400 px to 40x88 (height x width): no more than the 4,096 pixels of this model's own images"
        in capsys.readouterr().out
    )
    assert job.survey.sizes_px == {(40, 88): 1}


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tiff"])
def test_of_an_animation_the_first_frame_is_used_in_words(run, tmp_path, capsys, suffix):
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / f"moves.{suffix}", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / f"still.{suffix}")
    for name, count in {"moves": 1, "still": 0}.items():
        generate_command.prepare([str(run), "prompt=red", f"image={tmp_path / f'{name}.{suffix}'}", *SMALL])
        assert capsys.readouterr().out.count(f"{name}.{suffix}: the first frame is used") == count


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["image={}/a.png", "strength=0"], "strength"),
        (["image={}/a.png", "strength=1.01"], "strength"),
        (["image={}/a.png", "strength=0.2"], r"int(4 * 0.2) = 0"),
        (["strength=0.5"], "requests that have image=FILE, and none has: give one or remove strength"),
        (["mask={}/a.png"], "there is no image: give image=FILE"),
        (["image={}/a.png", "keep_unmasked=false"], "mask=FILE, and none has: give one or remove keep_unmasked"),
        (["image={}/a.png", "mask={}/b.png"], "another aspect ratio than its image's (32x48 and 32x32 px"),
        (["image={}/text.txt"], "not an image (JPEG, PNG"),
        (["image={}/broken.png"], "broken"),
        (["image={}/nothing.png"], "No such file"),
        (["image="], "give an image file of this machine"),
        (["image=https://example.org/a.png"], "give an image file of this machine"),
        (["image={}/a.png", "mask={}/a.png", "padding_mask_crop=32"], "padding_mask_crop is not supported"),
        (["task=img2img"], "task=img2img needs an image"),
        (["image={}/empty"], "holds no image"),
        (["image=[{}/a.png, {}/b.png]", "mask=[{}/masks/a.png]"], "give as many"),
        (["image={}", "mask={}/empty_masks"], "0 of its 1 files are named a"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_any_weight_is_read(
    run, photos, tmp_path, capsys, monkeypatch, given, message
):
    monkeypatch.setattr(generate_command, "ready", None)
    (photos / "text.txt").write_text("a cat")
    (photos / "empty").mkdir(exist_ok=True)
    (photos / "empty_masks").mkdir(exist_ok=True)
    Image.new("L", (32, 32)).save(photos / "empty_masks" / "z.png")
    (tmp_path / "broken.png").write_bytes((photos / "a.png").read_bytes()[:30])
    places = [each.replace("{}/broken.png", str(tmp_path / "broken.png")).replace("{}", str(photos)) for each in given]
    assert generate(run, "prompt=red", *places, f"out={tmp_path / 'out'}", *SMALL) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"strength": 0.5}, "there is no image"),
        ({"image": "a.png", "strength": 0}, "strength is 0: write a number above 0"),
        ({"image": "a.png", "strength": 2}, "strength is 2"),
        ({"image": 7}, "image is 7: write the place of an image file"),
        ({"mask": "a.png"}, "there is no image"),
    ],
)
def test_rows_that_cannot_be_are_refused(run, photos, tmp_path, capsys, row, message):
    (photos / "list.jsonl").write_text(json.dumps({"prompt": "red"} | row))
    assert generate(run, f"prompts_file={photos / 'list.jsonl'}", f"out={tmp_path / 'out'}", *SMALL) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_several_prompts_for_several_images_are_open(run, photos, tmp_path, capsys):
    (tmp_path / "list.txt").write_text("red\nblue\n")
    given = [run, f"prompts_file={tmp_path / 'list.txt'}", f"out={tmp_path / 'out'}", *SMALL]
    assert generate(*given, f"image={photos}") == 2
    assert "a column image" in capsys.readouterr().err
    assert generate(*given, f"image={photos / 'a.png'}") == 0  # each prompt from the one image
    assert len(documents(tmp_path / "out")) == 2


def test_a_family_that_only_decodes_refuses_images(built):
    own = replace(built, family=replace(built.family, encodes=False))
    generation_generate.generative(own)
    with pytest.raises(ValueError, match="only decodes images"):
        generation_generate.generative(own, [IMAGE])


@pytest.mark.parametrize(
    ("image", "mask", "strength"),
    [
        ("init_image", "mask_image", "strength"),
        ("image_path", "mask_path", "denoising_strength"),
        ("img", "mask", "strength"),
    ],
)
def test_names_of_other_programs(run, photos, image, mask, strength):
    given = [
        "--task",
        "img2img",
        f"--{image}",
        photos / "a.png",
        f"--{mask}",
        photos / "masks" / "a.png",
        f"--{strength}",
        "0.5",
        "--steps",
        "3",
    ]
    job = generate_command.prepare([str(each) for each in (run, "prompt=red", *SMALL, *given)])
    assert job.arguments.config.sampling.num_inference_steps == 3
    (one,) = job.requests
    assert one.strength == 0.5
    assert one.images == {
        IMAGE: InputImage(IMAGE, photos / "a.png"),
        MASK: InputImage(MASK, photos / "masks" / "a.png"),
    }


def test_a_prompt_without_the_reference_image_that_a_model_needs_gets_the_option_named():
    """Also where a later one is given."""
    rule = References(most=2, least=1)
    for given in ({}, {"reference_2": InputImage("reference_2", Path("b.png"))}):
        with pytest.raises(UserError, match=r"give reference=PICTURE$"):
            images.reference_frames(given, rule)
    assert images.reference_frames({}, replace(rule, least=0)) == {}
