"""What planning costs for millions of samples: bytes of index, seconds to the first batch, seconds an epoch, memory.

    python benchmarks/planning.py                      # 1,000 shards of 10,000 samples
    python benchmarks/planning.py --shards 100 --each 1000

One shard of small JPEGs is made and indexed; the others are links to it with ids and metadata of their own, so that any
sample can really be read. Then, in a process of its own each: opening the set and making the first batch of 64 at
sample 0 and at sample 1,000,000, plain, with a filter that passes 1 in 20, with buckets; and how many images a second
come with and without that filter.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from daguerre.data.dataset import open_dataset
from daguerre.data.index import cache
from daguerre.data.loading.loader import Loading
from daguerre.data.settings import LoaderSettings
from daguerre.data.sources import webdataset
from daguerre.storage.location import Location

BATCH = 64
SETS = {
    "plain": {},
    "filter 1 in 20": {"filters": "score > 0.95"},
    "buckets": {"buckets": {"aspects": "auto"}, "resolution": 512},
    "filter and buckets": {"filters": "score > 0.95", "buckets": {"aspects": "auto"}, "resolution": 512},
}


def make(folder: Path, shards: int, each: int) -> None:
    """The shards and their indexes."""
    first = folder / "part-00000.tar"
    rng = np.random.default_rng(0)
    with tarfile.open(first, "w") as tar:
        for i in range(each):
            file = io.BytesIO()
            side = (48, 64, 96)[i % 3]
            Image.fromarray(rng.integers(0, 256, (64, side, 3), dtype=np.uint8)).save(file, "JPEG", quality=50)
            metadata = {"score": float(rng.random()), "width": side, "height": 64, "punsafe": float(rng.random())}
            members = (("jpg", file.getvalue()), ("txt", b"an image"), ("json", json.dumps(metadata).encode()))
            for extension, data in members:
                info = tarfile.TarInfo(f"{i:09}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    index = webdataset.build(Location(str(first)))
    cache.save(index, f"{first}.index")
    for number in range(1, shards):
        path = folder / f"part-{number:05}.tar"
        os.link(first, path)
        table = index.table
        given = {"id": rng.integers(0, 1 << 62, each), "n:score": rng.random(each)}
        for name, values in given.items():
            table = table.set_column(table.column_names.index(name), name, pa.array(values))
        cache.save(cache.ShardIndex(table, index.about), f"{path}.index")


def settings(folder: Path, name: str) -> webdataset.Settings:
    """Of one of the sets."""
    return webdataset.Settings(path=str(folder), cache_dir=str(folder / "cache"), **{"resolution": 64, **SETS[name]})


def measured(folder: Path, name: str) -> dict[str, float]:
    """What a fresh process needs."""
    started = time.perf_counter()
    dataset = open_dataset(settings(folder, name), "train")
    opened = time.perf_counter()
    run = Loading(dataset, LoaderSettings(), 0, BATCH, BATCH, lambda batch: {}, lambda texts: {})
    run.first(0)
    first = time.perf_counter()
    far = min(1_000_000, dataset.size // 2) // BATCH * BATCH
    run.first(far)
    later = time.perf_counter()
    batches = run.plan.batches(0)
    for _ in range(max(1, dataset.size // BATCH // 10)):
        next(batches)
    planned = time.perf_counter()
    return {
        "samples": dataset.size,
        "open_seconds": opened - started,
        "first_batch_seconds": first - opened,
        "batch_at_a_million_seconds": later - first,
        "planning_an_epoch_seconds": 10 * (planned - later),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
    }


def throughput(folder: Path, seconds: float) -> dict[str, float]:
    """Images a second without and with the filter, in turns."""
    rates: dict[str, list[float]] = {"plain": [], "filter 1 in 20": []}
    for _ in range(4):
        for name, found in rates.items():
            dataset = open_dataset(settings(folder, name), "train")
            run = Loading(dataset, LoaderSettings(), 0, BATCH, BATCH, lambda batch: {}, lambda texts: {})
            with run.updates(0) as updates:
                next(updates)
                count, start = 0, time.perf_counter()
                while time.perf_counter() - start < seconds:
                    count += sum(len(batch.names) for batch in next(updates))
                found.append(count / (time.perf_counter() - start))
    medians = {name: float(np.median(found)) for name, found in rates.items()}
    return {**medians, "ratio": float(np.median([b / a for a, b in zip(*rates.values(), strict=True)]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--each", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", nargs=2, metavar=("FOLDER", "SET"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measured(Path(given.only[0]), given.only[1])))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, given.shards, given.each)
        stored = sum(path.stat().st_size for path in folder.glob("*.index"))
        print(
            f"{given.shards * given.each:,} samples, {stored / given.shards / given.each:.0f} bytes of index a sample"
        )
        for kind in SETS:
            command = [sys.executable, __file__, "--only", name, kind]
            line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            figures = "  ".join(f"{key} {value:,.2f}" for key, value in json.loads(line).items())
            print(f"{kind:20} {figures}", flush=True)
        print("images a second:", json.dumps(throughput(folder, given.seconds)))


if __name__ == "__main__":
    main()
