"""A run directory on a file server as weak as NFS: each node caches attributes, names and absences.

The server is a stand-in: bindfs (FUSE) over one folder, mounted by each of two nodes. The kernel keeps what a
node has looked up for CACHED_S, and its pages of a file until the next open: a node sees a change by another
one late, and a file that it has looked for in vain stays absent for as long. The nodes are mount
namespaces with a host name and a machine id of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from launch.policy import EXIT_REFUSED
from tests.slurm.cluster import free_ports
from tests.support import needs
from tests.support.processes import dies_with_us, eventually
from tests.support.runs import QUIET, finished, run

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.needs("bindfs")]

ROOT = Path(__file__).parents[2]
CACHED_S = 5
SAVING = "--checkpoint.every_steps 2 --checkpoint.keep_last 2 --run.log_every_steps 1"


@dataclass(frozen=True)
class Node:
    """`view` is the server's folder, at the same path on each node."""

    name: str
    keeper: int
    view: Path

    def popen(self, *command: str) -> subprocess.Popen[str]:
        enter = ["nsenter", "--target", str(self.keeper), "--mount", "--uts", f"--wdns={ROOT}"]
        return subprocess.Popen(
            [*enter, *command],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.view.parent / self.name)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *command: str) -> str:
        process = self.popen(*command)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
        return said


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    server, view = tmp_path / "server", tmp_path / "view"
    server.mkdir()
    view.mkdir()
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(mounted(name, server, view)) for name in ("n1", "n2")]


@contextlib.contextmanager
def mounted(name: str, server: Path, view: Path) -> Iterator[Node]:
    identity = server.parent / f"{name}.id"
    identity.write_text(f"{name:0>32}\n")
    cached = f"attr_timeout={CACHED_S},entry_timeout={CACHED_S},negative_timeout={CACHED_S}"
    mount = f"hostname {name} && mount --bind {shlex.quote(str(identity))} /etc/machine-id && exec bindfs -f"
    mount += f" -o {cached} {shlex.quote(str(server))} {shlex.quote(str(view))}"
    keep = ["unshare", "--mount", "--uts", *dies_with_us(), "sh", "-c", mount]
    with subprocess.Popen(keep, stderr=subprocess.PIPE, text=True) as keeper:
        try:
            place = Path(f"/proc/{keeper.pid}/root{view}")
            eventually(
                f"the mount of {name}",
                lambda: keeper.poll() is not None or os.path.ismount(place),
                20,
            )
            if keeper.poll() is not None:
                assert keeper.stderr is not None
                needs.skip_or_fail("bindfs", f"no mount of one's own here: {keeper.stderr.read().strip()}")
            yield Node(name, keeper.pid, view)
        finally:
            keeper.terminate()


def train(node: Node, port: int, rank: int, *more: str) -> subprocess.Popen[str]:
    """One rank of two, under torchrun."""
    agent = ["--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    words = [*QUIET, *SAVING.split(), "--run.dir", str(node.view / "run"), *more]
    command = ["-m", "torch.distributed.run", *agent, f"--master-port={port}", "train.py", *words]
    return node.popen(sys.executable, *command)


def ended(started: list[subprocess.Popen[str]]) -> str:
    """What the two printed; both have ended with success."""
    said = [one.communicate(timeout=300)[0] for one in started]
    assert [one.returncode for one in started] == [0, 0], "\n".join(said)
    return "\n".join(said)


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {one["step"]: one["loss"] for one in map(json.loads, lines) if "loss" in one}


LOOKS = """
import os, sys
for _ in range(2):
    print(os.path.exists(sys.argv[1]), flush=True)
    sys.stdin.readline()
"""


def test_the_stand_in_is_weak(nodes: list[Node]) -> None:
    """What another node has made stays absent where it was looked for before."""
    here, there = nodes
    file = str(here.view / "made")
    looking = there.popen(sys.executable, "-c", LOOKS, file)
    assert looking.stdout is not None
    assert looking.stdin is not None
    assert looking.stdout.readline() == "False\n"
    here.run("touch", file)
    looking.stdin.write("\n")
    looking.stdin.flush()
    assert looking.stdout.readline() == "False\n"
    looking.communicate("\n")
    eventually("the file", (Path(f"/proc/{there.keeper}/root{file}")).exists, 2 * CACHED_S)


def test_a_run_of_two_nodes_is_killed_and_resumed_with_ranks_exchanged(
    nodes: list[Node], tmp_path: Path
) -> None:
    words = ["--train.steps", "40", "--mesh.strategy", "fsdp"]
    whole = run(2, tmp_path / "whole", SAVING, *words)
    server, port = tmp_path / "server/run", free_ports(1)[0]
    first = [train(node, port, rank, *words) for rank, node in enumerate(nodes)]
    try:
        sealed = server / "checkpoints/step-00000006/manifest.json"
        eventually("the checkpoint of step 6", sealed.exists, 90)
    finally:
        for one in first:
            os.killpg(one.pid, signal.SIGKILL)
            one.communicate()
    port = free_ports(1)[0]
    said = ended([train(node, port, rank, *words) for rank, node in enumerate(reversed(nodes))])
    assert "resumes from step" in said
    assert losses(server) == losses(whole.run)
    assert all(torch.equal(finished(server).parameters[name], one) for name, one in whole.parameters.items())


def test_another_node_is_refused_and_may_ask_the_run_to_stop(nodes: list[Node]) -> None:
    here, there = nodes
    words = ["train.py", *QUIET, "--run.dir", str(here.view / "run"), "--train.steps", "1000000"]
    holder = here.popen(sys.executable, *words)
    try:
        eventually("its first step", (here.view.parent / "server/run/metrics.jsonl").exists, 90)
        second = there.popen(sys.executable, *words)
        said, _ = second.communicate(timeout=300)
        assert second.returncode == EXIT_REFUSED, said
        assert "on n1" in said
        there.run("touch", str(there.view / "run/STOP"))
        said, _ = holder.communicate(timeout=300)
        assert holder.returncode == 0, said
        assert "checkpoint of step" in said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(holder.pid, signal.SIGKILL)
