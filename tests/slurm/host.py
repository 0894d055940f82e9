"""Processes as a cluster of the tests needs them: a host in namespaces of its own, and who runs where. Linux only."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

NAMESPACES = ["--net", "--uts", "--mount"]


def eventually(what: str, condition: Callable[[], object], timeout_s: float, tell: Callable[[], str] = str) -> None:
    """Poll until condition() is true; the failure says what was waited for, and what `tell` knows."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{tell()}")
        time.sleep(0.1)


class Host:
    """A shell in namespaces of its own that takes commands on stdin; it and all inside end when the pipe closes."""

    def __init__(self, name: str, hosts: Path, log: Path, *, own_processes: bool) -> None:
        self._own_processes = own_processes
        own = ["--pid", "--fork", "--kill-child", "--mount-proc"] if own_processes else []
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [*dies_with_us(), "unshare", *NAMESPACES, *own, "bash"],
                stdin=subprocess.PIPE, stdout=output, stderr=output, text=True, start_new_session=True,
            )  # fmt: skip
        self.say(f"hostname {name}; mount --bind '{hosts}' /etc/hosts; ip link set lo up; echo {name} is up >>'{log}.up'")
        eventually(f"host {name} is up", Path(f"{log}.up").exists, 10, log.read_text)
        Path(f"{log}.up").unlink()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    @property
    def shell(self) -> int:
        """The pid of the shell as this machine sees it: with a process space of its own it is unshare's child."""
        return children(self.process.pid)[0] if self._own_processes else self.process.pid

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def dies_with_us() -> list[str]:
    return ["setpriv", "--pdeathsig", "KILL"]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def process_space(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/ns/pid").readlink()
    return None


def program(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def pids_with(*environ: str) -> list[int]:
    wanted, found = {text.encode() for text in environ}, []
    for folder in Path("/proc").iterdir():
        # a process may end while it is looked at, or belong to somebody else
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                found.append(int(folder.name))
    return found
