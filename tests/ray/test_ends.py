"""Ends of the table in docs/restarts.md under Ray: what followed, and the driver's exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.ends import ENDS, LAUNCHERS, flags_of, sequence
from tests.ray.runs import Driver

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize(
    "name",
    [
        "an exception of your own code",
        "out of memory",
        "a killed rank",
        "a rank that hangs",
        "a deadline or time limit",
    ],
)
def test_what_follows(name: str, tmp_path: Path) -> None:
    driver = Driver(tmp_path / "run", *flags_of(name))
    acts, code = sequence(ENDS[name], LAUNCHERS["Ray"])
    assert driver.wait(240) == code, driver.said()
    assert len(driver.run.starts) == len(acts), driver.said()
