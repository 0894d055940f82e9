"""hf:ORG/NAME that is not in the cache: downloaded once a node, without its weights where none are read; by
a stand-in of the hub on loopback.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.run.test_answers import CHATS, chat_model
from tests.tokenize.rows import write_lines

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]


class Handler(BaseHTTPRequestHandler):
    """Answers as the hub does for one model, org/name."""

    def do_GET(self) -> None:
        hub, path, head = self.server, self.path.partition("?")[0], {}
        assert isinstance(hub, Hub)
        files = {file.name: file.read_bytes() for file in sorted(hub.folder.iterdir())}
        name, body = path.removeprefix(f"/org/name/resolve/{COMMIT}/"), b""
        if "/tree/" in path:
            rows = [{"type": "file", "path": n, "size": len(b), "oid": COMMIT} for n, b in files.items()]
            body = json.dumps(rows).encode()
        elif path.startswith("/api/models/org/name"):
            facts = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": n} for n in files]}
            body = json.dumps(facts).encode()
        elif name in files:
            body = files[name]
            head = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
            hub.sent += [name] if self.command == "GET" else []
        self.send_response(200 if body else 404)
        for key, value in {**head, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


class Hub(ThreadingHTTPServer):
    def __init__(self, folder: Path) -> None:
        self.folder, self.sent = folder, list[str]()
        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(chat_model(tmp_path / "published")) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def start(home: Path, hub: Hub, words: list[str], **more: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(home / "hub")}
    environment |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(home / "cache"), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *words], cwd=home, env=environment | more, **pipes)


def test_processes_that_start_together_wait_for_one_that_downloads(tmp_path: Path, hub: Hub) -> None:
    find = ["-c", "from fsdp.models.hf import find_folder; print(find_folder('hf:org/name'))"]
    refused, _ = start(tmp_path, hub, find, HF_HUB_OFFLINE="1").communicate(timeout=100)
    assert "HINT: hf download org/name" in refused
    assert not hub.sent
    started = [start(tmp_path, hub, find) for _ in range(3)]
    folders = {one.communicate(timeout=100)[0].splitlines()[-1] for one in started}
    assert len(folders) == 1
    (folder,) = map(Path, folders)
    without_weights = {file.name for file in hub.folder.iterdir()} - {"model.safetensors"}
    assert {file.name for file in folder.iterdir()} == without_weights == {*hub.sent}
    assert len(hub.sent) == len(without_weights)


def test_a_run_downloads_the_model_once_and_a_run_directory_nothing(tmp_path: Path, hub: Hub) -> None:
    write_lines(tmp_path / "chats.jsonl", CHATS)
    flags = (
        f"{ROOT}/train.py --model.name hf:org/name --data.name chats.jsonl --data.seq_len 64 --run.dir run"
    )
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = start(tmp_path, hub, [*ranks, *flags.split(), "--train.steps", "1"])
    log, _ = done.communicate(timeout=200)
    assert done.returncode == 0, log
    published = {file.name for file in hub.folder.iterdir()}
    assert sorted(hub.sent) == sorted(published)
    assert published <= {file.name for file in (tmp_path / "run/full_model").iterdir()}
    (tmp_path / "hub").rename(tmp_path / "moved")
    done = start(tmp_path, hub, ["-m", "fsdp.checkpoint", "run", "export", "--out", "elsewhere"])
    log, _ = done.communicate(timeout=100)
    assert (done.returncode, len(hub.sent)) == (2, len(published)), log
