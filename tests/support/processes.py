"""`--processes N` for pytest: N forks of the process that has collected the tests run them, a file at a time each.

Every worker of pytest-xdist imports and collects all tests by itself, which is a tenth of a whole run; a fork has them.
Files are taken in the order in which they are collected, by whichever process is free.
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterator
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

NUMBER = struct.Struct("i")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, help="forks that run the tests, a file at a time each")


class Sender:
    """Tells the process that has forked this one of tests: the name of each that begins, and then its reports."""

    def __init__(self, config: pytest.Config, out: Connection) -> None:
        self.config, self.out = config, out

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.out.send(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.out.send(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs all tests, where more than one process is asked for."""
    count = session.config.getoption("processes")
    if count < 2 or session.config.option.collectonly or session.testsfailed:
        return None
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    queue, filled = os.pipe()  # of numbers of files; no two processes get the same
    os.write(filled, b"".join(map(NUMBER.pack, range(len(files)))))
    os.close(filled)
    folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    workers: dict[int, Connection] = {}
    try:
        for number in range(count):
            reads, writes = Pipe(duplex=False)
            if (pid := os.fork()) == 0:
                _work(session.config, files, queue, writes, folder / f"process-{number}")
            writes.close()
            workers[pid] = reads
        _follow(session, [*workers.values()])
    finally:
        os.close(queue)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return True


def _work(config: pytest.Config, files: list[list[pytest.Item]], queue: int, out: Connection, folder: Path) -> None:
    """Runs files until none is left; the process ends with it."""
    try:
        folder.mkdir()
        config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
        captures: Any = config.pluginmanager.getplugin("capturemanager")
        captures.stop_global_capturing()  # all forks would share its file
        captures.start_global_capturing()
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(Sender(config, out))
        items = _taken(files, queue)
        item = next(items, None)
        while item is not None:
            following = next(items, None)  # what is set up for both is kept
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        out.send(None)
    finally:
        os._exit(0)


def _taken(files: list[list[pytest.Item]], queue: int) -> Iterator[pytest.Item]:
    while number := os.read(queue, NUMBER.size):
        yield from files[NUMBER.unpack(number)[0]]


def _follow(session: pytest.Session, workers: list[Connection]) -> None:
    """Reports what forks send, until all have said that they are done. Session.Failed where one ends before, or where
    pytest is to stop."""
    hook, begun = session.config.hook, dict.fromkeys(workers, "the beginning")
    while workers:
        for out in wait(workers):
            assert isinstance(out, Connection)
            try:
                message = out.recv()
            except EOFError:
                message, session.shouldfail = None, f"a process of the tests ended by itself in {begun[out]}"
            if message is None:
                workers.remove(out)
            elif isinstance(message, str):
                begun[out] = message
            else:
                report = hook.pytest_report_from_serializable(config=session.config, data=message)
                hook.pytest_runtest_logreport(report=report)
            if stop := session.shouldfail or session.shouldstop:
                raise session.Failed(stop)
