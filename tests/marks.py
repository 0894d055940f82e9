"""Which of many alike cases stand for all of them in the quick part; the whole test command runs each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick_are(kept: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases for parametrize, all but those kept marked slow. A case that is kept must be one of them."""
    kept, cases = list(kept), list(cases)
    unknown = [case for case in kept if case not in cases]
    assert not unknown, f"no such case: {unknown}"
    return [case if case in kept else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
