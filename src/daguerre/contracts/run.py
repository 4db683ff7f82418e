"""A contract run on one plug-in by pytest."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from daguerre.contracts import contract

_HERE = Path(__file__).parent


class _Subject:
    """The fixtures that the tests of a contract are given, as a plug-in of pytest."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        self._name, self._given = name, given

    @pytest.fixture
    def name(self) -> str:
        return self._name

    @pytest.fixture
    def given(self) -> Mapping[str, Any]:
        return self._given


def kept(kind: str, name: str, given: Mapping[str, Any]) -> bool:
    """True if a plug-in with these settings keeps the contract of its kind; pytest prints what it breaks."""
    pytest.register_assert_rewrite(contract.__name__)
    # Garbage that is left is looked for over and over, which takes seconds in a process with torch.
    words = [str(_HERE / f"{kind}.py"), "-q", "-rs", "--tb=short", "--noconftest", "-p", "no:unraisableexception"]
    words += [f"--rootdir={_HERE}", "-c", os.devnull, "-p", "no:cacheprovider", "-o", "python_classes=*Contract"]
    return pytest.main(words, plugins=[_Subject(name, given)]) == pytest.ExitCode.OK
