"""How long pages of large runs take, what they hold, and whether others get their answers meanwhile.

    python benchmarks/pages.py FOLDER [--runs 100] [--lines 100000] [--opened 100] [--looked 100]

Writes so many runs with so many logged lines each below FOLDER (56 MB a run, unless they are there), starts
`daguerre serve` with an empty cache, and opens the list and runs one after the other, the first of them in Chromium and
those after `--looked` without it (page and curves, once they are read), then all again with a new server. Printed:
processor time of the server and time on the clock, memory of both, how long another question waits meanwhile, and the
bytes that the server reads when a running file grows by a line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))
import browser
import fake_run

from daguerre.serve.catalog import identity
from daguerre.threads import background

PORT = 8817
HERE = f"http://127.0.0.1:{PORT}/"
CURVES = "document.querySelectorAll('.u-over').length > 5 && document.querySelector('.reading').hidden"


def write(folder: Path, runs: int, lines: int) -> None:
    """The runs, of one that is written and copied; each begins with a line of its own."""
    first = folder / "run-000"
    if not first.exists():
        fake_run.write_run(first, steps=100, saves=1)
        dice = random.Random(0)
        names = [f"learning/loss_level_{i}" for i in range(4)] + ["learning/loss", "learning/gradient_norm"]
        names += ["learning/current_learning_rate", "perf/step_time_seconds", "perf/samples_per_second"]
        names += ["perf/data_wait_seconds", "memory/peak_bytes"]
        with (first / "metrics" / "metrics.jsonl").open("w") as file:
            for step in range(1, lines + 1):
                line = {"step": step, "samples": 32 * step, "time": "2026-11-21T04:00:00+00:00"}
                file.write(json.dumps(line | {name: dice.random() for name in names}) + "\n")
    for number in range(1, runs):
        copy = folder / f"run-{number:03d}"
        if not copy.exists():
            shutil.copytree(first, copy)


@contextmanager
def served(folder: Path, cache: Path) -> Iterator[int]:
    """A server; its process id."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "daguerre", "serve", str(folder), "--port", str(PORT)]
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
    try:
        while not answered("static/style.css"):
            assert process.poll() is None
            time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        process.wait(60)


def answered(path: str) -> bool:
    try:
        build_opener(ProxyHandler({})).open(HERE + path, timeout=1200).read()
    except OSError:
        return False
    return True


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status(pid: int, name: str, file: str = "status") -> int:
    """A number of /proc/PID/FILE."""
    line = next(line for line in Path(f"/proc/{pid}/{file}").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


@contextmanager
def asking(waits: list[float]) -> Iterator[None]:
    """Asks for a file of the page ten times a second, and notes how long each answer takes."""

    def work(over: threading.Event) -> None:
        while not over.wait(0.1):
            began = time.monotonic()
            answered("static/style.css")
            waits.append(time.monotonic() - began)

    with background("asking", work):
        yield


def told(what: str, values: list[float], unit: str) -> None:
    middle, most = statistics.median(values), max(values)
    print(f"{what}: median {middle:.3g} {unit}, at most {most:.3g} ({len(values)})", flush=True)


def opened(page: browser.Page, pid: int, address: str, ready: str) -> tuple[float, float, bool]:
    """Seconds of the server's processor and on the clock until a page is whole, and whether it said how far it was."""
    began, used = time.monotonic(), processor_seconds(pid)
    page.go(HERE + address)
    said = page.evaluate("!document.querySelector('.reading')?.hidden")
    page.wait(ready)
    return processor_seconds(pid) - used, time.monotonic() - began, said


def fetched(pid: int, run: str) -> tuple[float, float]:
    """Seconds of the server's processor and on the clock until a page and its whole curves are there."""
    began, used = time.monotonic(), processor_seconds(pid)
    for path in (f"run/{run}/", f"compare.json?run={run}", f"run/{run}/curves"):  # the second waits until all is read
        assert answered(path), path
    return processor_seconds(pid) - used, time.monotonic() - began


def heap_mb(page: browser.Page) -> float:
    """Memory of the page's JavaScript after a collection, by Chromium's protocol."""
    page.send("HeapProfiler.collectGarbage")
    return page.send("Runtime.getHeapUsage")["usedSize"] / 1e6


def walk(folder: Path, cache: Path, count: int, looked: int, chromium: browser.Browser, what: str) -> None:
    names = [f"run-{number:03d}" for number in range(count)]
    with served(folder, cache) as pid:
        page, rows = chromium.page(), len(list(folder.glob("run-*")))
        used, clock, _ = opened(page, pid, "", f"document.querySelectorAll('.runs article').length === {rows}")
        print(f"{what}, list of {rows}: {used:.2f} s of processor, {clock:.2f} s, {heap_mb(page):.1f} MB of heap")
        seconds, clocks, heaps, waits, said = list[float](), list[float](), list[float](), list[float](), 0
        for name in names[:looked]:
            with asking(waits):
                used, clock, told_how_far = opened(page, pid, f"run/{identity(folder / name, folder)}/", CURVES)
            seconds.append(used)
            clocks.append(clock)
            heaps.append(heap_mb(page))
            said += told_how_far
        for name in names[looked:]:
            with asking(waits):
                used, clock = fetched(pid, identity(folder / name, folder))
            seconds.append(used)
            clocks.append(clock)
        told(f"{what}, a run: processor", seconds, "s")
        told(f"{what}, a run: clock", clocks, "s")
        told(f"{what}, heap", heaps, "MB")
        told(f"{what}, another question meanwhile", waits or [0.0], "s")
        print(f"{what}: {said} of {looked} said how far they were read")
        print(f"{what}: the server holds {status(pid, 'VmRSS') / 1e3:.0f} MB", flush=True)
        grow(page, pid, folder / names[looked - 1])
        page.close()


def grow(page: browser.Page, pid: int, run: Path) -> None:
    """The bytes that the server reads for one more line of a run that is open."""
    time.sleep(5)
    before, path = status(pid, "rchar", "io"), run / "metrics" / "metrics.jsonl"
    last = json.loads(path.read_bytes().splitlines()[-1])
    with path.open("a") as file:
        file.write(json.dumps({**last, "step": last["step"] + 1}) + "\n")
    page.wait(f"document.querySelector('[data-part=head]').textContent.includes('{last['step'] + 1:,}')")
    read = status(pid, "rchar", "io") - before
    print(f"one more line: {read / 1e3:.0f} kB read, of a file of {path.stat().st_size / 1e6:.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--opened", type=int, default=100)
    parser.add_argument("--looked", type=int, default=100)
    given = parser.parse_args()
    browser.SECONDS = 1800.0  # other programs may have the processor
    folder = given.folder.resolve() / "runs"
    write(folder, given.runs, given.lines)
    with browser.opened(given.folder / "profile") as chromium:
        shutil.rmtree(given.folder / "cache", ignore_errors=True)
        for what in ("first", "again"):
            count = min(given.runs, given.opened)
            walk(folder, given.folder / "cache", count, min(count, given.looked), chromium, what)


if __name__ == "__main__":
    main()
