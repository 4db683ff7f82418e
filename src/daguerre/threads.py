"""Threads that work while a block runs, and things that the threads of a process share. No torch here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import Event, RLock, Thread
from typing import Any, Generic, TypeVar

Made = TypeVar("Made")


class Once(Generic[Made]):
    """A function whose last results are kept, as by `lru_cache`; but where two threads ask for one at once, that makes
    it twice, and here the second waits. For what is dear, or may not be made by two threads at once, as a network."""

    def __init__(self, function: Callable[..., Made], maxsize: int) -> None:
        self._kept, self._lock = lru_cache(maxsize)(function), RLock()

    def __call__(self, *given: Any) -> Made:
        with self._lock:
            return self._kept(*given)

    def cache_clear(self) -> None:
        """Forgets all results."""
        with self._lock:
            self._kept.cache_clear()


@contextmanager
def background(name: str, work: Callable[[Event], None]) -> Iterator[None]:
    """Does `work` in a thread of that name while the block runs. At its end the event that `work` got is set, and the
    thread is waited for."""
    over = Event()
    thread = Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def made_once(maxsize: int) -> Callable[[Callable[..., Made]], Once[Made]]:
    """Decorates a function as `Once`, of which the last `maxsize` results are kept."""
    return lambda function: Once(function, maxsize)
