"""What a soak breaks: the disk, the clock, the way to an object store."""

from __future__ import annotations

import http.client
import http.server
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from tests.torture.surroundings import Disk, Door, own_clock, small_disk

TIMES = """
import sys, threading, time
for line in sys.stdin:
    began = time.monotonic()
    threading.Event().wait(0.05)
    print(time.time(), time.monotonic() - began, flush=True)
"""


def test_a_clock_jumps_for_the_processes_that_have_it(tmp_path: Path) -> None:
    clock = own_clock(tmp_path)
    if isinstance(clock, str):
        pytest.skip(clock)
    with subprocess.Popen(
        [sys.executable, "-c", TIMES],
        env={**os.environ, **clock.environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for moved in (0, 7200, -3600):
            clock.move(moved - clock.moved_s)
            print(file=process.stdin, flush=True)
            now, waited = map(float, process.stdout.readline().split())
            assert abs(now - time.time() - moved) < 60
            assert 0.05 <= waited < 30
        process.stdin.close()
    again = own_clock(tmp_path)
    assert not isinstance(again, str)
    assert again.moved_s == -3600


def test_a_disk_is_full_to_the_last_byte_and_is_the_same_when_it_is_mounted_again(tmp_path: Path) -> None:
    for kept in (False, True):
        with small_disk(tmp_path, 16) as disk:
            if isinstance(disk, str):
                pytest.skip(disk)
            assert isinstance(disk, Disk)
            assert (disk.outside / "kept").exists() == kept
            (disk.outside / "kept").touch()
            disk.fill()
            with pytest.raises(OSError, match="No space left"):
                (disk.outside / "more").write_bytes(b"x" * 8192)
            disk.free()
            (disk.outside / "more").write_bytes(b"x" * 8192)
            (disk.outside / "more").unlink()
            disk.freeze()
            disk.thaw()


def test_a_door_that_is_shut_refuses_and_passes_again_when_it_is_open() -> None:
    class Hello(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *args: object) -> None:
            return None

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with closing(Door(f"http://127.0.0.1:{server.server_address[1]}")) as door:
        for _ in range(2):
            assert urllib.request.urlopen(door.url, timeout=30).read() == b"hello"
            door.shut()
            with pytest.raises((urllib.error.URLError, ConnectionError, http.client.HTTPException)):
                urllib.request.urlopen(door.url, timeout=30)
            door.open()
    server.shutdown()
    server.server_close()
