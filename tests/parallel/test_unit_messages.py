"""--dry-run lists the units with each rank's shard, the start names their number, and a wrap that finds none
says so.
"""

from __future__ import annotations

from fsdp.config import load
from fsdp.run.summary import dry_run
from tests.support.env import env_of
from tests.support.runs import flags

ALONE = env_of()


def said(*more: str) -> list[str]:
    return dry_run(load(flags(*more)), ALONE).splitlines()


def fact(lines: list[str], name: str) -> str:
    return next(line.removeprefix(name).strip() for line in lines if line.startswith(name))


def test_a_dry_run_lists_units_with_rank_0s_shard() -> None:
    lines = said("--mesh.shard 4")
    assert fact(lines, "units") == "3 of 444 parameters, 239 in the root's"
    assert [line.split() for line in lines[-4:]] == [
        ["blocks.0", "444", "128"],
        ["blocks.1", "444", "128"],
        ["blocks.2", "444", "128"],
        ["the", "root", "239", "80"],
    ]
