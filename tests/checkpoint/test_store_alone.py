"""--checkpoint.dir s3://… alone: runs on an S3 server, killed on one machine and continued on another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp.checkpoint import __main__ as checkpoints
from fsdp.checkpoint import inspect
from fsdp.checkpoint.store import ObjectStore, open_store
from fsdp.distributed.env import DistEnv
from launch.node import free_port
from tests.checkpoint import s3_server
from tests.checkpoint.dying_model import VARIABLE
from tests.support.processes import eventually
from tests.support.runs import flags, on_a_rank
from tests.support.world import run_world

pytestmark = pytest.mark.needs("s3")
ROOT = Path(__file__).parents[2]
ENDS_S = 300
"""Half a minute alone; minutes beside other workers."""
MORE = (
    "--model.name tests.checkpoint.dying_model:Dying --precision.master fp64 --train.steps 30 "
    "--checkpoint.every_steps 5 --checkpoint.mode blocking --run.log_every_steps 1"
)


@pytest.fixture
def url(server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix in a bucket of the test's own."""
    import fsspec

    s3_server.use(server, monkeypatch.setenv)
    bucket = "run-" + format(abs(hash(request.node.name)), "x")
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/runs/a"


def started(run: Path, url: str, *command: str, **variables: str) -> subprocess.Popen[str]:
    """A command that trains, with the run directory of its machine."""
    return subprocess.Popen(
        [sys.executable, *command, "--run.dir", str(run), "--checkpoint.dir", url],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def records(url: str, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ObjectStore(url).read_small(name) or b"").splitlines()]


def losses(lines: list[dict[str, Any]]) -> dict[int, float]:
    found = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert len(found) == sum("loss" in line for line in lines)
    return found


def train_on(env: DistEnv, server: str, words: list[str]) -> str | None:
    s3_server.use(server)
    return on_a_rank(env, words)


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_run_resumes_on_a_machine_without_its_run_directory(
    url: str, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The losses are those of an uninterrupted run, and the records those of both machines."""
    assert run_world(2, on_a_rank, [*flags(MORE), "--run.dir", str(tmp_path / "whole")]) == [None] * 2
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py", *flags(MORE)]
    with started(tmp_path / "one", url, *words, **{VARIABLE: "18"}) as process:
        said, _ = process.communicate(timeout=ENDS_S)
    assert process.returncode == 1, said
    assert set(losses(records(url, "metrics.jsonl"))) >= set(range(1, 16)), "of each step that is sealed"
    more = [*flags(MORE), "--run.dir", str(tmp_path / "two"), "--checkpoint.dir", url]
    assert run_world(3, train_on, server, more) == [None] * 3
    expected = losses([json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").open()])
    assert losses(records(url, "metrics.jsonl")) == pytest.approx(expected, rel=1e-12)
    history = records(url, "history.jsonl")
    starts = [one for one in history if one["event"] == "start"]
    assert [(one["ranks"], one["from_step"]) for one in starts] == [(2, 0), (3, 15)]
    assert history[-1]["event"] == "end"

    capsys.readouterr()
    assert checkpoints.main([url]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["30", "25", "20"]
    assert checkpoints.main([url, "export"]) == 2
    assert "HINT: --out FOLDER" in capsys.readouterr().err
    out = tmp_path / "full"
    assert checkpoints.main([url, "export", "--out", str(out), "--format", "safetensors"]) == 0
    assert (out / "model-00001-of-00001.safetensors").exists()
    assert checkpoints.main([url, "prune", "--keep-last", "2"]) == 0
    assert [found.step for found in inspect.scan(open_store(url))] == [30, 25]


@pytest.mark.long
def test_a_second_writer_of_a_prefix_is_refused(url: str, tmp_path: Path) -> None:
    words = ["train.py", *flags(MORE), "--train.steps", "1000000"]
    with started(tmp_path / "one", url, *words) as first:
        eventually("a sealed step", lambda: records(url, "metrics.jsonl"), ENDS_S)
        with started(tmp_path / "two", url, *words) as second:
            said, _ = second.communicate(timeout=ENDS_S)
        assert second.returncode == 4
        assert f"{url} is being written by process {first.pid} on " in said
        assert "HINT: another --checkpoint.dir" in said
        assert checkpoints.main([url, "prune", "--keep-last", "1"]) == 4
        (tmp_path / "one" / "STOP").touch()
        said, _ = first.communicate(timeout=ENDS_S)
    assert first.returncode == 0, said


@pytest.mark.slow
@pytest.mark.long
def test_two_nodes_that_share_no_folder(url: str, tmp_path: Path) -> None:
    meeting = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    meeting += [f"--master-port={free_port(os.getpid())}"]
    words = ("-m", "torch.distributed.run", *meeting)
    nodes = []
    for rank in (0, 1):
        machine = tmp_path / f"node{rank}"
        machine.mkdir()
        command = (*words, f"--node-rank={rank}", str(ROOT / "train.py"), *flags(MORE))
        nodes.append(
            subprocess.Popen(
                [sys.executable, *command, "--run.dir", "run", "--checkpoint.dir", url],
                cwd=machine,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    said = [node.communicate(timeout=ENDS_S)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert set(losses(records(url, "metrics.jsonl"))) == set(range(1, 31))
