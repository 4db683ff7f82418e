"""`daguerre cache`: each cause of staleness is noticed, only what changed is encoded again, the rest is purged."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tars
from adapter_runs import IMAGES, Place
from faulty_store import s3  # noqa: F401 (a fixture)
from PIL import Image
from safetensors.torch import load_file, save_file

from daguerre import errors
from daguerre.caching import cache as caching
from daguerre.caching import fill
from daguerre.cli import main
from daguerre.data.cached import source
from daguerre.data.cached.rows import Rows
from daguerre.storage import local_files

RECIPE = """
run_name: run
model: {family: KIND}
objective: {name: eps}
data: {source: folder, resolution: 16, caption_dropout: 0.3, held_out_fraction: 0}
training: {duration: 4 steps, global_batch_size: 2}
"""
TEXTS = IMAGES + 1
"""Each image has a caption of its own, and some have none."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    made = Place(tmp_path_factory.mktemp("cache"), "sd", RECIPE)
    assert main.run(command(made)) == 0
    return made


def command(place: Place, *more: str, verb: str = "") -> list[str]:
    words = ["cache", *([verb] if verb else []), str(place.recipe), f"output_dir={place.folder}"]
    return [*words, *place.given(f"cache.path={place.folder / 'cache'}", *more)]


def made(place: Place, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, int]:
    """Rows of images and of texts that the command encodes."""
    capsys.readouterr()
    assert main.run(command(place, *more)) == 0
    said = capsys.readouterr().out
    told = re.findall(r"cached (\w+): (\d+)(?: in (\d+) rows)?", said)
    counts = {half: int(rows or done) for half, done, rows in told}
    return counts.get("images", 0), counts.get("texts", 0)


def changed_image(place: Place) -> None:
    pixels = np.random.default_rng(99).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(place.folder / "images" / "03.png")


def changed_weights(place: Place) -> None:
    _change(place.folder / "base" / "vae" / "diffusion_pytorch_model.safetensors", "encoder.conv_in.weight")


def changed_text_encoder(place: Place) -> None:
    _change(place.folder / "base" / "text_encoder" / "model.safetensors", "encoder.layers.0.mlp.fc1.weight")


def _change(path: Path, name: str) -> None:
    tensors = load_file(path)
    tensors[name] *= 1.01
    save_file(tensors, path, {"format": "pt"})


def changed_tokenizer(place: Place) -> None:
    path = place.folder / "base" / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"note": "other"}))


CAUSES = [
    ("nothing", None, (), (0, 0)),
    ("bytes", changed_image, (), (1, 0)),
    ("caption", lambda place: (place.folder / "images" / "03.txt").write_text("another image"), (), (0, 1)),
    ("weights", changed_weights, (), (IMAGES, 0)),
    ("bfloat16 is of texts alone", None, ("cache.dtype=bfloat16",), (0, TEXTS)),
    ("layer", None, ("model.text_encoder_layer=-2",), (0, TEXTS)),
]
MORE = [
    ("dtype", None, ("cache.dtype=float32",), (IMAGES, TEXTS)),
    ("computed dtype", None, ("training.frozen_precision=bf16",), (IMAGES, TEXTS)),
    ("box", None, ("data.resolution=24",), (IMAGES, 0)),
    ("flip", None, ("data.random_flip=true",), (IMAGES, 0)),
    ("filter", None, ("data.resolution=24", "data.interpolation=lanczos"), (IMAGES, 0)),
    ("other buckets", None, ("data.buckets.aspects=[1/1, 1/2]", "data.buckets.step=8"), (0, 0)),
    ("own bucket", None, ("data.buckets.aspects=[1/2]", "data.buckets.step=8"), (IMAGES, 0)),
    ("text encoder", changed_text_encoder, (), (0, TEXTS)),
    ("norm", None, ("model.text_encoder_final_norm=false",), (0, TEXTS)),
    ("tokenizer", changed_tokenizer, (), (0, TEXTS)),
    ("long prompts", None, ("model.long_prompts=true",), (0, TEXTS)),
]


