"""What every data source promises, over all files of data/sources."""

import json
import pickle
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from daguerre import plugins
from daguerre.data.settings import SourceSettings
from daguerre.data.source import Split, fingerprint
from daguerre.types import Record

SPLITS: tuple[Split, Split] = ("train", "held_out")
LOOKED_AT = 16
"""Records of a source that are looked at; an endless one has no last."""


@pytest.fixture(params=plugins.names("sources"))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def opened(name: str, pictures: Path):
    """Opens a split of the source with the least settings that it takes; a new source starts with none."""
    least = {"folder": {"path": str(pictures), "resolution": 32}}.get(name, {})
    module = plugins.find("sources", name)
    return lambda split: module.open_source(module.Settings(**least), split)


def indexes(source) -> range:
    return range(LOOKED_AT if source.count is None else min(source.count, LOOKED_AT))


def content(record: Record) -> list[object]:
    values = [getattr(record, field.name) for field in fields(record)]
    return [value.tobytes() if isinstance(value, np.ndarray) else value for value in values]


def test_settings_start_from_the_shared_ones_and_name_their_file(name):
    settings = plugins.find("sources", name).Settings
    assert issubclass(settings, SourceSettings)
    assert settings.model_fields["source"].default == name


def test_both_splits_hold_something(opened):
    assert all(indexes(opened(split)) for split in SPLITS)


@pytest.mark.parametrize("split", SPLITS)
def test_a_record_is_a_picture_with_a_caption(opened, split):
    source = opened(split)
    for index in indexes(source):
        record = source.record(index)
        assert record.key
        assert record.texts["text"].strip()
        if not isinstance(record.image, bytes):
            assert record.image.dtype == np.uint8
            assert record.image.ndim == 3
            assert record.image.shape[2] == 3


@pytest.mark.parametrize("split", SPLITS)
def test_an_index_gives_the_same_record_for_ever(opened, split):
    first = opened(split)
    again, sent = opened(split), pickle.loads(pickle.dumps(first))  # noqa: S301 - as it goes to a worker
    for index in reversed(indexes(first)):
        expected = content(first.record(index))
        assert content(again.record(index)) == expected
        assert content(sent.record(index)) == expected
        assert again.sample_id(index) == sent.sample_id(index) == first.sample_id(index)
    assert fingerprint(again) == fingerprint(first)


def test_ids_are_unlike_within_and_across_the_splits(opened):
    ids = [source.sample_id(i) for source in map(opened, SPLITS) for i in indexes(source)]
    assert len(set(ids)) == len(ids)
    assert all(type(i) is int and 0 <= i < 2**63 for i in ids)


def test_the_report_is_counts_by_reason(opened):
    for source in map(opened, SPLITS):
        report = source.report()
        assert json.loads(json.dumps(report)) == report
        for entry in report.values():
            assert entry["count"] >= 1
            assert 1 <= len(entry["examples"]) <= entry["count"]


def test_the_metric_is_one_that_exists(opened):
    metric = opened("held_out").metric
    assert metric is None or metric in plugins.names("metrics")


def test_no_source_imports_torch():
    code = (
        "import sys; from daguerre import plugins\n"
        "for name in plugins.names('sources'): plugins.find('sources', name).Settings\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
