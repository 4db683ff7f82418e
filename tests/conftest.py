"""Fixtures that several folders of tests share."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import few_samples
import pytest

from daguerre import credentials

pytest.register_assert_rewrite("daguerre.contracts")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if find_spec("triton"):  # decides when it is first imported whether its own functions are interpreted (tests/kernels)
    with pytest.MonkeyPatch.context() as at_import:
        at_import.setenv("TRITON_INTERPRET", "1")
        import_module("triton.language")


gc.disable()  # while modules are imported there is no garbage worth looking for


def pytest_collection_finish() -> None:
    """Keep the garbage collector from going over all that is loaded: tests of memory that runs out call it often. By
    itself it looks seldom, too: what networks and libraries are made of is many small objects, and no garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 50)
    gc.enable()


LONGEST_FIRST = ("run/", "test_", "cli/", "parity/", "storage/")
"""Folders, and files beside them, that take the longest: what is begun last must not keep one process alone."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files for `--dist loadfile --no-loadscope-reorder`, which hands them out as they are collected."""
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        name = item.path.relative_to(here).as_posix()
        return next((i for i, start in enumerate(LONGEST_FIRST) if name.startswith(start)), len(LONGEST_FIRST))

    items.sort(key=place)


@pytest.fixture(scope="module")
def few_objects() -> None:
    """For tests of what collects garbage each time: all that earlier tests have loaded is none."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_credentials() -> Iterator[None]:
    """Secrets that a test gave are not taken for secrets in the messages of the next."""
    yield
    credentials._kept.clear()
    credentials._of_environment.cache_clear()


@pytest.fixture(autouse=True)
def own_precision() -> Iterator[None]:
    """A run sets how products in float32 are rounded, for its whole process: the next test has them exact again."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_float32_matmul_precision("highest")


@pytest.fixture(autouse=True)
def few_samples_are_looked_at() -> Iterator[None]:
    """Before the first update of a run: all would be a quarter of a short one."""
    with pytest.MonkeyPatch.context() as patch:
        few_samples.look_at_few(patch.setattr)
        yield


@pytest.fixture(scope="session")
def tiny_sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete Stable Diffusion folder with tiny random networks; read it, never write into it."""
    from tiny_models import tiny_sd_folder

    return tiny_sd_folder(tmp_path_factory.mktemp("tiny_sd"))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Indexes and far shards of tests are kept away from the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
