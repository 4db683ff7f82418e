"""Captioners: the formula of kohya's tagger, tiny networks of the real classes, and files that are gone on with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_captioners
from PIL import Image
from tiny_tagger import TAGS, WEIGHTS, of_colours, write

from daguerre import errors, plugins
from daguerre.captioning import wd14
from daguerre.cli import main
from daguerre.errors import UserError


@pytest.fixture
def tagger(tmp_path):
    pytest.importorskip("onnxruntime")
    return of_colours(tmp_path / "tagger")


def pictures(folder: Path) -> Path:
    folder.mkdir()
    Image.new("RGB", (8, 8), (0, 0, 255)).save(folder / "blue.png")
    Image.new("RGB", (8, 8), (255, 0, 0)).save(folder / "red.png")
    return folder


def kohyas(pixels_HWC: np.ndarray, side: int) -> np.ndarray:
    """sd-scripts' preprocess_image for a picture that is not larger than the network's input, in numpy alone."""
    image = pixels_HWC[:, :, ::-1]
    size = max(image.shape[0:2])
    assert size == side, "OpenCV's filters are not here"
    pad_x, pad_y = size - image.shape[1], size - image.shape[0]
    pad_l, pad_t = pad_x // 2, pad_y // 2
    padded = np.pad(
        image, ((pad_t, pad_y - pad_t), (pad_l, pad_x - pad_l), (0, 0)), mode="constant", constant_values=255
    )
    return padded.astype(np.float32)


@pytest.mark.parametrize(("height", "width"), [(8, 8), (8, 5), (3, 8)])
def test_a_picture_is_prepared_as_by_kohyas_tagger(height, width):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    found = wd14.prepared(Image.fromarray(pixels), 8)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, kohyas(pixels, 8))


def test_larger_pictures_are_areas_and_transparency_is_white():
    pixels = np.random.default_rng(1).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    areas = pixels.reshape(8, 2, 8, 2, 3).mean(axis=(1, 3))[:, :, ::-1]
    np.testing.assert_allclose(wd14.prepared(Image.fromarray(pixels), 8), areas, atol=0.5)
    clear = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    assert (wd14.prepared(clear, 8) == 255).all()


def test_thresholds_are_by_category_and_tags_in_the_order_of_the_file():
    tags = [wd14.Tag(*each) for each in TAGS]
    likely = np.array([0.2, 0.7, 0.5, 0.35, 0.3, 0.34])

    def chosen(**given):
        return wd14.chosen(wd14.Settings(**given), tags, likely)

    assert chosen() == "1girl, long_hair"
    assert chosen(character_threshold=0.3) == "1girl, long_hair, hatsune_miku"
    assert chosen(character_threshold=0.3, characters_first=True, separator=" | ") == "hatsune_miku | 1girl | long_hair"
    assert chosen(general_threshold=0.3, remove_underscore=True) == "1girl, long hair, o_o"
    assert chosen(rating=True, undesired=["1girl"]) == "long_hair, sensitive"


def test_the_tagger_reads_blue_green_red(tagger, tmp_path, capsys):
    folder = pictures(tmp_path / "images")
    (folder / "red.json").write_text('{"text": "a square", "rating": 5}')
    command = [
        "caption",
        str(folder),
        "with=wd14",
        f"path={tagger}",
        "general_threshold=0.9",
        "character_threshold=0.9",
    ]
    assert main.run(command) == errors.DONE, capsys.readouterr().err
    assert json.loads((folder / "blue.json").read_text()) == {"wd14": "1girl"}
    assert json.loads((folder / "red.json").read_text()) == {"text": "a square", "rating": 5, "wd14": "hatsune_miku"}
    assert "2 captions written" in capsys.readouterr().out

    before = (folder / "red.json").stat().st_ino
    assert main.run(command) == errors.DONE
    assert "0 captions written, 2 had one" in capsys.readouterr().out
    assert (folder / "red.json").stat().st_ino == before
    (folder / "blue.json").unlink()  # as if it had been stopped there
    assert main.run(command) == errors.DONE
    assert "1 caption written, 1 had one" in capsys.readouterr().out
    assert main.run([*command, "write=txt"]) == errors.DONE
    assert (folder / "blue.txt").read_text() == "1girl\n"
    assert main.run([*command, "again=true", "field=tags"]) == errors.DONE
    assert json.loads((folder / "blue.json").read_text()) == {"wd14": "1girl", "tags": "1girl"}


def test_what_cannot_be_read_is_named_and_left_as_it_is(tagger, tmp_path, capsys):
    folder = pictures(tmp_path / "images")
    (folder / "red.json").write_text("[1]")
    assert main.run(["caption", str(folder), "with=wd14", f"path={tagger}"]) == errors.FAILED
    assert "red.json" in capsys.readouterr().out
    assert (folder / "red.json").read_text() == "[1]"
    assert (folder / "blue.json").exists()


def test_refusals(tagger, tmp_path, capsys):
    folder = str(pictures(tmp_path / "images"))
    for words, said in {
        (folder,): "with=NAME is missing: choose a captioner, blip, florence2, qwen3_vl, wd14",
        (folder, "with=wd15"): "Did you mean 'wd14'",
        (folder, "with=wd14", "general_treshold=0.4"): "general_threshold",
        (folder, "with=wd14", f"path={tagger}", "digest=00000000"): "asks for others",
        (folder, "with=wd14", "path=no/such/folder"): "has no model.onnx",
        (folder, "with=blip", f"path={tagger}"): "safetensors",
        (folder, "with=wd14", "write=txt", "field=x"): "no effect",
        (folder, "with=blip", f"path={tagger}", "device=gpu"): "torch cannot use it here",
        (folder, "with=blip", f"path={tagger}", "device=cuda:4096"): "torch cannot use it here",
        (str(tmp_path / "none"), "with=wd14"): "does not exist",
    }.items():
        assert main.run(["caption", *words]) == errors.REFUSED, words
        assert said in capsys.readouterr().err, words
    other = write(tmp_path / "other", WEIGHTS, dims=["n", 8, 9, 3])
    with pytest.raises(UserError, match="reads"):
        wd14.load(wd14.Settings(path=str(other)), "cpu")
    (tagger / "model.onnx").write_bytes(b"no network")
    with pytest.raises(UserError, match="cannot be read as ONNX"):
        wd14.load(wd14.Settings(path=str(tagger)), "cpu")


@pytest.mark.long  # transformers is loaded for it; of the quick tests, the tagger writes captions
def test_blip_writes_a_sentence(tmp_path):
    blip = plugins.find("captioners", "blip")
    place = str(tiny_captioners.blip(tmp_path / "blip"))
    images = [Image.new("RGB", (20, 30), (200, 10, 10)), Image.new("RGBA", (20, 30), (200, 10, 10, 0))]
    found = blip.load(blip.Settings(path=place, max_new_tokens=3), "cpu").captions(images)
    assert found == [{"blip": "red red red"}] * 2
    begun = blip.load(blip.Settings(path=place, max_new_tokens=3, prompt="a photo of"), "cpu").captions(images[:1])
    assert begun[0]["blip"].startswith("a photo of red")
    for prompt, most in {None: 32, "a photo of": 29}.items():  # of 32 positions
        settings = blip.Settings(path=place, max_new_tokens=most, prompt=prompt)
        assert blip.load(settings, "cpu").captions(images[:1])[0]["blip"].split()[-most:] == ["red"] * most
        with pytest.raises(UserError, match=f"at most {most} "):
            blip.load(settings.model_copy(update={"max_new_tokens": most + 1}), "cpu")
    with pytest.raises(UserError, match="shorten it"):
        blip.load(blip.Settings(path=place, max_new_tokens=1, prompt="a photo of " * 12), "cpu")
    florence2 = plugins.find("captioners", "florence2")
    with pytest.raises(UserError, match="holds a blip"):
        florence2.load(florence2.Settings(path=place), "cpu")
    (tmp_path / "blip" / "tokenizer.json").write_text('{"model": {"type": "X"}}')
    with pytest.raises(UserError, match="its processor cannot be read"):
        blip.load(blip.Settings(path=place, max_new_tokens=3), "cpu")


@pytest.mark.long
def test_florence2_writes_a_field_for_each_task(tmp_path):
    florence2 = plugins.find("captioners", "florence2")
    place = str(tiny_captioners.florence2(tmp_path / "florence2"))
    settings = florence2.Settings(path=place, max_new_tokens=4, tasks=["caption", "detailed_caption"])
    with pytest.raises(UserError, match="64 tokens, so at most 64"):
        florence2.load(settings.model_copy(update={"max_new_tokens": 65}), "cpu")
    most = florence2.load(settings.model_copy(update={"max_new_tokens": 64}), "cpu")
    assert len(most.captions([Image.new("RGB", (20, 30))])[0]["florence2"].split()) > 60
    own, image = florence2.load(settings, "cpu"), Image.new("RGB", (20, 30), (200, 10, 10))
    (found,) = own.captions([image])
    assert [*found] == ["florence2", "florence2_detailed_caption"]
    text = "<image>" * 5 + "<s>Describe in detail what is shown in the image.</s>"
    tokens = own.processor.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    pixels = own.processor.image_processor(image, return_tensors="pt").pixel_values
    by_hand = own.model.generate(
        input_ids=tokens, pixel_values=pixels, max_new_tokens=4, num_beams=3, do_sample=False
    )  # fmt: skip
    (said,) = own.processor.batch_decode(by_hand, skip_special_tokens=True)
    assert found["florence2_detailed_caption"] == " ".join(said.split())
    assert said


@pytest.mark.long
def test_qwen3_vl_answers_a_prompt(tmp_path):
    import torch

    qwen = plugins.find("captioners", "qwen3_vl")
    place = str(tiny_captioners.qwen3_vl(tmp_path / "qwen"))
    settings = qwen.Settings(path=place, max_new_tokens=6, dtype="float32")
    own = qwen.load(settings, "cpu")
    dice = np.random.default_rng(0)
    images = [Image.fromarray(dice.integers(0, 256, (*side, 3), dtype=np.uint8)) for side in ((96, 160), (300, 64))]
    both = [one["qwen3_vl"] for one in own.captions(images)]
    for image, said in zip(images, both, strict=True):  # padded on the left, each says what it says alone
        assert own.captions([image])[0]["qwen3_vl"] == said
        text = TEMPLATE_OF.format(settings.prompt)
        rows, columns = own.processor.images(images=image, return_tensors="pt")["image_grid_thw"][0, 1:].tolist()
        text = text.replace("<|image_pad|>", "<|image_pad|>" * (rows * columns // 4))
        ids = own.processor.words(text, return_tensors="pt").input_ids
        seen = own.processor.images(images=image, return_tensors="pt")
        by_hand = own.model.generate(
            input_ids=ids, mm_token_type_ids=(ids == 5).int(), **seen, max_new_tokens=6, num_beams=1, do_sample=False
        )
        answer = own.processor.words.decode(by_hand[0, ids.shape[1] :], skip_special_tokens=True)
        assert said == " ".join(answer.split())
    assert both[0] != both[1], "the picture counts"
    assert own.captions([images[0].resize((2000, 1500))])[0]
    few = qwen.load(settings.model_copy(update={"max_pixels": 1 << 16}), "cpu").processor
    read = few(images=images[0].resize((2000, 1500)), text="x", return_tensors="pt")
    assert read["image_grid_thw"].prod() * 256 <= 1 << 16
    assert qwen.load(settings.model_copy(update={"dtype": "bfloat16"}), "cpu").model.dtype == torch.bfloat16
    with pytest.raises(UserError, match="stands for the picture"):
        qwen.load(settings.model_copy(update={"prompt": "an <|image_pad|>"}), "cpu")
    with pytest.raises(UserError, match="2048 tokens, so at most"):
        qwen.load(settings.model_copy(update={"max_new_tokens": 2048}), "cpu")
    (tmp_path / "qwen" / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="its processor cannot be read"):
        qwen.load(settings, "cpu")
    (tmp_path / "qwen" / "chat_template.json").write_text(json.dumps({"chat_template": tiny_captioners.TEMPLATE}))
    assert qwen.load(settings, "cpu").captions(images[:1])[0]["qwen3_vl"] == both[0]


TEMPLATE_OF = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"
