"""A server of the S3 protocol for tests, and a proxy before it that sometimes answers 503.

The server is moto's, in an environment of its own (its botocore is not aiobotocore's): SHARDRUN_MOTO names
the program, or it lies under .cache/moto, where this makes it:

    python -m venv .cache/moto && .cache/moto/bin/pip install 'moto[server]==5.2.5'
"""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEYS = {
    "AWS_ACCESS_KEY_ID": "test-key-id",
    "AWS_SECRET_ACCESS_KEY": "do-not-print-me",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def use(url: str, setenv: Callable[[str, str], None] = os.environ.__setitem__) -> None:
    """Directs fsspec in this process to that server; for a test alone with monkeypatch.setenv."""
    import fsspec

    for name, value in {**KEYS, "AWS_ENDPOINT_URL": url}.items():
        setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def program() -> Path | None:
    place = Path(os.environ.get("SHARDRUN_MOTO") or ROOT / ".cache/moto/bin/moto_server")
    return place if place.exists() else None


MISSING = (
    "no moto_server: SHARDRUN_MOTO names none and .cache/moto has none (see tests/checkpoint/s3_server.py)"
)


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a server on a free port."""
    command = [str(program()), "-H", "127.0.0.1", "-p", "0"]
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                found = re.search(r"Running on (http://127\.0\.0\.1:\d+)", line)
                if found:
                    break
            else:
                raise RuntimeError("moto_server ended before it was ready")
            # A pipe that nobody reads fills, and the server would wait for ever.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield found[1]
        finally:
            process.kill()


@contextmanager
def busy_proxy(url: str, every: int) -> Iterator[tuple[str, list[str]]]:
    """A proxy that answers 503 to every `every`-th request; yields its URL and those requests."""
    counter, lock = iter(range(1, 1 << 30)), threading.Lock()

    def busy(request: BaseHTTPRequestHandler) -> bool:
        with lock:
            return next(counter) % every == 0

    with _proxy(url, busy, 503, "ServiceUnavailable") as found:
        yield found


@contextmanager
def expiring_proxy(url: str, expired: Collection[str]) -> Iterator[str]:
    """A proxy that refuses requests signed with one of these key ids, as S3 does for an expired token."""

    def is_expired(request: BaseHTTPRequestHandler) -> bool:
        return any(f"Credential={key}/" in request.headers.get("Authorization", "") for key in expired)

    with _proxy(url, is_expired, 400, "ExpiredToken") as (found, _):
        yield found


@contextmanager
def _proxy(
    url: str, refuses: Callable[[BaseHTTPRequestHandler], bool], status: int, code: str
) -> Iterator[tuple[str, list[str]]]:
    host = url.removeprefix("http://")
    refused: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if refuses(self):
                refused.append(f"{self.command} {self.path}")
                self.answer(
                    status, {}, f"<Error><Code>{code}</Code><Message>refused</Message></Error>".encode()
                )
                return
            upstream = http.client.HTTPConnection(host, timeout=60)
            upstream.request(self.command, self.path, body, dict(self.headers.items()))
            reply = upstream.getresponse()
            self.answer(reply.status, dict(reply.getheaders()), reply.read())
            upstream.close()

        def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "date", "server") and (
                    name.lower() != "content-length" or self.command == "HEAD"
                ):
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            return None

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = serve

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", refused
    finally:
        server.shutdown()
        server.server_close()
