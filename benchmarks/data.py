"""The data engine beside what peers do: the same tar shards to batches of 512 px crops, in turns in one run.

    python benchmarks/data.py [--rounds 12] [--images 96] [--parts core,workers,stages,memory] [--out FILE]

Images are generated JPEGs (smooth noise and texture, quality 90, 4:2:0) of 1024x1024, 1280x960 and 768x640. Variants:

    daguerre      the webdataset source and the loader: uint8 batches
    peer          `webdataset`, Pillow, bicubic, float32 in [-1, 1], stacked (with workers: DataLoader)
    peer, uint8   the same without the conversion to float32

`core` is one process with one thread, in seconds of processor time (files are in the page cache, so it waits for
nothing, and other work on the machine disturbs it less); `workers` is 2 loader processes, in seconds of the clock. No
number without parity: our crops must agree with Pillow's bicubic of the whole image. Reported: the median over rounds
of the paired ratio of times (above 1: Daguerre is faster), with the interval that holds the true median with 95 %
confidence (ranks). `stages` says where our time goes; `memory` passes 100,000 small samples through the loader and
watches the resident memory of all processes.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
import webdataset
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from daguerre.data.dataset import open_dataset
from daguerre.data.images import decode
from daguerre.data.loading.collate import Collator
from daguerre.data.loading.loader import Loading
from daguerre.data.plan.buckets import buckets
from daguerre.data.settings import LoaderSettings
from daguerre.data.sources.webdataset import Settings

SIZES = ((1024, 1024), (960, 1280), (640, 768))
"""Height and width."""
SIDE = 512
BATCH = 32
SHARDS = 4
WORKERS = 2
WARM_BATCHES = 6
"""Batches before the clock starts: what was made while nobody waited is gone, and the rate is that of the workers."""
CLOSE = 2.0
"""Largest mean difference of a crop from Pillow's, in levels of 255."""
Batches = Iterator[tuple[Tensor, list[str]]]


def natural(height: int, width: int, seed: int) -> np.ndarray:
    """An image with the spectrum of a photograph, about: noise of several scales, and a little grain."""
    rng = np.random.default_rng(seed)
    levels_HWC = rng.normal(size=(height, width, 1)).astype(np.float32) * 3 + np.full(
        (height, width, 3), 128, np.float32
    )
    for cells, levels in ((4, 60), (16, 30), (64, 14), (256, 7)):
        waves = torch.from_numpy(rng.normal(size=(1, 3, cells, cells)).astype(np.float32))
        levels_HWC += (
            levels * functional.interpolate(waves, (height, width), mode="bicubic")[0].permute(1, 2, 0).numpy()
        )
    return levels_HWC.clip(0, 255).astype(np.uint8)


def jpeg(levels_HWC: np.ndarray) -> bytes:
    """Quality 90."""
    file = io.BytesIO()
    Image.fromarray(levels_HWC).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_shards(folder: Path, encoded: list[bytes], repeats: int = 1) -> list[str]:
    """The images with captions, dealt to the shards."""
    paths = [folder / f"{number:05}.tar" for number in range(SHARDS)]
    for number, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for i in range(number, len(encoded) * repeats, SHARDS):
                for name, data in ((f"{i:08}.jpg", encoded[i % len(encoded)]), (f"{i:08}.txt", b"a photo of noise")):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return [str(path) for path in paths]


def loading(paths: list[str], workers: int, side: int = SIDE, batch: int = BATCH) -> Loading:
    """Our loader over the shards; nothing is held out, no numbers are drawn."""
    cache = str(Path(paths[0]).parent / "cache")
    settings = Settings(path=tuple(paths), resolution=side, held_out_fraction=0, cache_dir=cache)
    dataset = open_dataset(settings, "train")
    return Loading(dataset, LoaderSettings(num_workers=workers), 0, batch, batch, lambda _: {}, lambda _: {})


