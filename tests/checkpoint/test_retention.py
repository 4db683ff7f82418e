"""The newest verified ones and the backups stay, whatever is damaged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import save
from whole_store import WholeStore

from daguerre.checkpoint.retention import RetentionPolicy


def always(_):
    return True


@pytest.mark.parametrize(
    ("keep", "numbers", "gone"),
    [
        (RetentionPolicy(2), [], []),
        (RetentionPolicy(2), [5], []),
        (RetentionPolicy(2), [5, 10], []),
        (RetentionPolicy(2), [5, 10, 15], [5]),
        (RetentionPolicy(3), [5, 10, 15, 20, 25], [10, 5]),
        (RetentionPolicy(2, lambda step: step // 20), [10, 20, 30, 40, 50, 60], [30, 10]),
        (RetentionPolicy(2, lambda step: step // 1000), [300, 600, 900, 1200, 1500, 1800, 2100], [1500, 900, 600, 300]),
        (RetentionPolicy(2, lambda step: step // 1), [0, 1, 2, 3, 4], [0]),
    ],
)
def test_what_goes(keep, numbers, gone):
    assert keep.deletable(numbers, always) == gone


def test_the_same_backups_stay_whenever_one_looks():
    """Saves one after another: a backup is a backup from its first day on."""
    keep, there, backups = RetentionPolicy(2, lambda step: step // 1000), [], {}
    for number in range(300, 12000, 300):
        there.append(number)
        for gone in keep.deletable(there, always):
            there.remove(gone)
        for backup in keep.backups(there):
            assert backups.setdefault(backup // 1000, backup) == backup
    assert sorted(backups.values()) == [1200, 2100, 3000, 4200, 5100, 6000, 7200, 8100, 9000, 10200, 11100]
    assert there == [*sorted(backups.values()), 11400, 11700]


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)), st.integers(2, 5), st.none() | st.integers(1, 20))
def test_two_sound_ones_and_the_newest_stay(numbers, damaged, newest, every):
    keep, asked = RetentionPolicy(newest, every and (lambda step: step // every)), []

    def sound(number):
        asked.append(number)
        return number not in damaged

    gone = keep.deletable(sorted(numbers), sound)
    left = numbers - set(gone)
    good = sorted(numbers - damaged)
    assert set(good[-newest:]) <= left
    assert keep.backups(sorted(numbers)) <= left
    assert not set(gone) & set(asked), "none that was looked at goes"
    assert max(numbers, default=None) == max(left, default=None)


@pytest.mark.parametrize(("wrong", "message"), [({"newest": 1}, "at least 2 are kept")])
def test_too_little_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        RetentionPolicy(**wrong)


def test_a_store_keeps_backups(tmp_path):
    store = WholeStore(tmp_path / "checkpoints")
    for number in range(1, 8):
        save(store, number)
        assert store.purge(RetentionPolicy(2, lambda step: step // 3)) == []
    assert [int(name[-8:]) for name in store.names()] == [3, 6, 7]
