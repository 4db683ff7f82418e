"""Pairs of images through every source: one that people like, and another picture of another shape that they reject."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tars
from PIL import Image

from daguerre.cli import main

SIZES = ((40, 48), (64, 32), (33, 57), (90, 60), (32, 32), (47, 96))


def chosen(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*SIZES[number % len(SIZES)], 3), dtype=np.uint8)


def rejected(number: int) -> np.ndarray:
    """Of another size and aspect ratio than the chosen image of the pair."""
    size = SIZES[(number + 2) % len(SIZES)]
    return np.random.default_rng(1000 + number).integers(0, 256, (*size, 3), dtype=np.uint8)


def files(place: Path, path: str = "{}.rejected.png", count: int = 8) -> Path:
    """A folder of pairs, the rejected images at this path in it."""
    place.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(chosen(number)).save(place / f"{number:02}.png")
        (place / f"{number:02}.txt").write_text(f"image {number}")
        where = place / path.format(f"{number:02}")
        where.parent.mkdir(exist_ok=True)
        Image.fromarray(rejected(number)).save(where)
    return place


def together(place: Path) -> dict:
    return {"source": "folder", "path": str(files(place / "files"))}


def apart(place: Path) -> dict:
    folder = files(place / "files", "worse/{}.png")
    return {"source": "folder", "path": str(folder), "rejected_dir": str(folder / "worse")}


def webdataset(place: Path) -> dict:
    folder = files(place / "files")
    tars.write(place / "0.tar", [(path.name, path.read_bytes()) for path in sorted(folder.iterdir())])
    return {"source": "webdataset", "path": str(place)}


def packed(place: Path) -> dict:
    folder = files(place / "files")
    assert main.run(["data", "pack", str(folder), "-o", str(place / "shards"), "processes=1"]) == 0
    return {"source": "webdataset", "path": str(place / "shards")}


def rows(place: Path) -> list[dict[str, str]]:
    """Of a table: paths and captions."""
    folder = files(place / "files")
    names = {"image": ".png", "worse": ".rejected.png"}
    return [
        {name: str(path.with_suffix(suffix)) for name, suffix in names.items()} | {"text": f"image {number}"}
        for number, path in enumerate(sorted(folder.glob("??.png")))
    ]


def parquet(place: Path) -> dict:
    found = rows(place)
    columns = {name: [Path(row[name]).read_bytes() for row in found] for name in ("image", "worse")}
    pq.write_table(pa.table({**columns, "text": [row["text"] for row in found]}), place / "t.parquet")
    return {
        "source": "parquet", "path": str(place / "t.parquet"), "image_column": "image", "rejected_column": "worse"
    }  # fmt: skip


def text(place: Path) -> dict:
    found = rows(place)
    with (place / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[*found[0]], *(row.values() for row in found)])
    return {"source": "csv", "path": str(place / "t.csv"), "rejected_column": "worse"}


def json_lines(place: Path) -> dict:
    (place / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows(place)))
    return {"source": "jsonl", "path": str(place / "t.jsonl"), "rejected_column": "worse"}


MAKE = {make.__name__: make for make in (together, apart, webdataset, packed, parquet, text, json_lines)}
