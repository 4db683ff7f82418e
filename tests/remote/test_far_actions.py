"""Actions that are asked of a run in a bucket: brought to its working folder once, answered where they were asked."""

from __future__ import annotations

import pytest
from buckets import in_memory

from daguerre.checkpoint.actions import MOST_BYTES, Inbox
from daguerre.checkpoint.run_dir import RunFolder
from daguerre.errors import UserError
from daguerre.remote import actions, lock
from daguerre.remote.mirror import Mirror
from daguerre.storage.bucket import prefix

RUN = "gs://bucket/runs/mine"


@pytest.fixture(autouse=True)
def stores(monkeypatch):
    return in_memory(monkeypatch)


def test_an_action_goes_there_and_its_answer_back(tmp_path):
    far, told = prefix(RUN), []
    with pytest.raises(UserError, match="is not being trained now"):
        actions.ask(RUN, "save")
    own = lock.Lock(far, told.append)
    with own.held():
        folder = RunFolder(tmp_path)
        inbox, mirror = Inbox(folder, own.own, told.append), Mirror(far, folder, told.append)
        ident, back = actions.ask(RUN, "sample", {"seed": 3}), actions.ask(RUN, "stop")
        assert actions.withdraw(RUN, back)
        assert not actions.withdraw(RUN, back)
        far.write("actions/notes.json", b"not ours")
        far.write(f"actions/{ident[:-1]}x.json", b" " * (MOST_BYTES + 1))
        actions.fetch(far, folder)
        assert far.listing("actions/") == []
        mirror.flush()  # nothing that is asked goes back into the store
        assert far.listing("actions/") == []
        (asked,) = inbox.take()
        assert (asked.ident, asked.action.values) == (ident, {"seed": 3})
        assert actions.answer(RUN, ident) is None
        inbox.answer(asked, True, "8 images", 12)
        mirror.flush()
        found = actions.answer(RUN, ident)
        assert (found.state, found.reason, found.step) == ("done", "8 images", 12)
        assert actions.wait(RUN, ident, 1) == found
    assert told == []
