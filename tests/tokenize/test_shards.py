"""python -m fsdp.tokenize: the same bytes at any number of processes, and after kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp.base.errors import ConfigError
from fsdp.tokenize import shards
from fsdp.tokenize.conversations import DocumentOptions
from fsdp.tokenize.shards import TokenizeJob, Totals, tokenize
from tests.tokenize.rows import bytes_in, texts, write_lines

ROOT = Path(__file__).parents[2]


def made(source: Path, out: Path, workers: int = 1, **fields: object) -> Totals:
    job = TokenizeJob(str(source), **{"shard_bytes": 2000, **fields})  # type: ignore[arg-type]
    return tokenize(job, out, workers)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(500))
    made(source, tmp_path / "one")
    made(source, tmp_path / "many", 2)
    assert len(list((tmp_path / "one").glob("*.done"))) > 5
    assert contents(tmp_path / "one") == contents(tmp_path / "many")


def test_a_killed_start_continues_and_keeps_finished_shards(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(1500))
    made(source, tmp_path / "whole")
    out = tmp_path / "out"
    code = (
        "import sys, pathlib, fsdp.tokenize.shards as shards\n"
        "job = shards.TokenizeJob(sys.argv[1], shard_bytes=2000)\n"
        "shards.tokenize(job, pathlib.Path(sys.argv[2]), 1)"
    )
    command = [sys.executable, "-c", code, str(source), str(out)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        while len(list(out.glob("*.done"))) < 3:
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
    assert not (out / "tokenize.json").read_text().count("fingerprint")
    finished = {path: path.stat().st_mtime_ns for path in out.glob("*.done")}
    made(source, out)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert contents(out) == contents(tmp_path / "whole")


def test_another_source_or_flag_is_refused_in_a_begun_folder(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(5))
    made(source, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"holds tokens of another source, .* HINT: another folder"):
        made(source, tmp_path / "out", options=DocumentOptions(text="id"))
    with pytest.raises(ConfigError, match=r"cannot be used: .*tokenize.json.* HINT: another folder"):
        made(source, tmp_path)
    (tmp_path / "out" / "tokenize.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"cannot be used: "):
        made(source, tmp_path / "out")


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(300))
    write_index = shards.index_bytes

    def write_more(*arguments: Any) -> bytes:
        write_lines(source, texts(301))
        return write_index(*arguments)

    monkeypatch.setattr(shards, "index_bytes", write_more)
    with pytest.raises(ConfigError, match=r"a.jsonl changed while it was tokenized\. HINT: start again when"):
        made(source, tmp_path / "out", shard_bytes=1 << 20)


def test_an_error_in_a_worker_is_one_line(tmp_path: Path) -> None:
    rows = texts(300)
    rows[200] = {"id": 200}
    source = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError) as caught:
        made(source, tmp_path / "out", 2)
    assert "a.jsonl line 201 has no column text; its columns are id. HINT: " in str(caught.value)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fsdp.tokenize", *words], cwd=ROOT, capture_output=True, text=True
    )


def test_the_command(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"body": "one"}, {"body": ""}, {"body": "two"}])
    out = str(tmp_path / "out")
    done = command(str(source), out)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"fsdp.tokenize: {source} line 1 has no column text; its columns are body. HINT: --text body"
    )
    done = command(str(source), out, "--text", "body", "--heldout", "0")
    assert (done.returncode, "tokenized 1/1 shards" in done.stderr) == (0, True)
    assert done.stdout == f"{out}: 8 tokens, 2 documents\n"
    left_out = ["1 row left out, without a token to train on:", f"  {source} line 2: it has no text"]
    assert done.stderr.splitlines()[-2:] == left_out
    assert bytes_in(tmp_path / "out", "train") == b"one\0two\0"
