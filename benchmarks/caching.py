"""Reading a cache of encoded images: samples a second of one process, in processor time, by what they pass through.

    python benchmarks/caching.py [--samples 4000] [--rounds 5]

The samples are random moments of SD at 512 px (4x64x64: mean float32, log variance float16, 98 kB) and, for `with
captions`, one of 200 captions' features (77x768 float16, 118 kB). They are read in random order from a warm disk:

    rows             `Rows.read` by key: one read, checked by its digest
    records          `CachedSource.record` and its features: the key is computed from facts, settings and frame
    batches          `Collator.collate` of 32: what a loader's worker does
    with captions    the same, captions' features among them
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from daguerre.data.cached import source
from daguerre.data.cached.rows import Rows, Writer
from daguerre.data.cached.samples import Fact
from daguerre.data.cached.source import CachedSource, image_key, text_key
from daguerre.data.dataset import Member, ReadRequest
from daguerre.data.images import decode
from daguerre.data.index.index import Index
from daguerre.data.loading.collate import Collator, Task
from daguerre.data.plan.buckets import Bucket
from daguerre.data.skipped import SkipReport
from daguerre.data.sources.folder import Settings
from daguerre.types import OF_IMAGES, OF_TEXTS

BATCH = 32
CAPTIONS = 200
BUCKET = Bucket(512, 512)
SHARD_BYTES = 256e6


class Listed:
    """The names and the index of samples that are nowhere but in the cache."""

    metric = None

    def __init__(self, count: int) -> None:
        sizes = np.full(count, 512, dtype=np.int32)
        self.index = Index(np.arange(count), np.array([0, count]), sizes, sizes)

    def name(self, number: int) -> str:
        return f"images/{number:06}.jpg"

    def report(self) -> SkipReport:
        return {}


def filled(folder: Path, count: int, settings: Settings) -> tuple[CachedSource, CachedSource, list[bytes]]:
    """A cache of random rows as a source, the same with captions' features, and the keys of its rows of images."""
    noise, keys, facts = np.random.default_rng(0), [], {}
    images, texts = Writer(str(folder / "images"), SHARD_BYTES), Writer(str(folder / "texts"), SHARD_BYTES)
    frame = decode.frames((512, 512), settings, BUCKET, 0, 0)[0]
    for number in range(count):
        facts[number] = Fact(noise.bytes(16), 512, 512, {"text": f"caption {number % CAPTIONS}"}, "")
        keys.append(image_key(facts[number].image, frame, settings))
        mean = noise.standard_normal((4, 64, 64), dtype=np.float32)
        images.add(keys[-1], {"mean": mean, "logvar": mean.astype(np.float16)})
    for number in range(CAPTIONS):
        features = noise.standard_normal((77, 768), dtype=np.float32).astype(np.float16)
        texts.add(text_key(f"caption {number}"), {"text": features})
    images.flush()
    texts.flush()
    table = folder / "table.index"
    listed = Listed(count)
    table.write_bytes(source.table(listed, listed.index, facts, "folder"))  # type: ignore[arg-type]
    told = {OF_IMAGES + "mean": ((4, 64, 64), "<f4"), OF_IMAGES + "logvar": ((4, 64, 64), "<f2")}
    both = told | {OF_TEXTS + "text": ((77, 768), "<f2")}
    of_images, of_texts = Rows.found(str(folder / "images")), Rows.found(str(folder / "texts"))
    alone = CachedSource(None, table, settings, of_images, None, (), (((512, 512), told),))
    return alone, CachedSource(None, table, settings, of_images, of_texts, (), (((512, 512), both),)), keys


def variants(folder: Path, count: int) -> dict[str, Callable[[], None]]:
    """Each reads all samples once, in an order of its own."""
    settings = Settings(path=str(folder), resolution=512, caption_dropout=0)
    alone, with_texts, keys = filled(folder, count, settings)
    order = np.random.default_rng(1).permutation(count)
    frame = decode.frames((512, 512), settings, BUCKET, 0, 0)[0]
    assert alone.images is not None
    held = alone.images

    def rows() -> None:
        for number in order.tolist():
            held.read(keys[number])

    def records() -> None:
        for number in order.tolist():
            record = alone.record(number)
            assert record.features is not None
            record.features.of(frame, record.texts["text"])

    def batches(of: CachedSource) -> Callable[[], None]:
        collator = Collator((Member(settings, of),), 0)  # type: ignore[arg-type]

        def read() -> None:
            for start in range(0, count - BATCH + 1, BATCH):
                numbers = order[start : start + BATCH]
                sample_keys = np.stack([numbers, numbers * 0, numbers * 0], axis=1)
                batch, failures = collator.collate(Task(ReadRequest(numbers * 0, numbers, sample_keys), BUCKET))
                assert not failures
                assert len(batch.features[OF_IMAGES + "mean"]) == BATCH

        return read

    return {"rows": rows, "records": records, "batches": batches(alone), "with captions": batches(with_texts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = variants(Path(folder), given.samples)
        taken: dict[str, list[float]] = {name: [] for name in found}
        clock: dict[str, list[float]] = {name: [] for name in found}
        for number in range(given.rounds + 1):  # the first warms the disk
            for name, read in found.items():
                began, ticked = time.process_time(), time.perf_counter()
                read()
                if number:
                    taken[name].append(time.process_time() - began)
                    clock[name].append(time.perf_counter() - ticked)
    for name, seconds in taken.items():
        rates = sorted(given.samples / one for one in seconds)
        print(
            f"{name:14} {statistics.median(rates):8,.0f} samples/s a core ({rates[0]:,.0f} to {rates[-1]:,.0f}); "
            f"by the clock {given.samples / statistics.median(clock[name]):,.0f}"
        )
    print(json.dumps({"samples": given.samples, "seconds": taken, "clock": clock}))


if __name__ == "__main__":
    main()
