"""The contract of every data source: records by number, the same for ever, in any process."""

import io
import json
from dataclasses import fields
from multiprocessing.reduction import ForkingPickler  # as a source goes to a worker
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from daguerre import plugins
from daguerre.contracts import contract
from daguerre.data.settings import SourceSettings
from daguerre.data.source import RemoteSource, Split
from daguerre.types import IMAGE, Record

SPLITS: tuple[Split, Split] = ("train", "held_out")
LOOKED_AT = 16
"""Records of a source that are looked at; an endless one has no last."""


def numbers(source: Any) -> range:
    return range(LOOKED_AT if source.index is None else min(source.index.count, LOOKED_AT))


def content(record: Record) -> list[object]:
    values = [getattr(record, field.name) for field in fields(record)]
    images = {n: one.tobytes() if isinstance(one, np.ndarray) else one for n, one in record.images.items()}
    return [images if value is record.images else value for value in values]


def size(record: Record) -> tuple[int, int]:
    """Height and width of a record's image."""
    if IMAGE in record.sizes:
        return record.sizes[IMAGE]
    image = record.image
    return Image.open(io.BytesIO(image)).size[::-1] if isinstance(image, bytes) else image.shape[:2]


class SourceContract(contract.SettingsContract):
    """A source's promises."""

    kind = "sources"
    start = SourceSettings

    @pytest.fixture
    def opened(self, plugin: Any, given: Any) -> Any:
        """Opens a split of the source."""
        settings = plugin.Settings(**given)

        def source(split: Split) -> Any:
            found = plugin.open_source(settings, split)
            assert settings.endless == (found.index is None)
            return found

        return source

    def test_both_splits_hold_something(self, opened: Any) -> None:
        assert all(numbers(opened(split)) for split in SPLITS)

    @pytest.mark.parametrize("split", SPLITS)
    def test_a_record_is_an_image_with_a_caption(self, opened: Any, split: Any) -> None:
        source = opened(split)
        for number in numbers(source):
            record = source.record(number)
            assert record.key
            assert record.texts["text"].strip()
            if record.features is not None:
                assert min(record.sizes[IMAGE]) > 0
                assert not record.images
            elif not isinstance(record.image, bytes):
                assert record.image.dtype == np.uint8
                assert record.image.ndim == 3
                assert record.image.shape[2] == 3

    @pytest.mark.parametrize("split", SPLITS)
    def test_a_number_gives_the_same_record_for_ever(self, opened: Any, split: Any) -> None:
        first = opened(split)
        again, sent = opened(split), ForkingPickler.loads(ForkingPickler.dumps(first))
        for number in reversed(numbers(first)):
            expected = content(first.record(number))
            assert content(again.record(number)) == expected
            assert content(sent.record(number)) == expected
            assert again.sample_id(number) == sent.sample_id(number) == first.sample_id(number)
            assert again.name(number) == sent.name(number) == first.name(number)

    def test_the_name_is_the_records_key_and_no_other_has_it(self, opened: Any) -> None:
        for split in SPLITS:
            source = opened(split)
            names = [source.name(number) for number in numbers(source)]
            assert names == [source.record(number).key for number in numbers(source)]
            assert len(set(names)) == len(names)

    def test_ids_are_unlike_each_other(self, opened: Any) -> None:
        """Of an endless source within and across the splits; a finite one has the same samples in both."""
        sources = [opened(split) for split in SPLITS]
        if sources[0].index is not None:
            sources = sources[:1]
        ids = [source.sample_id(i) for source in sources for i in numbers(source)]
        assert len(set(ids)) == len(ids)
        assert all(type(i) is int and 0 <= i < 2**63 for i in ids)

    def test_the_index_is_of_all_samples_whatever_the_split(self, opened: Any) -> None:
        train, held_out = (opened(split) for split in SPLITS)
        if train.index is None:
            assert held_out.index is None
            return
        index = train.index
        assert index.ids[:].tolist() == held_out.index.ids[:].tolist()
        assert index.ids[:].tolist() == [train.sample_id(i) for i in range(index.count)]
        assert index.ids[:].dtype == np.int64
        assert index.shard_starts[0] == 0
        assert index.shard_starts[-1] == index.count
        assert (np.diff(index.shard_starts) > 0).all()
        for sizes in (index.heights_px[:], index.widths_px[:]):
            assert sizes.dtype == np.int32
            assert len(sizes) == index.count
        shapes = {size(train.record(i)) for i in range(index.count)}
        assert shapes == set(zip(index.heights_px[:].tolist(), index.widths_px[:].tolist(), strict=True))
        for columns, kind in ((index.numbers, pa.float64()), (index.texts, pa.string())):
            for column in (columns[name] for name in columns):
                assert len(column) == index.count
                assert column.type == kind

    def test_told_what_is_read_it_gives_the_same_records(self, opened: Any) -> None:
        source = opened("train")
        if not isinstance(source, RemoteSource):
            return
        assert source.index is not None
        for share in (0.01, 1.0):
            hinted = source.reading(np.full(source.index.shard_starts.size - 1, share))
            for number in numbers(source):
                assert content(hinted.record(number)) == content(source.record(number))

    def test_what_is_near_has_nothing_to_fetch(self, opened: Any) -> None:
        source = opened("train")
        if not isinstance(source, RemoteSource):
            return
        assert source.is_remote is False
        files = len(source.files.sizes_bytes)
        assert [source.prefetch(file) for file in range(files)] == [0] * files

    def test_a_source_is_small_when_it_travels(self, opened: Any) -> None:
        """Paths, not samples: its index stays where it is, even after it was read."""
        source = opened("train")
        before = len(ForkingPickler.dumps(source))
        assert source.index is None or source.index.count
        source.record(0)
        assert len(ForkingPickler.dumps(source)) == before < 4096

    def test_the_report_is_counts_by_reason(self, opened: Any) -> None:
        for source in map(opened, SPLITS):
            report = source.report()
            assert json.loads(json.dumps(report)) == report
            for entry in report.values():
                assert entry["count"] >= 1
                assert 1 <= len(entry["examples"]) <= entry["count"]

    def test_the_metric_is_one_that_exists(self, opened: Any) -> None:
        metric = opened("held_out").metric
        assert metric is None or metric in plugins.names("metrics")
