"""Faults of one rank for the doctor's tests: put on in that rank's own process, and removed again."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fsdp.distributed.env import DistEnv
from fsdp.doctor import __main__ as doctor
from fsdp.doctor import checks
from fsdp.doctor.checks import NodeReports


def another_torch() -> contextlib.AbstractContextManager[Any]:
    """Another version number: a process cannot load a second torch."""
    return mock.patch.object(torch, "__version__", "2.12.9")


def a_slow_device() -> contextlib.AbstractContextManager[Any]:
    """Computes each product eight times, which is slow however busy the machine is."""
    real = torch.mm
    return mock.patch.object(torch, "mm", lambda *args, **more: [real(*args, **more) for _ in range(8)][-1])


FAULTS = {"well": contextlib.nullcontext, "another torch": another_torch, "a slow device": a_slow_device}


def examined(env: DistEnv, folder: str, fault: str, faulty: int) -> NodeReports | None:
    """One rank of a world that the doctor examines; rank 0 returns the reports."""
    store = dist.PrefixStore("doctor", dist.FileStore(str(Path(folder, "store")), env.world_size))
    exam = doctor.RankExam(env, store, Path(folder), time.monotonic() + 60)
    with FAULTS[fault if env.rank == faulty else "well"]():
        doctor.examine(exam)
    exam.gather("finished", True)
    return doctor.reports_so_far(env, store) if env.is_main else None


def never_done(*_: Any) -> None:
    """A stage that does not end."""
    time.sleep(600)


def main() -> int:
    """As `-m fsdp.doctor`, on a node whose last rank hangs in its matrix product."""
    from fsdp.distributed.env import from_environment

    env = from_environment()
    if env.rank == env.world_size - 1:
        checks.check_device = never_done  # type: ignore[assignment]
    return doctor.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
