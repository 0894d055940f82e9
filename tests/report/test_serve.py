"""The live page: what is served, to whom, that it follows the run, and how it ends."""

from __future__ import annotations

import http.client
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp.base.errors import ConfigError
from fsdp.checkpoint.run_source import RunSource
from fsdp.report import serve
from fsdp.report.__main__ import live_page, main
from tests.report.test_report import made

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made(tmp_path / "night")


@pytest.fixture
def port(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(serve, "REFRESH_S", 0)
    with serve.server_of(lambda: live_page([RunSource(run)])) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield int(server.server_address[1])
        server.shutdown()
        thread.join()


def answer(
    port: int, path: str = "/", host: str = "", method: str = "GET"
) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    found = connection.getresponse()
    text = found.read().decode()
    connection.close()
    return found.status, text, found.headers


def test_the_page_follows_the_run(port: int, run: Path) -> None:
    status, text, headers = answer(port)
    assert status == 200
    assert '<meta http-equiv="refresh" content="5">' in text
    assert headers["Cache-Control"] == "no-store"
    assert "<dd>199</dd>" in text
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 250, "loss": 0.5}\n')
    assert "<dd>250</dd>" in answer(port)[1]


def test_no_other_file_is_served(port: int) -> None:
    for path in ("/config.toml", "/../night/config.toml", "/?x", "/report.html"):
        assert answer(port, path)[0] == 404, path
    assert answer(port, "/favicon.ico")[:2] == (204, "")  # an error in the browser's console without it
    assert answer(port, method="POST")[0] == 501
    status, text, _ = answer(port, method="HEAD")
    assert (status, text) == (200, "")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example:80"])
def test_another_name_that_leads_here_gets_nothing(port: int, host: str) -> None:
    """A page elsewhere can make its own name lead to this address."""
    assert answer(port, host=host)[0] == 403


def test_a_run_that_is_gone_is_a_line(port: int, run: Path) -> None:
    for file in run.iterdir():
        file.unlink()
    status, text, headers = answer(port)
    assert status == 500
    assert "is not a run directory" in text
    assert headers.get_content_type() == "text/plain"
    assert headers["Refresh"] == str(
        serve.REFRESH_S
    )  # a store that does not answer once must not end the page


def test_a_browser_that_leaves_while_the_page_is_sent_is_no_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with serve.server_of(lambda: "x" * (64 << 20)) as server:
        server.daemon_threads = False  # server_close waits for the answer's thread
        ours = socket.create_connection(("127.0.0.1", server.server_port))
        ours.sendall(b"GET / HTTP/1.1\r\nHost: localhost:1\r\n\r\n")
        server.handle_request()
        assert ours.recv(1) == b"H"
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ours.close()
    assert capfd.readouterr() == ("", "")


def test_only_the_loopback_address_listens() -> None:
    with serve.server_of(lambda: "") as server:
        assert server.server_address[0] == "127.0.0.1"


def test_a_page_is_made_once_for_many_requests() -> None:
    made_for: list[int] = []

    def made() -> str:
        made_for.append(1)
        return ""

    page = serve.LivePage(made)
    assert page.read() == page.read()
    assert len(made_for) == 1


@pytest.mark.slow
def test_ctrl_c_ends_it_with_one_line(run: Path) -> None:
    command = [sys.executable, "-m", "fsdp.report", str(run), "--serve"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's job in the background ignores SIGINT, and so does what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/  Ctrl-C stops it\n", first)
            assert found, first
            assert answer(int(found[1]))[0] == 200
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, out.strip(), err) == (0, "fsdp.report: stopped", "")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((), "no run was named"),
        (("A", "--serve", "--out", "x.html"), "--out x.html and --serve"),
        (("A", "B", "C"), "3 runs were named without --out"),
    ],
)
def test_flags_that_do_not_go_together(
    flags: tuple[str, ...], problem: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run) if flag in "ABC" else flag for flag in flags]) == ConfigError.exit_code
    line = capsys.readouterr().err
    assert problem in line
    assert "HINT:" in line
