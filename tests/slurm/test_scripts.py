"""The shell that people read and edit: clean to shellcheck, and clear where it is used wrongly."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.slurm.cluster import REPOSITORY
from tests.support.needs import skip_or_fail

SCRIPTS = sorted(path.name for path in (REPOSITORY / "slurm").iterdir())


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_has_nothing_to_say(name: str) -> None:
    if shutil.which("shellcheck") is None:
        reason = "shellcheck is not installed (apt-get install shellcheck)"
        skip_or_fail("shellcheck", reason)
    said = subprocess.run(
        ["shellcheck", "-x", f"slurm/{name}"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stdout


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name.endswith(".sbatch")])
def test_a_job_script_outside_a_job_says_how_it_is_used(name: str) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    said = subprocess.run(
        ["bash", f"slurm/{name}"], cwd=REPOSITORY, env=clean, capture_output=True, text=True
    )
    assert said.returncode != 0
    assert f"HINT: sbatch slurm/{name}" in said.stderr


def test_the_clusters_own_facts_are_all_commented() -> None:
    """A fresh clone must run on any cluster; what each variable is for is said beside it."""
    lines = (REPOSITORY / "slurm" / "cluster.env").read_text().splitlines()
    assert all(line.startswith("#") or not line for line in lines)
