"""The memory cgroup of a process: the limit of any level, and the kernel's count of kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp.base import proc
from fsdp.base.proc import memory_group

UNLIMITED = str(0x7FFFFFFFFFFFF000)
"""As version 1 writes it."""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(proc, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(proc, "PROC", tmp_path / "proc")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_version_2_has_one_tree_and_the_job_s_limit_above_the_step_s(files: Path) -> None:
    write(files / "proc/7/cgroup", "0::/slurm/job_3/step_0\n")
    write(files / "cgroup/slurm/job_3/memory.max", "5000\n")
    write(files / "cgroup/slurm/job_3/step_0/memory.max", "max\n")
    write(files / "cgroup/slurm/job_3/memory.events", "oom 9\noom_kill 9\n")
    write(files / "cgroup/slurm/job_3/step_0/memory.events", "low 0\noom 1\noom_kill 2\noom_group_kill 0\n")
    group = memory_group(7)
    assert group.limit() == group.limit(reached=True) == 5000
    assert group.oom_kills() == 2
    write(files / "cgroup/slurm/job_3/memory.events", "oom 0\noom_kill 9\n")
    assert group.limit(reached=True) is None  # the node itself had no memory left


def test_version_1_has_a_tree_of_memory(files: Path) -> None:
    write(files / "proc/7/cgroup", "9:name=systemd:/a\n4:memory:/job/task\n1:cpu,cpuacct:/\n0::/\n")
    write(files / "cgroup/memory/job/task/memory.limit_in_bytes", f"{UNLIMITED}\n")
    write(files / "cgroup/memory/job/memory.limit_in_bytes", "7000\n")
    write(files / "cgroup/memory/memory.limit_in_bytes", "9000\n")
    write(
        files / "cgroup/memory/job/task/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"
    )
    group = memory_group(7)
    assert group.limit() == 7000
    assert group.limit(reached=True) is None
    write(files / "cgroup/memory/job/memory.failcnt", "3\n")
    assert group.limit(reached=True) == 7000
    assert group.oom_kills() == 1


def test_a_container_has_its_limit_at_the_root_though_its_path_is_the_host_s(files: Path) -> None:
    write(files / "proc/self/cgroup", "0::/kubepods/pod1/c2\n")
    write(files / "cgroup/memory.max", "300\n")
    assert memory_group().limit() == 300


def test_a_system_without_them_limits_and_counts_nothing(files: Path) -> None:
    group = memory_group(7)
    assert group.limit() is None
    assert group.oom_kills() == 0
