"""A method that does not keep its object alive, for hooks of tensors and for threads."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def without_owner(method: Callable[[T], None]) -> Callable[[T], None]:
    """The bound method without a reference to its object; it does nothing when the object is gone.

    The garbage collector does not see hooks of tensors: an object that they keep, and that keeps the
    parameters, would stay for good, and with it their mesh. A thread that runs keeps what it refers to.
    """
    found = weakref.WeakMethod(method)

    def call(argument: T) -> None:
        if (alive := found()) is not None:
            alive(argument)

    return call
