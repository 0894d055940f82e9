"""A rank that the kernel kills for lack of memory: the watch says so, with the limit that was reached."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from fsdp.base.proc import ROOT, memory_group
from tests.support import needs
from tests.support.user_code import Uneven

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.needs("cgroup")]

LIMIT = 1536 << 20
"""Two ranks, torchrun and the monitor take some 700 MiB."""


class Growing(Uneven):
    """Rank 1 allocates in its fifth step until the kernel ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.held: list[bytes] = []

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        while self.steps == 5 and os.environ["RANK"] == "1":
            self.held.append(b"x" * (16 << 20))
        return super().forward(x)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Path]:
    root = memory_group().levels[-1]
    own = root / f"shardrun-{os.getpid()}"
    try:
        own.mkdir()
        (own / ("memory.max" if root == ROOT else "memory.limit_in_bytes")).write_text(str(LIMIT))
    except OSError as error:
        needs.skip_or_fail("cgroup", f"no memory cgroup can be made: {error}")
    yield own
    own.rmdir()  # fails if a process of the run is left


def test_the_rank_and_the_limit_are_named(group: Path, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d"),
        *("--rdzv_endpoint=localhost:0", "train.py", "--run.dir", str(tmp_path / "run")),
        *("--model.name", "tests.watch.test_out_of_memory:Growing"),
        *("--data.name", "tests.support.user_code:vectors", "--train.steps", "20"),
    ]

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, preexec_fn=enter)
    assert ended.returncode != 0
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("watch: ")]
    assert line.startswith("watch: rank 1 (")
    assert ") was killed by the kernel, out of memory: step 5, forward" in line
    assert "  HINT: its cgroup allows 1.5 GiB: a larger limit (the container's, such as" in ended.stderr
