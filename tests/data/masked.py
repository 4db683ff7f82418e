"""Images whose red channel is their mask, as every source holds them: what must stay aligned, whatever is cut."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tars
from PIL import Image

SIZES = ((40, 48), (64, 32), (33, 57), (90, 60), (32, 32), (47, 96))


def mask(number: int, height: int, width: int) -> np.ndarray:
    """[height, width] uint8, 0 or 255, in blocks; no two alike, none of them symmetric."""
    random = np.random.default_rng(number)
    blocks = random.integers(0, 2, (-(-height // 5), -(-width // 5))) * 255
    return np.kron(blocks, np.ones((5, 5)))[:height, :width].astype(np.uint8)


def image(number: int, height: int, width: int) -> np.ndarray:
    """[height, width, 3] uint8."""
    other = np.random.default_rng(number + 1000).integers(0, 256, (height, width, 2), dtype=np.uint8)
    return np.dstack([mask(number, height, width), other])


def folder(place: Path, masks: str = "{}.mask.png", count: int = 12) -> Path:
    """A folder with captions and masks; `masks` is the path of a mask by its image's name."""
    place.mkdir(parents=True)
    for i in range(count):
        size = SIZES[i % len(SIZES)]
        Image.fromarray(image(i, *size)).save(place / f"{i:02}.png")
        (place / f"{i:02}.txt").write_text(f"image {i}")
        path = place / masks.format(f"{i:02}")
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(mask(i, *size)).save(path)
    return place


def _columns(place: Path) -> dict[str, list]:
    files = sorted(path for path in place.glob("*.png") if ".mask" not in path.name)
    masks = [path.with_name(f"{path.stem}.mask.png") for path in files]
    return {
        "image": [path.read_bytes() for path in files],
        "mask": [path.read_bytes() if path.exists() else None for path in masks],
        "path": [str(path) for path in files],
        "mask_path": [str(path) if path.exists() else "" for path in masks],
        "text": [path.with_suffix(".txt").read_text() for path in files],
    }


def webdataset(place: Path) -> dict[str, object]:
    """Two shards; in the second one the masks stand at its end."""
    files = sorted(folder(place / "files").iterdir())
    half = len(files) // 2
    later = sorted(files[half:], key=lambda path: ".mask" in path.name)
    for i, part in enumerate((files[:half], later)):
        tars.write(place / f"{i}.tar", [(path.name, path.read_bytes()) for path in part])
    return {"source": "webdataset", "path": str(place)}


def parquet(place: Path) -> dict[str, object]:
    """Bytes in a column, in small row groups."""
    found = _columns(folder(place / "files"))
    pq.write_table(pa.table({n: found[n] for n in ("image", "mask", "text")}), place / "t.parquet", row_group_size=5)
    return {"source": "parquet", "path": str(place / "t.parquet"), "mask_column": "mask"}


def text(place: Path) -> dict[str, object]:
    """Paths in a table."""
    found = _columns(folder(place / "files"))
    with (place / "t.csv").open("w", newline="") as file:
        rows = zip(*(found[name] for name in ("path", "mask_path", "text")), strict=True)
        csv.writer(file).writerows([["path", "mask_path", "text"], *rows])
    return {"source": "csv", "path": str(place / "t.csv"), "mask_column": "mask_path"}


def huggingface(place: Path) -> dict[str, object]:
    """{bytes, path}."""
    found = _columns(folder(place / "files"))
    columns = {n: [data and {"bytes": data, "path": None} for data in found[n]] for n in ("image", "mask")}
    kinds = {"image": datasets.Image(), "mask": datasets.Image(), "text": datasets.Value("string")}
    made = datasets.Dataset.from_dict({**columns, "text": found["text"]}, features=datasets.Features(kinds))
    datasets.disable_progress_bars()
    made.save_to_disk(place / "set")
    return {"source": "huggingface", "path": str(place / "set"), "image_column": "image", "mask_column": "mask"}


def beside(place: Path) -> dict[str, object]:
    """As webdataset's names."""
    return {"source": "folder", "path": str(folder(place / "files"))}


def onetrainer(place: Path) -> dict[str, object]:
    """As OneTrainer's names."""
    return {"source": "folder", "path": str(folder(place / "files", "{}-masklabel.png"))}


def apart(place: Path) -> dict[str, object]:
    """As kohya's: a folder of their own, here inside of that of the images."""
    files = folder(place / "files", "masks/{}.png")
    return {"source": "folder", "path": str(files), "mask_dir": str(files / "masks")}


def packed(place: Path) -> dict[str, object]:
    """Shards that `data pack` wrote."""
    from daguerre import errors
    from daguerre.cli import main

    files = folder(place / "files")
    arguments = ["data", "pack", str(files), "-o", str(place / "shards"), "shard_samples=5", "processes=1"]
    assert main.run(arguments) == errors.DONE
    shutil.rmtree(files)
    return {"source": "webdataset", "path": str(place / "shards")}


MAKE = {make.__name__: make for make in (beside, onetrainer, apart, webdataset, parquet, text, huggingface, packed)}
"""Makes a data set in a folder; the settings by which it is read."""
