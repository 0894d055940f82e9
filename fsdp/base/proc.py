"""Reads Linux's /proc: state, processor time, memory and children of a process, and its cgroup's limit. And
for this process: garbage collection paused, the folder of its cache, files that may be anyone's, read
within a size.

None or an empty value where /proc does not show a process: other systems, hidepid, a process that has ended.

Standard library, and no psutil: the monitor process (fsdp/watch/monitor.py) reads four of these files for
each rank every 0.1 s to 0.2 s, and needs the state and the run delay of one thread. psutil has no run delay,
and lists the threads of a process without their state. Processor time of one reading, of a process with 21
threads:

    24 µs     here: stat of the process, stat and schedstat of the training thread
    44 µs     the same three files through pathlib
    18 µs     psutil's oneshot(): stat of the process alone
    250 µs    psutil's threads(): processor time of all threads

psutil also needs site-packages, which the monitor starts without: that and its import double the 0.13 s of a
start.

A memory limit may be set at any level of cgroups above the process's own (Slurm sets the job's), and a
container sees its own tree alone, although its path may be the host's: levels that are not here are left out.
"""

from __future__ import annotations

import contextlib
import gc
import os
import stat as stat_of
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fsdp.base.text import byte_size

PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessStat:
    """Fields of /proc/PID/stat, or of one thread's."""

    state: str
    """R runs, S sleeps, D waits for a device, T is stopped, t by a debugger, Z is a zombie, X is dead."""
    parent: int
    cpu_s: float
    """User and system time."""
    start_ticks: str
    """Start time in clock ticks since boot. With the process id it names a process: ids are used again."""

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


def stat(pid: int | str, thread: int = 0) -> ProcessStat | None:
    """Of a process (`"self"` is this one), or of one of its threads."""
    path = f"/proc/{pid}/task/{thread}/stat" if thread else f"/proc/{pid}/stat"
    try:
        fields = _read(path).rpartition(b")")[2].decode().split()  # a program's name may hold spaces
    except OSError:
        return None
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return ProcessStat(
        fields[0], int(fields[1]), (int(fields[11]) + int(fields[12])) / ticks_per_s, fields[19]
    )


def is_alive(pid: int) -> bool:
    found = stat(pid)
    return found is not None and found.alive