@pytest.mark.parametrize(
    ("change", "given", "expected"),
    [pytest.param(*cause[1:], id=cause[0]) for cause in CAUSES]
    + [pytest.param(*cause[1:], id=cause[0], marks=pytest.mark.long) for cause in MORE],
)
def test_a_cause_of_staleness_is_noticed(place, capsys, change, given, expected):
    if change is not None:
        change(place)
    assert made(place, capsys, *given) == expected


def test_other_code_has_other_rows(place, capsys, monkeypatch):
    monkeypatch.setattr(caching, "CODE", caching.CODE + 1)
    assert made(place, capsys) == (IMAGES, TEXTS)


def in_place(path: Path, write: Callable[[Path], object]) -> None:
    """An edit that leaves size and time of change as they were."""
    stat = path.stat()
    write(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)


def painted(colour: str) -> Callable[[Path], object]:
    return lambda path: Image.new("RGB", (16, 16), colour).save(path, compress_level=0)


def test_an_edit_in_place_is_noticed(place, capsys):
    image, caption = place.folder / "images" / "05.png", place.folder / "images" / "03.txt"
    Image.new("RGB", (16, 16), "lime").save(image, compress_level=0)
    caption.write_text("one image")
    assert made(place, capsys) == (1, 1)
    in_place(image, painted("navy"))
    in_place(caption, lambda path: path.write_text("two image"))
    assert made(place, capsys) == (1, 1)
    assert made(place, capsys) == (0, 0)


def test_what_was_only_touched_is_read_and_compared_once(place, capsys, monkeypatch):
    read: list[bytes] = []
    monkeypatch.setattr(fill, "image_digest", lambda image: (read.append(image), source.image_digest(image))[1])
    paths = sorted((place.folder / "images").glob("*.png"))
    made(place, capsys)
    read.clear()
    for path in paths:
        path.chmod(0o600)
    assert (made(place, capsys), len(read)) == ((0, 0), len(paths))
    read.clear()
    assert (made(place, capsys), len(read)) == ((0, 0), 0)


@pytest.mark.long  # of the quick tests, test_cache_damage.py verifies and mends
def test_verify_finds_an_edit_that_the_system_hides_and_again_mends_it(place, capsys, monkeypatch):
    """As on a disk that loses bits, or a file system without a time of its own."""
    monkeypatch.setattr(local_files, "version", lambda path: str(os.stat(path).st_mtime_ns))
    path = place.folder / "images" / "05.png"
    Image.new("RGB", (16, 16), "red").save(path, compress_level=0)
    assert made(place, capsys) == (1, 0)
    in_place(path, painted("blue"))
    assert made(place, capsys) == (0, 0)
    assert main.run(command(place, f"rows={IMAGES}", verb="verify")) == errors.FAILED
    said = capsys.readouterr().out
    assert "05.png: changed, but neither its size" in said
    assert "again=true" in said
    assert made(place, capsys, "again=true") == (1, 0)
    assert main.run(command(place, f"rows={IMAGES}", verb="verify")) == 0
    said = capsys.readouterr().out
    assert f"{IMAGES + IMAGES} rows again: {IMAGES + IMAGES} are equal to the bit" in said
    monkeypatch.undo()
    assert made(place, capsys) == (0, 0), "it is noted anew"


