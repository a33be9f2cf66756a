"""Work of several threads, with results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def thread_pool(threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads; at the end of the block, queued tasks are cancelled and threads joined."""
    pool = ThreadPoolExecutor(threads, name)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int
) -> Iterator[Result]:
    """Yield ``function`` of each item in order, at most ``threads + 1`` items ahead."""
    pending: deque[Future[Result]] = deque()
    with thread_pool(threads, "map-in-order") as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > threads + 1:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