def run_delay_s(pid: int, thread: int) -> float:
    """Time in which this thread could run and no processor was free; 0 if the kernel does not count."""
    try:
        return int(_read(f"/proc/{pid}/task/{thread}/schedstat").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def io_bytes(pid: int) -> int:
    """What its threads have read and written by calls of the kernel, so far; 0 where it is not shown."""
    try:
        counts = dict(line.split(b": ") for line in _read(f"/proc/{pid}/io").splitlines())
    except OSError:
        return 0
    # pages that are written count before the call that writes many of them has ended
    return int(counts[b"rchar"]) + max(int(counts[b"wchar"]), int(counts[b"write_bytes"]))


def age_s() -> float:
    """Seconds since this process started; 0 where the system does not show it."""
    found = stat("self")
    if found is None:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(found.start_ticks) / os.sysconf("SC_CLK_TCK")


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- memory


def memory_bytes(pid: int | str = "self") -> dict[str, int]:
    """Bytes by name in /proc/PID/status: VmRSS, VmHWM (its peak), VmSize, RssAnon, RssShmem."""
    return kib_lines(PROC / str(pid) / "status")


def kib_lines(path: Path) -> dict[str, int]:
    """Bytes by name, of a file of lines such as `VmRSS: 12 kB`; empty where it cannot be read."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    rows = (line.replace(":", " ", 1).split() for line in lines)
    return {row[0]: int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


# ---------------------------------------------------------------- processes


def exists(pid: int) -> bool:
    return (PROC / str(pid)).exists()


def children(pid: int) -> list[int]:
    """Started by the main thread of `pid`, oldest first."""
    with contextlib.suppress(OSError):
        return [int(one) for one in (PROC / f"{pid}/task/{pid}/children").read_text().split()]
    return []


def shows_this_process() -> bool:
    """Whether /proc is of this process's own PID namespace. Raises OSError without /proc."""
    return (PROC / "self").readlink() == Path(str(os.getpid()))


def boot_id() -> str:
    """Drawn at each boot. Raises OSError where the system does not show it."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def pid_namespace(pid: int | str = "self") -> str:
    """`pid:[4026531836]`, equal for processes that share process ids. Raises OSError without /proc."""
    return str((PROC / str(pid) / "ns" / "pid").readlink())


ROOT = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60
"""Version 1 writes its largest number of pages where nothing is limited, version 2 `max`."""


@dataclass(frozen=True)
class MemoryGroup:
    """`levels`: folders of the hierarchy, the process's own first."""

    levels: tuple[Path, ...]

    def limit(self, *, reached: bool = False) -> int | None:
        """Bytes of the smallest limit at any level; with `reached`, of those that memory has come up to."""
        limits = [
            int(text)
            for level in self.levels
            for name in ("memory.max", "memory.limit_in_bytes")
            if (text := _text_of(level / name).strip()).isdigit() and (not reached or _was_reached(level))
        ]
        return min((limit for limit in limits if limit < NO_LIMIT), default=None)

    def oom_kills(self) -> int:
        """Killed processes of the innermost level that counts them; without one, of the whole node."""
        files = (level / name for level in self.levels for name in ("memory.events", "memory.oom_control"))
        counts = (_count(file, "oom_kill") for file in (*files, PROC / "vmstat"))
        return next((count for count in counts if count is not None), 0)


def memory_group(pid: int | str = "self") -> MemoryGroup:
    """Without levels where the system shows none."""
    lines = [line.split(":", 2) for line in _text_of(PROC / str(pid) / "cgroup").splitlines()]
    version_1 = [line[2] for line in lines if len(line) == 3 and "memory" in line[1].split(",")]
    version_2 = [line[2] for line in lines if len(line) == 3 and line[:2] == ["0", ""]]
    root, path = (ROOT / "memory", version_1[0]) if version_1 else (ROOT, version_2[0] if version_2 else "")
    own = root / path.lstrip("/")
    levels = [own, *own.parents] if path else []
    return MemoryGroup(tuple(level for level in levels if level.is_relative_to(root) and _is_there(level)))


def _is_there(level: Path) -> bool:
    return os.path.isdir(level)  # noqa: PTH112  Path.is_dir raises where it may not look


def _was_reached(level: Path) -> bool:
    """Whether the kernel has refused memory beyond this level's limit, and not only the node's."""
    refused = _text_of(level / "memory.failcnt").strip()
    return bool(_count(level / "memory.events", "oom")) or refused not in ("", "0")


def _count(file: Path, name: str) -> int | None:
    rows = (line.split() for line in _text_of(file).splitlines())
    return next((int(row[1]) for row in rows if row[:1] == [name] and len(row) == 2), None)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


@contextmanager
def collection_paused() -> Iterator[None]:
    """Disable the collector in this block. If two threads are inside, the first one enables it again."""
    ran = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ran:
            gc.enable()


@contextmanager
def paused_for_imports() -> Iterator[None]:
    """Disable the collector in this block, and then exclude all objects from later collections.

    For a process that has just started, and has no garbage that would stay too.
    """
    with collection_paused():
        yield
        gc.freeze()


def cache_folder(*names: str) -> Path:
    """$XDG_CACHE_HOME/shardrun, or ~/.cache/shardrun. RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "shardrun", *names)


# ---------------------------------------------------------------- files that may be anyone's

SETTINGS = 16 << 20
"""Of a file of settings, such as config.json, which has some kilobytes."""
TABLE = 256 << 20
"""Of a file with a line for each tensor, rank or token: an index of weights, a tokenizer.json."""


def read_regular(file: Path, most: int) -> bytes:
    """A file's content; ValueError for a FIFO or a device, and for more than `most` bytes."""
    with open(file, "rb", opener=_open_at_once) as stream:
        status = os.fstat(stream.fileno())
        if not stat_of.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        data = stream.read(most + 1) if status.st_size <= most else b""
    if max(status.st_size, len(data)) > most:
        raise ValueError(f"it has more than {byte_size(most)}")
    return data


def regular_text(file: Path, most: int) -> str:
    """The same as text in UTF-8."""
    return read_regular(file, most).decode()


def _open_at_once(path: str, flags: int) -> int:
    """O_NONBLOCK: opening a FIFO would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)
