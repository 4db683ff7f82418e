"""Captions: the record's text, dropped for a set share of keys."""

import numpy as np
import pytest

from daguerre.data import captions
from daguerre.data.settings import SourceSettings
from daguerre.types import Record

RECORD = Record("a", b"", {"text": "a cat"})


def chosen(dropout, epoch=0, seed=0):
    settings = SourceSettings(source="test", caption_dropout=dropout)
    return [captions.choose(RECORD, settings, seed, np.array([i, epoch, 0])) for i in range(1000)]


@pytest.mark.parametrize(("dropout", "low", "high"), [(0.0, 0, 0), (1.0, 1000, 1000), (0.1, 70, 130), (0.5, 450, 550)])
def test_the_share_of_dropped_captions(dropout, low, high):
    drawn = chosen(dropout)
    assert low <= drawn.count("") <= high
    assert drawn.count("") + drawn.count("a cat") == 1000


def test_which_are_dropped_is_a_matter_of_the_key():
    assert chosen(0.5) == chosen(0.5)
    assert chosen(0.5) != chosen(0.5, epoch=1)
    assert chosen(0.5) != chosen(0.5, seed=1)
