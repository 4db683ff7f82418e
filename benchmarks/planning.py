"""What planning costs for millions of samples: bytes of index, seconds to open and to a batch anywhere, memory.

    python benchmarks/planning.py                      # 1,000 shards of 10,000 samples
    python benchmarks/planning.py --shards 100 --each 1000
    python benchmarks/planning.py --shards 20000 --sets "most and buckets" --keep FOLDER --seconds 0

One shard of small JPEGs is made and indexed; the others are links to it with ids, sizes and scores of their own, so
that any sample can really be read. Then as many processes as a machine may have (`--processes`) open the set at the
same time, twice: at first nothing is known of it but its index files, then the choice of a large one is in a file. Each
says its seconds of processor time and its own memory, which no other process can share (`RssAnon`; `highest` as often
as it was looked at), when it has the set and made the first batch of 64 at position 0, in the middle of the first epoch
and at the end of the third. At last, how many images a second come with and without a filter.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash
from PIL import Image
from pyarrow import ipc

from daguerre.data.dataset import open_dataset
from daguerre.data.index import cache, file
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
    "most and buckets": {"filters": "score > 0.05", "buckets": {"aspects": "auto"}, "resolution": 512},
}


def make(folder: Path, shards: int, each: int) -> None:
    """The shards and their indexes."""
    first = folder / "part-00000.tar"
    rng = np.random.default_rng(0)
    with tarfile.open(first, "w") as tar:
        for i in range(each):
            image = io.BytesIO()
            side = (48, 64, 96)[i % 3]
            Image.fromarray(rng.integers(0, 256, (64, side, 3), dtype=np.uint8)).save(image, "JPEG", quality=50)
            metadata = {"score": float(rng.random()), "punsafe": float(rng.random())}
            members = (("jpg", image.getvalue()), ("txt", b"an image"), ("json", json.dumps(metadata).encode()))
            for extension, data in members:
                info = tarfile.TarInfo(f"{i:09}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    write = template(webdataset.build(Location(str(first))))
    for number in range(shards):
        path = folder / f"part-{number:05}.tar"
        if number:
            os.link(first, path)
        aspects = np.exp(rng.normal(0, 0.35, each))
        areas_px = rng.uniform(300, 1500, each) ** 2
        columns = {
            "id": rng.integers(0, 1 << 63, each, np.int64),
            "height": np.sqrt(areas_px / aspects).astype(np.int32),
            "width": np.sqrt(areas_px * aspects).astype(np.int32),
            "n:score": rng.random(each),
        }
        Path(f"{path}.index").write_bytes(write(columns))


def template(index: cache.ShardIndex) -> Callable[[Mapping[str, np.ndarray]], memoryview]:
    """Makes index files like this one, but for some columns of numbers, without encoding each anew."""
    data = bytearray(cache.encoded(index))
    length, _ = file._END.unpack(data[-file._END.size :])
    begin = len(data) - file._END.size - length
    said, stream = json.loads(data[begin : begin + length]), pa.py_buffer(data)
    table = ipc.open_stream(stream).read_all()

    def made(columns: Mapping[str, np.ndarray]) -> memoryview:
        for name, values in columns.items():
            held = table[name].chunk(0).buffers()[1]
            start = held.address - stream.address
            data[start : start + values.nbytes] = values.tobytes()
            said["columns"][name] = file._digest(table[name].chunk(0))
        digests = json.dumps(said).encode()
        assert len(digests) == length
        data[begin:] = digests + file._END.pack(length, xxhash.xxh3_64_intdigest(digests))
        return memoryview(data)

    return made


def settings(folder: Path, name: str) -> webdataset.Settings:
    """Of one of the sets."""
    return webdataset.Settings(path=str(folder), cache_dir=str(folder / "cache"), **{"resolution": 64, **SETS[name]})


def own_mb() -> float:
    """Memory of this process that no other can share."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024 / 1e6


@contextmanager
def watched(found: dict[str, float]) -> Iterator[None]:
    """Adds the highest of `own_mb` while the block runs."""
    ended, seen = threading.Event(), [own_mb()]

    def watch() -> None:
        while not ended.wait(0.02):
            seen.append(own_mb())

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    ended.set()
    thread.join()
    found["highest_mb"] = max(seen)


def measured(folder: Path, name: str) -> dict[str, float]:
    """What a fresh process needs."""
    found = {"before_mb": own_mb()}
    started, by_clock = time.process_time(), time.perf_counter()
    with watched(found):
        dataset = open_dataset(settings(folder, name), "train")
    found |= {"open_seconds": time.process_time() - started, "by_clock": time.perf_counter() - by_clock}
    found |= {"opened_mb": own_mb(), "samples": dataset.size}
    for where, position in (("first", 0), ("middle", dataset.size // 2), ("end", 3 * dataset.size - BATCH)):
        run = Loading(dataset, LoaderSettings(), 0, BATCH, BATCH, lambda batch: {}, lambda texts: {})
        started = time.process_time()
        next(run.plan.batches(position // BATCH))
        planned = time.process_time()
        run.first(position // BATCH * BATCH)  # planned again, from what it keeps
        found |= {f"{where}_planned": planned - started, f"{where}_seconds": time.process_time() - started}
    return {**found, "own_mb": own_mb()}


def together(folder: Path, name: str, processes: int) -> None:
    """Prints what processes need that begin at the same time."""
    command = [sys.executable, __file__, "--only", str(folder), name]
    begun = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    rows = [json.loads(process.communicate()[0]) for process in begun]
    for row in rows:
        print(f"{name:20} {'  '.join(f'{key} {value:,.2f}' for key, value in row.items())}", flush=True)
    print(f"{name:20} of all together: {sum(row['own_mb'] - row['before_mb'] for row in rows):,.0f} MB", flush=True)


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
    parser.add_argument("--sets", nargs="*", default=list(SETS), metavar="SET")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="makes the set there, or uses what is there")
    parser.add_argument("--only", nargs=2, metavar=("FOLDER", "SET"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measured(Path(given.only[0]), given.only[1])))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = given.keep or Path(name)
        if not folder.exists() or not any(folder.iterdir()):
            folder.mkdir(exist_ok=True)
            make(folder, given.shards, given.each)
        stored = [path.stat().st_size for path in folder.glob("*.index")]
        count = len(stored) * given.each
        print(f"{count:,} samples, {sum(stored) / count:.0f} bytes of index a sample")
        for kind in given.sets:
            for _ in range(2):
                together(folder, kind, given.processes)
        if given.seconds:
            print("images a second:", json.dumps(throughput(folder, given.seconds)))


if __name__ == "__main__":
    main()
