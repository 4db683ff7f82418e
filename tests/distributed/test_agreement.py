"""Meetings over a store, with threads for ranks. Agreement over a group: test_start.py."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from daguerre.distributed.rank0 import Agreement, Meeting, RanksMissing, StopRequested
from daguerre.errors import LOST


def test_all_come():
    store = dist.HashStore()
    with ThreadPoolExecutor(4) as threads:
        for what in ("start", "end"):
            meetings = [Meeting(store, rank, 4, lambda: 0) for rank in range(4)]
            list(threads.map(lambda meeting, what=what: meeting.all_here(what, 30), meetings))


def test_who_does_not_come_is_named():
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(Meeting(store, rank, 6, lambda: 0).all_here, "save", 0.3) for rank in (0, 2, 3)]
        for one in waiting:
            with pytest.raises(
                RanksMissing, match=r"ranks 1, 4-5 of 6 did not connect within 0\.3 s \(save\)"
            ) as missing:
                one.result()
            assert missing.value.exit_code == LOST


def test_a_signal_ends_a_wait_that_it_may_end():
    with pytest.raises(StopRequested, match=r"asked to stop while waiting for rank 1 \(start\)") as told:
        Meeting(dist.HashStore(), 0, 2, lambda: 143).all_here("start", 30, stoppable=True)
    assert told.value.exit_code == 143
    with pytest.raises(RanksMissing):
        Meeting(dist.HashStore(), 0, 2, lambda: 143).all_here("save", 0.1)


def test_one_process_agrees_with_itself():
    alone = Agreement(None)
    assert alone.signalled(None) is None
    assert alone.signalled(signal.SIGUSR1) == signal.SIGUSR1
    assert alone.total(3) == 3
    assert alone.run_on_rank0(lambda: (1, 2)) == [1, 2]
    assert alone.gather((1, 2)) == [[1, 2]]
    assert alone.share({"a": 1}) == {"a": 1}
