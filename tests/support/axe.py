"""axe-core in a page that Chromium shows: what of it some people cannot read or use.

The script comes with the wheel axe-playwright-python; nothing else of it is used.
"""

from __future__ import annotations

import json
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from browser import Page

_SPEC = find_spec("axe_playwright_python")
needed = pytest.mark.skipif(_SPEC is None and not os.environ.get("CI"), reason="needs axe-playwright-python")
_SERIOUS = ("serious", "critical")


@cache
def _script() -> str:
    assert _SPEC is not None, "axe-playwright-python is not installed"
    assert _SPEC.origin is not None
    return Path(_SPEC.origin).with_name("axe.min.js").read_text(encoding="utf-8")


def serious(page: Page) -> list[Any]:
    """The serious findings: rule, where, the element and why."""
    page.evaluate(f"{_script()};0")
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']}).then((r) => JSON.stringify(r.violations))")
    return [
        (one["id"], node["target"], node["html"][:200], node["failureSummary"])
        for one in json.loads(found)
        for node in one["nodes"]
        if one["impact"] in _SERIOUS
    ]
