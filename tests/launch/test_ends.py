"""The table of docs/restarts.md is what the policy decides, and torchrun and launch.local do so."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp.rundir import history
from fsdp.rundir.history import RunDir
from launch.node import free_port
from launch.policy import Act
from tests.docs.pages import ROOT, text_of
from tests.launch.ends import (
    DEADLINE,
    ENDS,
    LAUNCHERS,
    ON_ONE_MACHINE,
    PREEMPTED,
    REFUSED,
    STOPPED,
    cell,
    flags_of,
    sequence,
    table,
)
from tests.support.locks import acquire
from tests.support.marks import sample_are
from tests.support.processes import eventually, pids_with

COMMANDS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"],
    "launch.local": ["launch.local", "--ranks", "2"],
}
CASES = [(launcher, name) for name, launcher in ON_ONE_MACHINE]
FEW = [("launch.local", "out of memory")]


def test_the_page_has_the_table() -> None:
    assert "\n".join(table()) in text_of(ROOT / "docs" / "restarts.md"), "python -m tests.launch.ends"


@contextlib.contextmanager
def held(run: Path) -> Iterator[None]:
    """Another live process writes there."""
    lock = acquire(history.create(run).path, "torchrun")
    try:
        yield
    finally:
        lock.release()


ENDS_S = 300
"""A hang is three starts, each ended by the watch: a minute alone, over 150 s beside two other workers."""


def started(command: list[str], name: str, run: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *command, *flags_of(name), "--run.dir", str(run)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def until_a_step(run: Path) -> None:
    eventually("a step", lambda: bool(list(history.read_records(RunDir(run).metrics))), 120)


def end_of(launcher: str, name: str, run: Path) -> tuple[int, str]:
    if name == "a lost node":
        return after_a_lost_node(run)
    process = started(COMMANDS[launcher], name, run)
    if name in (STOPPED, PREEMPTED):
        until_a_step(run)
        # a terminal's Ctrl-C and a scheduler signal all processes
        os.killpg(process.pid, signal.SIGINT if name == STOPPED else signal.SIGTERM)
    said, _ = process.communicate(timeout=ENDS_S)
    return process.returncode, said


def after_a_lost_node(run: Path) -> tuple[int, str]:
    """Two torchruns as two nodes: all processes of the second are killed. The end of the first."""
    port = free_port(os.getpid())
    words = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    words += [f"--master-port={port}"]
    nodes = [started([*words, f"--node-rank={rank}", "train.py"], "a lost node", run) for rank in (0, 1)]
    until_a_step(run)
    lost = pids_with("RANK=1", f"MASTER_PORT={port}")
    assert lost
    for pid in [nodes[1].pid, *lost]:
        os.kill(pid, signal.SIGKILL)
    nodes[1].communicate()
    said, _ = nodes[0].communicate(timeout=ENDS_S)
    return nodes[0].returncode, said


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "name"), sample_are(FEW, CASES))
def test_what_follows(launcher: str, name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with held(run) if name == REFUSED else contextlib.nullcontext():
        code, said = end_of(launcher, name, run)
    assert code == int(cell(ENDS[name], launcher).split("end ")[1].split(",")[0]), said
    acts, _ = sequence(ENDS[name], LAUNCHERS[launcher])
    starts = [one for one in history.read_records(RunDir(run).history) if one["event"] == "start"]
    never = name in (REFUSED, "a wrong flag or mesh")
    assert len(starts) == (0 if never else 1 + acts.count(Act.AGAIN)), said
    if name in (STOPPED, PREEMPTED, DEADLINE):
        assert RunDir(run).stopped.exists()
        assert list((run / "checkpoints").glob("step-*"))
