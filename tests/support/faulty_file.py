"""A file whose stat, open or read fails or lies: a FUSE mount over one file, served by a thread.

Over its own name, so the folder around it can be renamed as ever. The kernel caches what a read returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

FLIP = -1
Fault = Callable[[str], int]
"""From `stat`, `open` or `read` to an error number, FLIP for a wrong byte, or 0."""
_GETATTR, _OPEN, _READ, _INIT, _FORGET, _INTERRUPT, _BATCH_FORGET = 3, 14, 15, 26, 2, 36, 42
_DONE = {18, 25, 38}
"""RELEASE, FLUSH, DESTROY."""
_NOT_KNOWN, _KEEP_CACHE, _DETACH = 38, 2, 2


def missing() -> str:
    """Why no file can be mounted over here; empty if one can."""
    device = Path("/dev/fuse")
    if not os.access(device, os.R_OK | os.W_OK) or os.geteuid():
        return "no /dev/fuse that may be mounted here (as root, with modprobe fuse)"
    file = Path(f"/tmp/shardrun-fuse-{os.getpid()}")
    try:
        file.write_bytes(b"x")
        with faulty(file, lambda operation: 0):
            return "" if file.read_bytes() == b"x" else "FUSE answers wrongly"
    except OSError as error:
        return f"no FUSE mount here: {error}"
    finally:
        file.unlink()


def always(operation: str, number: int) -> Fault:
    return lambda called: number if called == operation else 0


def once(operation: str, number: int) -> Fault:
    left = [number]
    return lambda called: left.pop() if called == operation and left else 0


@contextlib.contextmanager
def faulty(file: Path, fault: Fault) -> Iterator[None]:
    data, libc = file.read_bytes(), ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=100644,user_id=0,group_id=0,allow_other"
    try:
        if libc.mount(b"faulty", os.fsencode(file), b"fuse", 0, options.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
        server = threading.Thread(target=_serve, args=(device, data, fault), daemon=True)
        server.start()
        root = os.open(file, os.O_PATH | os.O_CLOEXEC)  # a folder around it may be renamed
        try:
            yield
        finally:
            libc.umount2(f"/proc/self/fd/{root}".encode(), _DETACH)
            os.close(root)
            server.join(30)
    finally:
        os.close(device)


def _serve(device: int, data: bytes, fault: Fault) -> None:
    while True:
        try:
            request = os.read(device, 1 << 20)
        except OSError:  # unmounted
            return
        operation, unique = struct.unpack_from("<4xIQ", request)
        if operation in (_FORGET, _INTERRUPT, _BATCH_FORGET):
            continue
        number, answer = _answer(operation, request[40:], data, fault)
        with contextlib.suppress(FileNotFoundError):  # who asked was interrupted
            os.write(device, struct.pack("<IiQ", 16 + len(answer), -number, unique) + answer)


def _answer(operation: int, body: bytes, data: bytes, fault: Fault) -> tuple[int, bytes]:
    if operation == _INIT:
        return 0, struct.pack("<4I2H2I2HI28x", 7, 31, 1 << 17, 0, 1, 1, 1 << 17, 1, 0, 0, 0)
    if operation in _DONE:
        return 0, b""
    if operation not in (_GETATTR, _OPEN, _READ):
        return _NOT_KNOWN, b""
    number = fault({_GETATTR: "stat", _OPEN: "open", _READ: "read"}[operation])
    if number > 0:
        return number, b""
    if operation == _GETATTR:
        return 0, struct.pack(
            "<Q8x6Q10I", 0, 1, len(data), 1, 0, 0, 0, 0, 0, 0, 0o100644, 1, 0, 0, 0, 4096, 0
        )
    if operation == _OPEN:
        return 0, struct.pack("<QII", 0, _KEEP_CACHE, 0)
    offset, size = struct.unpack_from("<8xQI", body)
    part = bytearray(data[offset : offset + size])
    if number == FLIP:
        part[len(part) // 2] ^= 0x10
    return 0, bytes(part)
