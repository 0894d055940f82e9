"""python -m fsdp.tokenize: the same bytes at any number of processes, and after kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fsdp.base.errors import ConfigError, ShardrunError
from fsdp.tokenize.conversations import DocumentOptions
from fsdp.tokenize.shards import Tokenized, TokenizeJob, read_index, tokenize, tokenize_in_child
from tests.tokenize.rows import bytes_in, texts, write_lines

ROOT = Path(__file__).parents[2]


def quiet(done: int, shards: int, total: Tokenized) -> None: ...


def made(source: Path, out: Path, workers: int = 1, **fields: object) -> Tokenized:
    job = TokenizeJob(str(source), **{"shard_bytes": 2000, **fields})  # type: ignore[arg-type]
    return tokenize(job, out, workers, quiet)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_documents_in_order_each_with_an_end(tmp_path: Path) -> None:
    found = made(write_lines(tmp_path / "a.jsonl", texts(200)), tmp_path / "out", heldout=0.1)
    assert (found.documents, found.empty) == (200, 0)
    ours = [row["text"].encode() + b"\0" for row in texts(200)]
    both = bytes_in(tmp_path / "out", "train") + bytes_in(tmp_path / "out", "val")
    assert sorted(both.split(b"\0")) == sorted(b"".join(ours).split(b"\0"))
    assert bytes_in(tmp_path / "out", "train").startswith(b"".join(ours[:9]))
    assert 10 <= bytes_in(tmp_path / "out", "val").count(b"\0") <= 20


def test_the_index_finds_each_document(tmp_path: Path) -> None:
    made(write_lines(tmp_path / "a.jsonl", texts(20)), tmp_path / "out", heldout=0.0, shard_bytes=1 << 20)
    lengths, starts = read_index(tmp_path / "out" / "train-00000.idx")
    tokens = np.fromfile(tmp_path / "out" / "train-00000.bin", "<u2")
    for n, row in enumerate(texts(20)):
        first = starts[n] // 2
        assert bytes(tokens[first : first + lengths[n] - 1].astype(np.uint8)).decode() == row["text"]


@pytest.mark.parametrize("workers", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_any_number_of_processes_writes_the_same_bytes(workers: int, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(500))
    made(source, tmp_path / "one")
    made(source, tmp_path / "many", workers)
    assert len(list((tmp_path / "one").glob("*.done"))) > 5
    assert contents(tmp_path / "one") == contents(tmp_path / "many")


def test_a_killed_start_continues_and_keeps_finished_shards(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(4000))
    made(source, tmp_path / "whole")
    job = "fsdp.tokenize.shards.TokenizeJob(sys.argv[1], shard_bytes=2000)"
    code = (
        "import sys, os, pathlib, fsdp.tokenize.shards\n"
        "def show(done, shards, total):\n"
        "    print(done, flush=True)\n"
        "    if done == 3: sys.stdin.read()\n"
        f"fsdp.tokenize.shards.tokenize({job}, pathlib.Path(sys.argv[2]), 1, show)"
    )
    out = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(source), str(out)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "3":
            pass
        os.kill(process.pid, signal.SIGKILL)
    kept = {path: path.stat().st_mtime_ns for path in out.glob("train-*.bin")}
    assert len(kept) >= 3
    seen: list[int] = []
    tokenize(TokenizeJob(str(source), shard_bytes=2000), out, 1, lambda done, *_: seen.append(done))
    assert seen[0] == 3
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert contents(out) == contents(tmp_path / "whole")


def test_another_source_or_flag_is_refused_in_a_begun_folder(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(5))
    made(source, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"holds tokens of another source, .* HINT: another folder"):
        made(source, tmp_path / "out", options=DocumentOptions(text="id"))
    with pytest.raises(ConfigError, match=r"is not empty, and tokenize.json is not in it"):
        made(source, tmp_path)
    (tmp_path / "out" / "tokenize.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"holds tokens of another source"):
        made(source, tmp_path / "out")


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", texts(300))

    def write_more(done: int, shards: int, total: Tokenized) -> None:
        write_lines(source, texts(301))

    with pytest.raises(ConfigError, match=r"a.jsonl changed while it was tokenized\. HINT: start again when"):
        tokenize(TokenizeJob(str(source)), tmp_path / "out", 1, write_more)


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
    assert (done.returncode, done.stderr.splitlines()[-1].split("  ")[:2]) == (0, ["1/1 shards", "8 tokens"])
    assert done.stdout == f"{out}: 8 tokens, 2 documents, 1 rows without a token to train on left out\n"
    assert bytes_in(tmp_path / "out", "train") == b"one\0two\0"


def test_memory_that_runs_out_while_a_run_tokenizes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = TokenizeJob(str(write_lines(tmp_path / "a.jsonl", texts(3))))
    killed: subprocess.CompletedProcess[str] = subprocess.CompletedProcess([], -signal.SIGKILL, stdout="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: killed)
    with pytest.raises(ShardrunError, match=r"a\.jsonl was killed, as when memory runs out\. HINT: "):
        tokenize_in_child(job, tmp_path / "out")