@pytest.mark.long
@pytest.mark.parametrize("far", [False, True], ids=["disk", "store"])
def test_bytes_of_shards_are_digested_again_where_a_shard_changed_alone(place, capsys, monkeypatch, tmp_path, s3, far):  # noqa: F811
    """By size and time of change, or by the ETag of the store, and the digests of the index. A shard is what its index
    says: until it has a new one, an edited sample is left out, or (of a store) is that of the copy that was fetched."""
    samples = [tars.sample(f"{number:02}", number) for number in range(8)]

    def write(shard: int) -> None:
        data = tars.packed(member for each in samples[4 * shard :][:4] for member in each)
        if far:
            s3.put(f"set/{shard}.tar", data)
        else:
            (tmp_path / f"{shard}.tar").write_bytes(data)

    url = f"s3://{s3.bucket}/set/" if far else str(tmp_path)
    given = [*place.base, f"output_dir={place.folder}", "data.source=webdataset", f"data.path={url}"]
    given += [f"cache.path={tmp_path / 'rows'}"]
    digested: list[bytes] = []
    monkeypatch.setattr(fill, "image_digest", lambda image: (digested.append(image), source.image_digest(image))[1])

    def digests(cache_dir: str) -> tuple[int, str]:
        digested.clear()
        capsys.readouterr()
        assert main.run(["cache", str(place.recipe), *given, f"data.cache_dir={tmp_path / cache_dir}"]) == errors.DONE
        return len(digested), capsys.readouterr().out

    write(0), write(1)
    assert digests("first")[0] == 8
    assert digests("first")[0] == 0
    samples[2] = tars.sample("02", 99, "image 2")
    write(0)
    read, said = digests("first")
    assert read == (4 if far else 3)
    assert "nothing was missing" in said
    assert far or main.run(["data", "index", url, "again=true"]) == errors.DONE
    read, said = digests("second")
    assert read == 4, "of the other shard nothing is read"
    assert "cached images: 1 (" in said
    assert digests("second")[0] == 0


def test_what_is_not_there_is_said(place, capsys):
    assert main.run([*command(place, verb="list"), f"cache.path={place.folder / 'nowhere'}"]) == errors.DONE
    assert "nowhere: nothing is cached there" in capsys.readouterr().out


def test_purge_keeps_what_the_recipe_reads(place, capsys):
    assert main.run(command(place, verb="purge")) == 0
    folders = sorted(path.parent for path in (place.folder / "cache").glob("*/encoder.json"))
    assert [folder.name.partition("-")[0] for folder in folders] == ["images", "texts"]
    assert [len(Rows.found(str(folder)).keys) for folder in folders] == [IMAGES, TEXTS]
    assert made(place, capsys) == (0, 0)


def test_a_torn_or_damaged_file_is_made_again(place, capsys):
    """As a kill or a power cut may leave it; a whole file never changes, so nothing else can be lost."""
    (folder,) = (path.parent for path in (place.folder / "cache").glob("texts-*/encoder.json"))
    for name in Rows.found(str(folder)).shards:
        data = Path(folder, name).read_bytes()
        Path(folder, name).write_bytes(data[: len(data) - 7])
    assert made(place, capsys) == (0, TEXTS)
    assert main.run(command(place, verb="purge")) == 0
    assert Rows.found(str(folder)).damaged == []


def test_an_image_and_a_caption_that_are_there_twice_are_kept_once(place, capsys):
    for kind in ("png", "txt"):
        (place.folder / "images" / f"twin.{kind}").write_bytes((place.folder / "images" / f"04.{kind}").read_bytes())
    assert made(place, capsys) == (0, 0)


def test_what_cannot_be_cached_is_refused_in_words(place, capsys):
    for given, words in {
        ("data.crop=random", "cache.images=true"): "new random crops",
        ("data.captions.shuffle_tags=true", "cache.texts=true"): "tags in another order",
    }.items():
        assert main.run(command(place, *given)) == errors.REFUSED
        assert words in capsys.readouterr().err
    Image.new("RGB", (60, 16), "green").save(place.folder / "images" / "wide.png")
    (place.folder / "images" / "wide.txt").write_text("a wide image")
    for verb, said in (("list", "of vae, cache.dtype=auto"), ("verify", "samples that are not in the cache")):
        assert main.run(command(place, verb=verb)) == 0
        assert said in capsys.readouterr().out
    assert made(place, capsys, "data.crop=random", "data.crops=3") == (3, 1)


@pytest.mark.long  # of the quick tests, test_quantized_runs.py has bases of few bits
def test_a_base_of_few_bits_has_text_encoders_as_they_are(place, capsys):
    """What is cached is what the encoders of the files make, so the same rows serve a denoiser in few bits."""
    few = ["adapter.name=lora", "training.base_precision=int8"]
    assert made(place, capsys, *few) == (0, 0)
    words = ["train", str(place.recipe), f"output_dir={place.folder}"]
    assert main.run([*words, *place.given(f"cache.path={place.folder / 'cache'}", *few)]) == errors.DONE
    said = capsys.readouterr().out
    assert "unet: " in said
    assert "text_encoder: " not in said
