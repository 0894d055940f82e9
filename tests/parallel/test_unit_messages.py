"""--dry-run lists the units with rank 0's shard, the start names their number, and a wrap that finds none
says so.
"""

from __future__ import annotations

import pytest
import torch

from fsdp.config import load
from fsdp.models import ModelSpec
from fsdp.run.job import model_of
from fsdp.run.summary import dry_run, unit_table
from tests.parallel.test_shard import look
from tests.support import user_code
from tests.support.env import env_of
from tests.support.runs import flags
from tests.support.world import run_world

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


def test_the_shards_are_those_of_a_run() -> None:
    """Over all units, what FSDP gives the first of three ranks."""
    spec = ModelSpec(name="Scalar", build=user_code.Scalar, sizes={}, knows_inits=False)
    rows = unit_table(model_of(load(flags()), spec), "auto", 3)[1:]
    found = run_world(3, look, "Scalar")[0]
    kept = sum(torch.Size(shape).numel() for shape in found["rows"].values()) + len(found["whole"])
    assert kept == sum(int(row.split()[-1].replace(",", "")) for row in rows)


@pytest.mark.parametrize(
    ("wrap", "hint"),
    [(wrap, "the root's group holds 1,571 parameters") for wrap in ("size:3000000", "root")],
)
def test_a_wrap_without_a_match_has_a_hint(wrap: str, hint: str) -> None:
    line = fact(said(f"--mesh.wrap {wrap}"), "units")
    assert line.startswith(f"none: --mesh.wrap {wrap}")
    assert line.endswith(hint)
