"""How starts end under Ray: how often the workers are started again and the driver's exit code, as
docs/restarts.md has them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp.rundir.history import RunDir
from launch.policy import Act
from tests.launch.ends import DEADLINE, ENDS, LAUNCHERS, ON_RAY, flags_of, sequence
from tests.ray.cluster import Cluster
from tests.ray.runs import Driver

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("name", ON_RAY)
def test_what_follows_under_ray(name: str, tmp_path: Path, joined: Cluster) -> None:
    driver = Driver(tmp_path / "run", *flags_of(name), cluster=joined)
    acts, code = sequence(ENDS[name], LAUNCHERS["Ray"])
    assert driver.wait(300) == code, driver.said()
    assert len(driver.run.starts) == 1 + acts.count(Act.AGAIN), driver.said()
    if name == DEADLINE:
        stopped = RunDir(driver.run.path).stopped.read_text()
        assert stopped == f"the deadline at step {max(driver.run.steps)}\n"
        assert (driver.run.path / "checkpoints" / f"step-{max(driver.run.steps):08}").is_dir()
