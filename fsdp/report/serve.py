"""Serves a page of runs in progress to this machine: made again when it is old, loaded again by the browser.

The server listens on the loopback address, on a free port. It answers GET and HEAD of `/` alone, and only
under the names of the loopback address: a page elsewhere that makes its own name lead here gets nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fsdp.base.errors import ShardrunError

HOST = "127.0.0.1"
REFRESH_S = 5
NAMES = (HOST, "localhost")


class LivePage:
    """The page, made at most once in REFRESH_S seconds, by one thread."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._text, self._made_at = b"", float("-inf")

    def read(self) -> bytes:
        with self._lock:
            if time.monotonic() - self._made_at >= REFRESH_S:
                self._text = self._make().encode("utf-8", "replace")
                self._made_at = time.monotonic()
            return self._text


def server_of(make: Callable[[], str]) -> ThreadingHTTPServer:
    """A server that listens already; its address is `server_address`."""
    page = LivePage(make)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, kind = self._answer()
            with suppress(ConnectionError):  # the browser has closed the page, or loads it again
                self._send(status, body, kind)

        do_HEAD = do_GET

        def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if status == HTTPStatus.INTERNAL_SERVER_ERROR:  # the page itself has it in its head
                self.send_header("Refresh", str(REFRESH_S))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def _answer(self) -> tuple[HTTPStatus, bytes, str]:
            if (self.headers.get("Host") or "").rpartition(":")[0] not in NAMES:
                return HTTPStatus.FORBIDDEN, b"another name than localhost\n", "text/plain"
            if self.path == "/favicon.ico":  # browsers ask for it, and log an error without one
                return HTTPStatus.NO_CONTENT, b"", "image/x-icon"
            if self.path != "/":
                return HTTPStatus.NOT_FOUND, b"only / is served\n", "text/plain"
            try:
                return HTTPStatus.OK, page.read(), "text/html"
            except (ShardrunError, OSError) as error:
                return HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n".encode(), "text/plain"

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not printed."""

    return ThreadingHTTPServer((HOST, 0), Handler)


def serve(make: Callable[[], str]) -> None:
    """Until Ctrl-C."""
    with server_of(make) as server:
        print(f"http://{HOST}:{server.server_address[1]}/  Ctrl-C stops it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nfsdp.report: stopped", flush=True)
