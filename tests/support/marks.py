"""Marks for samples of similar cases: in the quick part, in the whole test command, and in the full form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick_are(kept: Iterable[Any], cases: Iterable[Any], sample: Iterable[Any] | None = None) -> list[Any]:
    """The cases for parametrize, all but those kept marked slow. Given a sample, what is in neither waits for
    the full form.
    """
    kept, cases = list(kept), list(cases)
    whole = cases if sample is None else [*kept, *sample]
    unknown = [case for case in [*kept, *whole] if case not in cases]
    assert not unknown, f"no such case: {unknown}"
    return [case if case in kept else _later(case, whole=case in whole) for case in cases]


def sample_are(sample: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases for parametrize of a slow test: all but the sample are part of the full form only."""
    return quick_are([], cases, sample)


def _later(case: Any, *, whole: bool) -> Any:
    marks = [pytest.mark.slow] if whole else [pytest.mark.slow, pytest.mark.long]
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
