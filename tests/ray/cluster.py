"""A Ray cluster of several nodes on this machine: each `ray start --block` has its own address and so is its
own node.

Free ports, a folder and a token of its own: two clusters do not meet. It ends its own processes, known by
that token; `ray stop`, which ends every Ray of the user, is never called.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from fsdp.base import proc
from tests.support.processes import eventually, pids_with

REPOSITORY = Path(__file__).resolve().parent.parent.parent
FOREIGN = ("SLURM_", "MASTER_", "TORCHELASTIC_", "RAY_")
NODE_FLAGS = ["--object-store-memory=80000000", "--disable-usage-stats"]


def clean_environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


class Cluster:
    """Nodes by number, the head is 0. Each is 127.x.y.(2 + number), with x and y of this cluster."""

    def __init__(self, cpus: list[float]) -> None:
        self.token = secrets.token_hex(16)
        self.folder = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))
        self._net = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250)}"
        self.port = 21000 + secrets.randbelow(9000)
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._cpus = cpus

    @property
    def address(self) -> str:
        return f"{self._net}.2:{self.port}"

    def environment(self, **more: str) -> dict[str, str]:
        secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        # else a Python process for each CPU of a node, that no worker of ours comes from
        lean = {"RAY_prestart_worker_first_driver": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        # at Ray's 15 ranks get a thirtieth of the time beside other tests
        return clean_environment(**secret, **lean, RAY_worker_niceness="0", **more)

    def __enter__(self) -> Cluster:
        try:
            for number in range(len(self._cpus)):
                self.start(number)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, number: int) -> None:
        """One after another: nodes that start at once trip over each other."""
        head = ["--head", f"--port={self.port}", f"--temp-dir={self.folder}", "--include-dashboard=false"]
        role = head if number == 0 else [f"--address={self.address}"]
        log = self.folder / f"node-{number}-{secrets.token_hex(2)}.log"
        ray = str(Path(sys.executable).with_name("ray"))
        flags = [
            f"--node-ip-address={self._net}.{2 + number}",
            f"--num-cpus={self._cpus[number]:g}",
            *NODE_FLAGS,
        ]
        with log.open("wb") as output:
            self._nodes[number] = subprocess.Popen(
                [ray, "start", "--block", *role, *flags],
                env=self.environment(),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        eventually(
            f"Ray's node {number}", lambda: "Ray runtime started" in log.read_text(), 90, log.read_text
        )

    def alive(self) -> bool:
        return all(node.poll() is None for node in self._nodes.values())

    def lose(self, number: int) -> None:
        """A node that goes without a word: its raylet, and with it its workers."""
        mine = self.pids_of(number)
        node = self._nodes.pop(number)
        for pid in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()

    def drain(self, number: int) -> None:
        """What Ray does with a node whose end was announced."""
        self._nodes[number].terminate()

    def pids_of(self, number: int) -> list[int]:
        node = self._nodes[number].pid
        return [pid for pid in self.pids() if _is_under(pid, node)]

    def pids(self) -> list[int]:
        return pids_with(f"RAY_AUTH_TOKEN={self.token}")

    def end(self) -> None:
        """Until nothing carries this cluster's token any more."""

        def gone() -> bool:
            left = [pid for pid in self.pids() if pid != os.getpid()]
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for node in self._nodes.values():
                node.poll()
            return not left

        eventually("the end of Ray's processes", gone, 60)
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_under(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        found = proc.stat(pid)
        if found is None:
            return False
        pid = found.parent
    return False
