"""Asserts that something is refused, by what stays when messages are reworded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from daguerre.errors import Code, UserError


@contextmanager
def refused(code: Code, setting: str | None = None, *words: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expects a UserError with this code, for this setting, whose message has these words: names and numbers, no prose.

    Args:
        setting: the dotted path of the setting to change; None if the error names none or more than one.
    """
    with pytest.raises(UserError) as caught:
        yield caught
    error = caught.value
    assert (error.code, error.setting) == (code, setting), f"{error.code}, {error.setting}: {error}"
    assert not [word for word in words if word not in str(error)], str(error)
