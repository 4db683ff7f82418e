#!/usr/bin/env python3
"""Mutation testing: changes one operator, sign, number or argument of the source at a time and asks if a test notices.

    .venv/bin/python tools/mutate.py list                            # the number of possible mutations of each room
    .venv/bin/python tools/mutate.py run --seed 0 --out found.json   # draws some, tests them, prints the survivors
    .venv/bin/python tools/mutate.py run --only families/stable_diffusion/unet.py:57 --out found.json

Mutations are drawn by seed from all that exist, the same number from each room. Each is tested in a copy of the
repository: first by the test files that import the mutated module, then by those of its room, then (`--whole`) by all
quick tests; the first failure ends it. A survivor is a missing test, or a change that nobody can see (say why).
A run that is started again with the same `--out` goes on after the mutations that stand there.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "src/daguerre"
ROOMS = ["objectives", "samplers", "data/plan", "data/loading", "checkpoint", "training", "distributed", "adapters"]
ROOMS += ["models", "run", "storage", "generation"]
SECONDS = 900.0
"""The time limit of the tests of one mutation; a mutation that makes them hang is noticed, too."""

COMPARE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is not": "is", "is": "is not"}
COMPARE |= {"not in": "in", "in": "not in"}
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "//", "**": "*"}
LOGIC = {"and": "or", "or": "and"}
NAMES = {"min": "max", "max": "min", "floor": "ceil", "ceil": "floor", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutation:
    """One change of one file."""

    file: str
    """Below src/daguerre."""
    line: int
    start: int
    end: int
    """The bytes of the file that are replaced, and by what."""
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.old} -> {self.new}"


def mutations(file: str, source: str) -> list[Mutation]:
    """All mutations of a file, in the order of the file."""
    lines = [0]
    for text in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(text))
    raw = source.encode()

    def span(node: ast.expr) -> tuple[int, int]:
        last, column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        return lines[node.lineno - 1] + node.col_offset, lines[last - 1] + column

    def change(start: int, end: int, new: str) -> Mutation:
        line = raw[:start].count(b"\n") + 1
        return Mutation(file, line, start, end, raw[start:end].decode(), new)

    def between(left: ast.expr, right: ast.expr, table: dict[str, str]) -> Iterator[Mutation]:
        start, end = span(left)[1], span(right)[0]
        words = "|".join(sorted((re.escape(w).replace(r"\ ", r"\s+") for w in table), key=len, reverse=True))
        if found := re.search(words, raw[start:end].decode()):
            yield change(start + found.start(), start + found.end(), table[" ".join(found[0].split())])

    def of(node: ast.AST) -> Iterator[Mutation]:
        match node:
            case ast.Compare(left=left, comparators=rights):
                for one, two in zip([left, *rights], rights, strict=False):
                    yield from between(one, two, COMPARE)
            case ast.BinOp(left=left, right=right) if not isinstance(left, ast.Constant | ast.JoinedStr) or (
                isinstance(left, ast.Constant) and not isinstance(left.value, str)
            ):
                yield from between(left, right, ARITHMETIC)
            case ast.BoolOp(values=values):
                for one, two in pairwise(values):
                    yield from between(one, two, LOGIC)
            case ast.UnaryOp(op=ast.Not() | ast.USub() as sign):
                start = span(node)[0]
                yield change(start, start + len("not" if isinstance(sign, ast.Not) else "-"), "")
            case ast.Constant(value=bool(value)):
                yield change(*span(node), str(not value))
            case ast.Constant(value=int(value)):
                yield change(*span(node), str(value + 1))
            case ast.Call(
                func=func, args=[ast.Name() | ast.Attribute() as one, ast.Name() | ast.Attribute() as two, *_]
            ):
                (start, middle), (later, end) = span(one), span(two)
                swapped = raw[later:end] + raw[middle:later] + raw[start:middle]
                yield change(start, end, swapped.decode())
                yield from _renamed(func)
            case ast.Call(func=func):
                yield from _renamed(func)

    def _renamed(func: ast.expr) -> Iterator[Mutation]:
        if isinstance(func, ast.Name) and func.id in NAMES:
            yield change(*span(func), NAMES[func.id])

    found = [m for node in _meaningful(ast.parse(source)) for m in of(node)]
    return sorted(set(found), key=lambda m: (m.start, m.end, m.new))


def _meaningful(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree, without annotations, decorators, messages, and what only a type checker reads."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.JoinedStr | ast.Assert):
                yield from _meaningful(child)


def every_mutation(rooms: Iterable[str]) -> dict[str, list[Mutation]]:
    """All mutations of the files of each room, folders inside it too."""
    found: dict[str, list[Mutation]] = {}
    for room in rooms:
        files = sorted((ROOT / SOURCE / room).rglob("*.py"))
        found[room] = [
            m for path in files for m in mutations(path.relative_to(ROOT / SOURCE).as_posix(), path.read_text("utf-8"))
        ]
    return found


def draw(found: dict[str, list[Mutation]], seed: int, each: int) -> list[Mutation]:
    """The same number of mutations from each room, in an order that mixes the rooms."""
    rng = random.Random(seed)
    chosen = [rng.sample(every, min(each, len(every))) for _, every in sorted(found.items())]
    return [m for row in zip(*chosen, strict=False) for m in row]


def test_files(file: str, whole: bool) -> list[list[str]]:
    """The test files that may notice a change of `file`, in steps: its importers, its room, all."""
    module = "daguerre." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    package, _, name = module.rpartition(".")
    imports = re.compile(rf"^from {re.escape(module)} import|^from {re.escape(package)} import .*\b{name}\b", re.M)
    every = sorted((ROOT / "tests").rglob("test_*.py"))
    near = [path for path in every if imports.search(path.read_text("utf-8"))]
    room = [path for path in every if path.parent.name in file.split("/")[:-1] and path not in near]
    rest = [path for path in every if path not in near and path not in room] if whole else []
    return [[path.relative_to(ROOT).as_posix() for path in step] for step in (near, room, rest) if step]


@dataclass
class Copy:
    """A copy of the repository in which one mutation at a time is made."""

    folder: Path

    @staticmethod
    def make(folder: Path) -> Copy:
        """Copies what git tracks, and links the environment."""
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        return Copy(folder)

    def test(self, files: Sequence[str], seconds: float) -> str | None:
        """The first test that fails, "(time is up)", or None where all pass."""
        environment = os.environ | {"PYTHONPATH": str(self.folder / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not long", "-p", "no:cacheprovider", *files]
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return "(time is up)"
        if done.returncode in (0, 5):
            return None
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
        return failed[1] if failed else f"(pytest ended with {done.returncode})"

    def try_out(self, mutation: Mutation, whole: bool) -> str | None:
        """The test that notices the mutation, or None."""
        path = self.folder / SOURCE / mutation.file
        raw = path.read_bytes()
        path.write_bytes(raw[: mutation.start] + mutation.new.encode() + raw[mutation.end :])
        until = time.monotonic() + SECONDS
        try:
            for files in test_files(mutation.file, whole):
                if failed := self.test(files, max(until - time.monotonic(), 1)):
                    return failed
            return None
        finally:
            path.write_bytes(raw)


def run(chosen: Sequence[Mutation], out: Path, processes: int, whole: bool) -> int:
    """Tests the mutations, `processes` at a time, and notes each result in `out`. Counts the survivors."""
    results: dict[str, dict[str, object]] = json.loads(out.read_text()) if out.exists() else {}
    left = [m for m in chosen if str(m) not in results]
    lock = Lock()
    with tempfile.TemporaryDirectory(prefix="mutations-") as place, ThreadPoolExecutor(processes) as pool:
        free = [Copy.make(Path(place) / str(i)) for i in range(processes)]

        def one(mutation: Mutation) -> None:
            with lock:
                copy = free.pop()
            failed = copy.try_out(mutation, whole)
            with lock:
                free.append(copy)
                results[str(mutation)] = asdict(mutation) | {"noticed_by": failed}
                out.write_text(json.dumps(results, indent=1))
                print(f"{len(results)}/{len(chosen)}  {mutation}  {failed or 'SURVIVES'}", flush=True)

        list(pool.map(one, left))
    survivors = [name for name, result in results.items() if not result["noticed_by"]]
    print(f"{len(results) - len(survivors)} of {len(results)} mutations were noticed", *survivors, sep="\n")
    return len(survivors)


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["list", "run"])
    parser.add_argument("--rooms", nargs="+", default=ROOMS)
    parser.add_argument("--each", type=int, default=5, help="mutations a room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE:LINE", help="these lines' mutations instead")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--whole", action="store_true", help="ask all quick tests before a mutation has survived")
    parser.add_argument("--out", type=Path, default=Path("mutations.json"))
    given = parser.parse_args()
    found = every_mutation(given.rooms)
    if given.action == "list":
        for room, every in found.items():
            print(f"{len(every):6} {room}")
        return 0
    chosen = draw(found, given.seed, given.each)
    if given.only:
        every = [m for room in every_mutation([""]).values() for m in room]
        chosen = [m for m in every if f"{m.file}:{m.line}" in given.only]
    return 1 if run(chosen, given.out, given.processes, given.whole) else 0


if __name__ == "__main__":
    sys.exit(main())
