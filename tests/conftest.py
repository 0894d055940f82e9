"""Order of the tests, parts and skips (full form, absent packages), and no GPU except for tests of CUDA.

`make test` distributes the files over pytest's processes (pytest-xdist): a file stays in one process, and the
longest start first. `pytest tests` runs the same tests in one process.
"""

from __future__ import annotations

import gc
import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import hints, needs

HERE = Path(__file__).parent
LONGEST = (
    "docs/test_commands.py",
    "slurm/test_jobs.py", "ray/test_joined.py", "ray/test_faults.py", "run/test_knob_pairs.py",
    "parity/test_parity.py", "parity/test_parity_command.py", "parity/test_parity_finds.py",
    "launch/test_local.py",
    "memory/test_oom.py", "plan/test_memory.py", "watch/test_faults.py",
    "checkpoint/test_killed.py", "checkpoint/test_exact.py", "checkpoint/test_s3.py", "plan/test_command.py",
)  # fmt: skip
"""Slurm and Ray tests, which mostly wait, alternate with those that compute."""


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs from this process and its children, except under `pytest -m cuda`; hints are checked."""
    if config.getoption("markexpr") != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        hints.check_each()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under `pytest -m cuda` other files are not imported: a machine with a GPU may lack their packages."""
    if config.getoption("markexpr") != "cuda" or collection_path.suffix != ".py":
        return None
    return True if "pytest.mark.cuda" not in collection_path.read_text(encoding="utf-8") else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            needs.check(name)


def in_part(name: str, part: str) -> bool:
    """Whether a test is in this part of the full form: "2/4" is the second of four. Parts are about equal in
    number, and stay as they are when other tests are added.
    """
    number, _, parts = part.partition("/")
    return not part or zlib.crc32(name.encode()) % int(parts) == int(number) - 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := os.environ.get("SHARDRUN_PART", ""):
        other = {item for item in items if item.get_closest_marker("long") and not in_part(item.nodeid, part)}
        config.hook.pytest_deselected(items=list(other))
        items[:] = [item for item in items if item not in other]
    order = {HERE / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))  # stable: files keep their order
    for item in items:
        if item.get_closest_marker("long") and not os.environ.get("SHARDRUN_FULL"):
            item.add_marker(pytest.mark.skip(reason="part of the full form: SHARDRUN_FULL=1"))


def pytest_collection_finish() -> None:
    """Imported modules and collected tests stay: later collections pass over them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """A run in this process sets loggers up for itself; caplog of the next test listens at the root."""
    yield
    for name in ("fsdp", "fsdp.config"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    logging.getLogger("fsdp").handlers.clear()
    logging.getLogger("fsdp").propagate = True
