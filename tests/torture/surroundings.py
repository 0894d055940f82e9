"""What a soak breaks around its run: the disk, the clock, the way to the object store.

Each is left out, with the reason, where this machine cannot have it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import fsspec

from fsdp.checkpoint.local_names import TOKEN
from tests.checkpoint.s3_server import KEYS, MISSING, program, s3_server

HERE = Path(__file__).parent
BUCKET = "soak"
NAME = f"{BUCKET}/run/{TOKEN}"
KEEPER = """
mount -o loop "$0" "$1" && echo mounted || exit 1
while read -r act; do fsfreeze "$act" "$1" && echo done; done
fsfreeze -u "$1" 2>/dev/null
"""


class Disk:
    """An ext4 of its own, in an image that lasts, mounted in a mount namespace that a shell keeps open."""

    def __init__(self, keeper: subprocess.Popen[str], inside: Path) -> None:
        self._keeper, self.inside = keeper, inside

    @property
    def outside(self) -> Path:
        """The same folder for this process."""
        return Path(f"/proc/{self._keeper.pid}/root{self.inside}")

    @property
    def enter(self) -> list[str]:
        return ["nsenter", f"--target={self._keeper.pid}", "--mount", f"--wdns={HERE.parents[1]}", "--"]

    def fill(self) -> None:
        """To the last byte."""
        with (self.outside / "ballast").open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size):
                        pass

    def free(self) -> None:
        (self.outside / "ballast").unlink(missing_ok=True)

    def freeze(self) -> None:
        self._do("-f")

    def thaw(self) -> None:
        self._do("-u")

    def _do(self, act: str) -> None:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        print(act, file=self._keeper.stdin, flush=True)
        if self._keeper.stdout.readline() != "done\n":
            raise OSError(f"fsfreeze {act} {self.inside} failed")


@contextlib.contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Disk | str]:
    """Why there is none, as text, where no image can be mounted here."""
    image, place = folder / "disk.img", folder / "disk"
    place.mkdir(exist_ok=True)
    if not shutil.which("mkfs.ext4") or not shutil.which("fsfreeze"):
        yield "mkfs.ext4 or fsfreeze is not installed (apt-get install e2fsprogs util-linux)"
        return
    if not image.exists():
        with image.open("wb") as file:
            file.truncate(mib << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    keep = ["unshare", "--mount", "sh", "-c", KEEPER, str(image), str(place)]
    with subprocess.Popen(
        keep,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C ends the soak, and this after it
    ) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        if keeper.stdout.readline() != "mounted\n":
            image.unlink()
            yield f"no mount namespace with a loop device here: {keeper.stderr.read().strip()}"
            return
        disk = Disk(keeper, place)
        disk.free()
        try:
            yield disk
        finally:
            keeper.stdin.close()


class Clock:
    """The time of day of the processes that have `environ`."""

    def __init__(self, file: Path, library: Path) -> None:
        self._file = file
        self.moved_s = struct.unpack("q", file.read_bytes())[0] if file.exists() else 0
        self._write()
        self.environ = {"LD_PRELOAD": str(library), "TORTURE_CLOCK": str(file)}

    def move(self, seconds: int) -> None:
        self.moved_s += seconds
        self._write()

    def _write(self) -> None:
        """In place: the file is mapped."""
        with self._file.open("r+b" if self._file.exists() else "w+b") as file:
            file.write(struct.pack("q", self.moved_s))


def own_clock(folder: Path) -> Clock | str:
    compiler = shutil.which("cc")
    if compiler is None:
        return "no C compiler (apt-get install gcc)"
    library = folder / "clock.so"
    words = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(HERE / "clock.c"), "-ldl"]
    done = subprocess.run(words, capture_output=True, text=True)
    return Clock(folder / "clock", library) if done.returncode == 0 else f"cc: {done.stderr.strip()[-300:]}"


class Door:
    """A port before the object store's. Shut, it ends every connection, and refuses new ones."""

    def __init__(self, url: str) -> None:
        server = urlsplit(url)
        self._server = (server.hostname or "", server.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._shut = threading.Event()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._serve, daemon=True).start()

    def shut(self) -> None:
        self._shut.set()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def open(self) -> None:
        self._shut.clear()

    def close(self) -> None:
        self.shut()
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                if self._shut.is_set():
                    client.close()
                    continue
                try:
                    server = socket.create_connection(self._server)
                except OSError:
                    client.close()
                    continue
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        self._open.add(source)
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._open.discard(source)
        source.close()


@contextlib.contextmanager
def object_store() -> Iterator[tuple[Door, str] | str]:
    """A server with a bucket behind a door, and the bucket's URL. Its objects are in memory."""
    if program() is None:
        yield MISSING
        return
    with s3_server() as url, contextlib.closing(Door(url)) as door:
        os.environ.update(KEYS, AWS_ENDPOINT_URL=door.url)
        fsspec.filesystem("s3").mkdir(BUCKET)
        yield door, f"s3://{BUCKET}"


@dataclass
class Surroundings:
    """Where the run lives. `left_out`: what cannot be broken here, and why."""

    folder: Path
    disk: Disk | None = None
    clock: Clock | None = None
    door: Door | None = None
    bucket: str = ""
    left_out: list[str] = field(default_factory=list)

    @property
    def outside(self) -> Path:
        """The run's folder, for this process."""
        return self.disk.outside if self.disk is not None else self.folder

    @property
    def inside(self) -> Path:
        """The same for the run."""
        return self.disk.inside if self.disk is not None else self.folder

    @property
    def enter(self) -> list[str]:
        return self.disk.enter if self.disk is not None else []

    def keep_name(self) -> None:
        """Of the folders on the node's own disk, which is kept in the store. A soak that is continued begins
        with an empty store, and with this name in it the run resumes from that disk.
        """
        if self.door is None:
            return
        store = fsspec.filesystem("s3")
        store.invalidate_cache()
        if store.exists(NAME):
            (self.folder / "name").write_bytes(store.cat_file(NAME))

    def put_name(self) -> None:
        if self.door is not None and (self.folder / "name").exists():
            fsspec.filesystem("s3").pipe_file(NAME, (self.folder / "name").read_bytes())

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, **(self.clock.environ if self.clock is not None else {})}


@contextlib.contextmanager
def surroundings(folder: Path, mib: int) -> Iterator[Surroundings]:
    found = Surroundings(folder)
    with small_disk(folder, mib) as disk, object_store() as store:
        clock = own_clock(folder)
        if isinstance(disk, str):
            found.left_out.append(f"full and stalled disk: {disk}")
        else:
            found.disk = disk
        if isinstance(clock, str):
            found.left_out.append(f"clock: {clock}")
        else:
            found.clock = clock
        if isinstance(store, str):
            found.left_out.append(f"object store: {store}")
        else:
            found.door, found.bucket = store
            found.put_name()
        yield found
