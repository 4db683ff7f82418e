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

    def __init__(self, kind: str, name: str, given: Mapping[str, Any]) -> None:
        self._kind, self._name, self._given = kind, name, given

    @pytest.fixture
    def kind(self) -> str:
        return self._kind

    @pytest.fixture
    def name(self) -> str:
        return self._name

    @pytest.fixture
    def given(self) -> Mapping[str, Any]:
        return self._given


def kept(kind: str, name: str, given: Mapping[str, Any]) -> bool:
    """True if a plug-in with these settings keeps the contract of its kind; pytest prints what it breaks."""
    own = _HERE / f"{kind}.py"
    file = own if own.exists() else _HERE / "settings.py"
    pytest.register_assert_rewrite(contract.__name__)
    words = [str(file), "-q", "-rs", "--tb=short", "--noconftest", f"--rootdir={_HERE}", "-c", os.devnull]
    words += ["-p", "no:cacheprovider", "-o", "python_classes=*Contract"]
    return pytest.main(words, plugins=[_Subject(kind, name, given)]) == pytest.ExitCode.OK
