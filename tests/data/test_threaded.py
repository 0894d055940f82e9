import itertools
import threading

import pytest

from fsdp.data.threaded import THREADS, TOGETHER, threaded


@pytest.mark.parametrize("count", [0, 1, THREADS + 1, 10_007])
def test_results_are_in_the_order_of_the_items(count: int) -> None:
    assert list(threaded(lambda n: n * n, range(count))) == [n * n for n in range(count)]


def test_the_results_of_a_bounded_number_of_items_are_held() -> None:
    made = itertools.count()
    results = threaded(lambda n: next(made), range(100_000))
    next(results)
    results.close()
    # Those asked for at first, and one part more.
    assert next(made) <= (2 * THREADS + 1) * TOGETHER


def test_of_several_wrong_items_the_first_is_named_and_the_rest_are_left() -> None:
    tried = set()
    gate = threading.Event()

    def half(n: int) -> int:
        tried.add(n)
        if n == 5:
            gate.wait(60)  # a later error is there before
        if n in (5, 40):
            gate.set()
            raise ValueError(f"item {n}")
        return n

    with pytest.raises(ValueError, match="item 5"):
        list(threaded(half, range(100_000)))
    assert len(tried) < 50_000
