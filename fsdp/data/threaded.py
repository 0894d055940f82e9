"""A call for each of very many items, by several threads, with results in the items' order.

Reading a file's ends waits for the file system, and numpy holds no lock meanwhile. The results of a bounded
number of items are held at a time: those of all of 100,000 token files, 16 KiB each, took 1.8 GiB. Items are
given out several at a time: one at a time, handing them over took longer than reading a small local file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

THREADS = 16
TOGETHER = 16
"""Items that a thread takes at a time, of many."""
Item = TypeVar("Item")
Made = TypeVar("Made")


def threaded(call: Callable[[Item], Made], items: Sequence[Item]) -> Generator[Made, None, None]:
    """Raises the error of the first item in order that fails."""
    size = max(1, min(TOGETHER, len(items) // THREADS))
    parts = (items[start : start + size] for start in range(0, len(items), size))
    with ThreadPoolExecutor(THREADS) as pool:
        begun = deque(pool.submit(_each, call, part) for part in islice(parts, 2 * THREADS))
        try:
            while begun:
                made = begun.popleft().result()
                begun.extend(pool.submit(_each, call, part) for part in islice(parts, 1))
                yield from made
        finally:
            pool.shutdown(cancel_futures=True)


def _each(call: Callable[[Item], Made], items: Sequence[Item]) -> list[Made]:
    return [call(item) for item in items]
