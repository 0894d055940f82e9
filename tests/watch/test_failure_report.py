"""Failure reports: kind, ranks at fault, hint, and whether it is a consequence of another rank's end."""

from __future__ import annotations

import errno

import pytest

from fsdp.base.errors import (
    CheckpointError,
    ConfigError,
    LaunchError,
    NotFiniteError,
    OtherRankFailed,
    TrainingError,
)
from fsdp.memory.oom import OutOfMemory
from fsdp.watch.failure_report import failure_report
from tests.support.env import env_of

ENV = env_of(2, 4, nodes=2)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("--a 1"), "config"),
        (LaunchError("no"), "launcher"),
        (CheckpointError("rank 2: x.distcp: it cannot be read"), "checkpoint"),
        (CheckpointError("x.distcp: no room", error_number=errno.ENOSPC), "full disk"),
        (CheckpointError("a folder named ENOSPC: it cannot be read"), "checkpoint"),
        (NotFiniteError("step 3: loss nan"), "nan"),
        (TrainingError("step 3: the words do not count: not finite"), "training"),
        (TrainingError("step 3: replicas differ"), "training"),
        (OutOfMemory("forward"), "memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "full disk"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "memory"),
        (ValueError("a sample"), "exception"),
    ],
)
def test_an_error_has_a_kind(error: Exception, kind: str) -> None:
    report = failure_report(error, ENV)
    assert (report["kind"], report["secondary"]) == (kind, False)


@pytest.mark.parametrize(
    "error",
    [
        OtherRankFailed(0, "it broke", 4),
        RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"),
        RuntimeError(
            "[../gloo/transport/tcp/buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"
        ),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
    ],
)
def test_a_consequence_of_another_ranks_end_is_secondary(error: Exception) -> None:
    assert failure_report(error, ENV)["secondary"]


def test_an_error_of_other_code_has_the_end_of_its_traceback_and_a_hint() -> None:
    try:
        raise RuntimeError("Too many open files")
    except RuntimeError as error:
        report = failure_report(error, ENV)
    assert "HINT: ulimit -n 65536" in report["print"]
    assert report["print"].startswith("[rank 2] failed on cpu:\nTraceback")


def test_the_ranks_at_fault_are_those_of_the_error() -> None:
    assert failure_report(CheckpointError("rank 2: the save failed", ranks=(1, 3)), ENV)["ranks"] == [1, 3]