def framed_by_pillow(data: bytes) -> np.ndarray:
    """[512, 512, 3]: decode, resize the shorter side by bicubic, cut out the middle."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = SIDE / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
    return np.asarray(image.crop((left, top, left + SIDE, top + SIDE)))


def as_uint8(data: bytes) -> Tensor:
    """[3, 512, 512] uint8."""
    return torch.from_numpy(framed_by_pillow(data).copy()).permute(2, 0, 1).contiguous()


def as_float(data: bytes) -> Tensor:
    """[3, 512, 512] float32 in [-1, 1]."""
    return as_uint8(data).float().div_(127.5).sub_(1)


def caption(data: bytes) -> str:
    """Of a member."""
    return data.decode()


def stacked(samples: list[tuple[Tensor, str]]) -> tuple[Tensor, list[str]]:
    """A batch, as the usual collate function makes it."""
    return torch.stack([sample[0] for sample in samples]), [sample[1] for sample in samples]


def peer(paths: list[str], transform: Callable[[bytes], Tensor]) -> webdataset.WebDataset:
    """Endless batches in the order of the shards."""
    dataset = webdataset.WebDataset(paths, shardshuffle=False).repeat()
    dataset = dataset.to_tuple("jpg", "txt").map_tuple(transform, caption)
    return dataset.batched(BATCH, collation_fn=stacked)


@contextmanager
def daguerre_core(paths: list[str]) -> Iterator[Batches]:
    """Our batches, made here."""
    loader = loading(paths, 0)
    rows = Collator(loader.dataset.members, loader.seed)
    made = (rows.collate(task)[0] for task, _ in loader.tasks(0))
    yield ((batch.pixels_BCHW, batch.texts) for batch in made)


@contextmanager
def daguerre_workers(paths: list[str]) -> Iterator[Batches]:
    """Our batches, made by workers."""
    with loading(paths, WORKERS).updates(0) as updates:
        yield ((batch.pixels_BCHW, batch.texts) for update in updates for batch in update)


@contextmanager
def peer_core(paths: list[str], transform: Callable[[bytes], Tensor] = as_float) -> Iterator[Batches]:
    """The peer's batches, made here."""
    yield iter(peer(paths, transform))


@contextmanager
def peer_workers(paths: list[str], transform: Callable[[bytes], Tensor] = as_float) -> Iterator[Batches]:
    """The peer's batches, made by workers."""
    batches = iter(DataLoader(peer(paths, transform), batch_size=None, num_workers=WORKERS))
    try:
        yield batches
    finally:
        batches._shutdown_workers()  # now, not some time later beside the next variant


def check_parity(encoded: list[bytes], paths: list[str]) -> float:
    """The mean difference, in levels, of our crops from those of Pillow. SystemExit where they are not the same."""
    dataset = loading(paths, 0).dataset
    settings, bucket, key = dataset.settings, dataset.buckets[0], np.zeros(3, np.int64)
    gaps = []
    for data in encoded:
        ours = decode.cut({"image": data}, settings, bucket, 0, key)[1]["image"].permute(1, 2, 0).numpy().astype(int)
        gaps.append(float(np.abs(ours - framed_by_pillow(data)).mean()))
    if max(gaps) > CLOSE:
        raise SystemExit(f"no parity: crops differ by {max(gaps):.2f} levels of 255 on average")
    return max(gaps)


def timed(batches: Batches, count: int, clock: Callable[[], float]) -> float:
    """Seconds an image."""
    start = clock()
    for _ in range(count):
        pixels, texts = next(batches)
        assert pixels.shape == (BATCH, 3, SIDE, SIDE)
        assert len(texts) == BATCH
    return (clock() - start) / (count * BATCH)


def core_rounds(paths: list[str], rounds: int, count: int) -> list[dict[str, float]]:
    """Seconds an image and core, by variant."""
    variants = {
        "daguerre": daguerre_core(paths),
        "peer": peer_core(paths),
        "peer, uint8": peer_core(paths, as_uint8),
    }
    open_now = {name: variant.__enter__() for name, variant in variants.items()}
    for batches in open_now.values():
        timed(batches, 1, time.process_time)
    found = []
    for number in range(rounds):
        order = list(variants) if number % 2 else list(reversed(variants))
        found.append({name: timed(open_now[name], count, time.process_time) for name in order})
    return found


def worker_rounds(paths: list[str], rounds: int, count: int) -> list[dict[str, float]]:
    """Seconds an image with workers, by variant; fresh workers for each, as those of the others must not run."""
    variants: dict[str, Callable[[], Any]] = {
        "daguerre": lambda: daguerre_workers(paths),
        "peer": lambda: peer_workers(paths),
        "peer, uint8": lambda: peer_workers(paths, as_uint8),
    }
    found = []
    for number in range(rounds):
        times = {}
        for name in list(variants) if number % 2 else reversed(variants):
            with variants[name]() as batches:
                for _ in range(WARM_BATCHES):
                    next(batches)
                times[name] = timed(batches, count, time.perf_counter)
        found.append(times)
    return found


