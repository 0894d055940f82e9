"""A host in namespaces of its own, for a cluster of the tests. Linux only."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from fsdp.base import proc
from tests.support.processes import dies_with_us, eventually

NAMESPACES = ["--net", "--uts", "--mount"]


class Host:
    """A shell in namespaces of its own that takes commands on stdin; it and all inside end when the pipe
    closes.
    """

    def __init__(self, name: str, hosts: Path, log: Path, *, own_processes: bool) -> None:
        self._own_processes = own_processes
        own = ["--pid", "--fork", "--kill-child", "--mount-proc"] if own_processes else []
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [*dies_with_us(), "unshare", *NAMESPACES, *own, "bash"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        self.say(
            f"hostname {name}; mount --bind '{hosts}' /etc/hosts; mount -t tmpfs none /dev/shm; "
            f"ip link set lo up; echo {name} is up >>'{log}.up'"
        )
        eventually(f"host {name} is up", Path(f"{log}.up").exists, 60, log.read_text)
        Path(f"{log}.up").unlink()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    @property
    def shell(self) -> int:
        """The pid of the shell as this machine sees it: with a process space of its own it is unshare's
        child.
        """
        return proc.children(self.process.pid)[0] if self._own_processes else self.process.pid

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
