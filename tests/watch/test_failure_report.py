"""Failure reports: kind, ranks at fault, hint, and whether it is a consequence of another rank's end."""

from __future__ import annotations

import errno
import socket
from asyncio import CancelledError

import pytest

from fsdp.base.errors import (
    CheckpointError,
    ConfigError,
    LaunchError,
    NotFiniteError,
    OtherRankFailed,
    TrainingError,
)
from fsdp.memory.oom_error import OutOfMemory
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
        (MemoryError(), "memory"),
        (CancelledError(), "exception"),
    ],
)
def test_an_error_has_a_kind(error: BaseException, kind: str) -> None:
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


@pytest.mark.parametrize(
    ("error", "line", "hint"),
    [
        (MemoryError(), "MemoryError", "less on the host"),
        (ValueError("\n  what happened\nmore"), "ValueError: what happened", ""),
        (
            ValueError(
                "Caught ValueError in DataLoader worker process 0.\nOriginal …:\nValueError: no text\n"
            ),
            "ValueError: no text",
            "",
        ),
        (
            RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"),
            "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly",
            "dmesg shows whether memory ended the worker",
        ),
        (
            RuntimeError(
                "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's "
                "workers are out of shared memory. Please try to raise your shared memory limit."
            ),
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is",
            "a larger /dev/shm",
        ),
        (RuntimeError("can't start new thread"), "RuntimeError: can't start new thread", "ulimit -u"),
        (
            OSError(errno.EIO, "Input/output error", "/d/7"),
            "OSError: [Errno 5] Input/output error",
            "its server",
        ),
    ],
)
def test_an_error_is_one_line_and_has_a_hint_that_fits(error: Exception, line: str, hint: str) -> None:
    report = failure_report(error, ENV)
    assert report["message"].startswith(line)
    assert "\n" not in report["message"]
    assert hint in report["hint"]


@pytest.mark.parametrize(
    ("launcher", "nodes", "typed"),
    [
        ("torchrun", 1, "CUDA_VISIBLE_DEVICES=0,1,3 leaves it out, with --nproc_per_node=3"),
        ("launch.local", 1, "CUDA_VISIBLE_DEVICES=0,1,3 leaves it out, with --ranks 3"),
        ("ray", 2, f"`ray stop` on {socket.gethostname()} removes it from the cluster"),
        ("srun", 2, f"srun --exclude={socket.gethostname()}"),
    ],
)
def test_a_broken_device_is_left_out_as_one_types_it_under_the_launcher(
    launcher: str, nodes: int, typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    error = RuntimeError("CUDA error: uncorrectable ECC error encountered")
    report = failure_report(error, env_of(2, 4 * nodes, nodes=nodes, launcher=launcher))
    assert report["hint"].startswith("the device may be broken: ")
    assert report["hint"].endswith(typed)
    assert report["print"].endswith(f"HINT: {report['hint']}")


def test_an_error_that_holds_a_whole_sample_is_cut() -> None:
    report = failure_report(ValueError("x" * 1_000_000), ENV)
    assert len(report["message"]) < 2100
    assert len(report["print"]) < 5000


def test_the_ranks_at_fault_are_those_of_the_error() -> None:
    assert failure_report(CheckpointError("rank 2: the save failed", ranks=(1, 3)), ENV)["ranks"] == [1, 3]
