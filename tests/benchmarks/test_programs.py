"""Programs that no test runs as a whole: what they import is there."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path for folder in ("benchmarks", "tools") for path in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_a_program_imports_of_the_package_is_there(program):
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "daguerre":
            module = importlib.import_module(node.module)
            for each in node.names:
                assert hasattr(module, each.name) or importlib.import_module(f"{node.module}.{each.name}")