def interval(values: list[float]) -> tuple[float, float, float]:
    """Lower end, median and upper end of what holds the median with 95 % confidence: ranks of a binomial."""
    ordered, count = sorted(values), len(values)
    rank, tail = 0, 1 / 2**count
    while 2 * tail <= 0.05 and rank < count // 2:
        rank += 1
        tail += math.comb(count, rank) / 2**count
    rank = max(rank - 1, 0)
    return ordered[rank], statistics.median(ordered), ordered[count - 1 - rank]


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Images a second by variant, and how many times as fast ours is."""
    rows = {}
    for name in rounds[0]:
        low, middle, high = interval([times[name] / times["daguerre"] for times in rounds])
        speed = 1 / statistics.median(times[name] for times in rounds)
        rows[name] = {"images_per_second": speed, "ratio": middle, "ratio_interval": [low, high]}
    return rows


def show(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """A table."""
    print(f"\n{title}\n{'variant':14} {'images/s':>9} {'daguerre against it':>28}")
    for name, row in rows.items():
        low, high = row["ratio_interval"]
        print(f"{name:14} {row['images_per_second']:9.1f} {row['ratio']:11.2f}x ({low:.2f} to {high:.2f})", flush=True)


def stages(encoded: list[bytes], paths: list[str]) -> dict[str, float]:
    """Milliseconds an image of each stage of ours, measured one by one: the median of many."""
    dataset = loading(paths, 0).dataset
    settings, source = dataset.members[0]
    bucket, key = buckets(settings)[0], np.zeros(3, np.int64)
    whole = [decode.sized(data, settings, bucket)[0] for data in encoded]
    out = np.zeros((3, SIDE, SIDE), np.uint8)

    def copy(i: int) -> None:
        out[:] = framed[i % len(framed)].numpy()

    framed = [decode.cut({"image": pixels}, settings, bucket, 0, key)[1]["image"] for pixels in whole]
    work: dict[str, Callable[[int], Any]] = {
        "read and check": lambda i: source.record(i % len(encoded)),
        "decode": lambda i: decode.sized(encoded[i % len(encoded)], settings, bucket)[0],
        "of which grey alone": lambda i: simplejpeg.decode_jpeg(encoded[i % len(encoded)], colorspace="GRAY"),
        "resize and crop": lambda i: decode.cut({"image": whole[i % len(whole)]}, settings, bucket, 0, key),
        "copy to the batch": copy,
    }
    found = {}
    for name, step in work.items():
        times = []
        for i in range(60):
            start = time.perf_counter()
            step(i)
            times.append(time.perf_counter() - start)
        found[name] = statistics.median(times) * 1e3
    return found


def resident_bytes() -> int:
    """Of this process and its children."""
    total, page = 0, os.sysconf("SC_PAGE_SIZE")
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for process in ["self", *children]:
        total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * page
    return total


def memory(folder: Path, samples: int, workers: int) -> dict[str, Any]:
    """Resident memory while `samples` small images pass through the loader."""
    encoded = [jpeg(natural(72, 96, seed)) for seed in range(200)]
    paths = write_shards(folder, encoded, repeats=10)
    batch = 50
    marks, start = [], time.perf_counter()
    with loading(paths, workers, side=64, batch=batch).updates(0) as updates:
        for number in range(1, samples // batch + 1):
            next(updates)
            if number * batch % (samples // 10) == 0:
                marks.append(resident_bytes() / 1e6)
    seconds = time.perf_counter() - start
    steps = [after - before for before, after in pairwise(marks)]
    return {
        "workers": workers,
        "samples": samples,
        "samples_per_second": samples / seconds,
        "resident_MB": [round(mark, 1) for mark in marks],
        "growth_after_a_tenth_MB": round(marks[-1] - marks[0], 1),
        "largest_step_MB": round(max(steps), 1),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=12)
    arguments.add_argument("--images", type=int, default=96, help="images of a variant in a round")
    arguments.add_argument("--parts", default="core,workers,stages,memory")
    arguments.add_argument("--samples", type=int, default=100_000, help="of the part `memory`")
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    parts, count = given.parts.split(","), max(1, given.images // BATCH)
    result: dict[str, Any] = {"torch": torch.__version__, "cores": os.cpu_count(), "batch": BATCH, "sizes": {}}
    with tempfile.TemporaryDirectory(prefix="daguerre-benchmark-") as scratch:
        for height, width in SIZES if set(parts) - {"memory"} else ():
            folder = Path(scratch) / f"{width}x{height}"
            folder.mkdir()
            encoded = [jpeg(natural(height, width, seed)) for seed in range(32)]
            paths = write_shards(folder, encoded, repeats=4)
            bits = statistics.mean(map(len, encoded)) * 8 / (height * width)
            entry: dict[str, Any] = {"bits_per_pixel": bits, "parity_levels": check_parity(encoded, paths)}
            title = f"{width}x{height}, {bits:.2f} bits a pixel, crops within {entry['parity_levels']:.2f} of 255"
            if "core" in parts:
                entry["core"] = summary(core_rounds(paths, given.rounds, count))
                show(f"{title}: one core", entry["core"])
            if "workers" in parts:
                entry["workers"] = summary(worker_rounds(paths, given.rounds, 2 * count))
                show(f"{title}: {WORKERS} workers", entry["workers"])
            if "stages" in parts:
                entry["stages_ms"] = stages(encoded, paths)
                print(f"\n{title}: milliseconds of an image")
                print("\n".join(f"{name:22} {ms:7.3f}" for name, ms in entry["stages_ms"].items()), flush=True)
            result["sizes"][f"{width}x{height}"] = entry
        if "memory" in parts:
            folder = Path(scratch) / "small"
            folder.mkdir()
            result["memory"] = [memory(folder, given.samples, workers) for workers in (0, WORKERS)]
            for row in result["memory"]:
                print(f"\nresident memory with {row['workers']} workers: {json.dumps(row)}", flush=True)
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
