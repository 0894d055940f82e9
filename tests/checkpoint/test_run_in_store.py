"""--run.dir s3://…: real runs on an S3 server, killed on one machine and continued on another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp.checkpoint.object_store import ObjectStore
from fsdp.dist.env import DistEnv
from tests.checkpoint import s3_server
from tests.checkpoint.dying_model import VARIABLE
from tests.support.processes import eventually
from tests.support.runs import flags, on_a_rank
from tests.support.world import run_world

pytestmark = pytest.mark.needs("s3")
ROOT = Path(__file__).parents[2]
ENDS_S = 300
"""Half a minute alone; minutes beside other workers."""
TORCHRUN = ("torch.distributed.run", "--standalone")
MORE = (
    "--model.name tests.checkpoint.dying_model:Dying --precision.master fp64 --train.steps 30 "
    "--checkpoint.every_steps 5 --checkpoint.mode blocking --run.log_every_steps 1"
)


@pytest.fixture
def url(server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run directory in a bucket of the test's own."""
    import fsspec

    s3_server.use(server, monkeypatch.setenv)
    bucket = "run-" + format(abs(hash(request.node.name)), "x")
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/runs/a"


def started(machine: Path, url: str, *command: str, **variables: str) -> subprocess.Popen[str]:
    """A command that trains, on a machine with this cache."""
    return subprocess.Popen(
        [sys.executable, *command, "--run.dir", url],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(machine), **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def torchrun(machine: Path, url: str, ranks: int, *more: str, **variables: str) -> tuple[int, str]:
    words = ["-m", *TORCHRUN, f"--nproc-per-node={ranks}", "train.py", *flags(MORE), *more]
    with started(machine, url, *words, **variables) as process:
        said, _ = process.communicate(timeout=ENDS_S)
    return process.returncode, said


def records(url: str, name: str) -> list[dict[str, Any]]:
    found = ObjectStore(url).get(name)
    return [json.loads(line) for line in found.data.splitlines()] if found is not None else []


def losses(lines: list[dict[str, Any]]) -> dict[int, float]:
    found = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert len(found) == sum("loss" in line for line in lines)
    return found


def train_on(env: DistEnv, server: str, machine: str, words: list[str]) -> str | None:
    s3_server.use(server)
    os.environ["XDG_CACHE_HOME"] = machine
    try:
        return on_a_rank(env, words)
    finally:
        del os.environ["XDG_CACHE_HOME"]


def losses_in(run: Path) -> dict[int, float]:
    return losses([json.loads(line) for line in (run / "metrics.jsonl").open()])


def test_another_machine_and_number_of_ranks_resumes(url: str, server: str, tmp_path: Path) -> None:
    words = [*flags(MORE), "--run.dir"]
    assert run_world(2, on_a_rank, [*words, str(tmp_path / "whole")]) == [None] * 2
    parted = [*words, url, "--train.stop_after"]
    assert run_world(2, train_on, server, str(tmp_path / "one"), [*parted, "15"]) == [None] * 2
    assert run_world(3, train_on, server, str(tmp_path / "two"), [*parted, "0"]) == [None] * 3
    expected = losses_in(tmp_path / "whole")
    assert losses(records(url, "metrics.jsonl")) == pytest.approx(expected, rel=1e-12)
    starts = [one for one in records(url, "history.jsonl") if one["event"] == "start"]
    assert [(one["ranks"], one["from_step"]) for one in starts] == [(2, 0), (3, 15)]


@pytest.mark.slow
@pytest.mark.long
def test_a_run_killed_in_a_step_continues_on_another_machine(url: str, tmp_path: Path) -> None:
    whole = ["--run.dir", str(tmp_path / "whole"), *flags(MORE)]
    assert run_world(2, on_a_rank, whole) == [None] * 2
    expected = losses_in(tmp_path / "whole")
    code, said = torchrun(tmp_path / "one", url, 2, **{VARIABLE: "18"})
    assert code == 1, said
    assert set(losses(records(url, "metrics.jsonl"))) >= set(range(1, 16)), "of each step that is sealed"
    code, said = torchrun(tmp_path / "two", url, 3)
    assert code == 0, said
    assert "resumes from step 15" in said
    assert f"finished at step 30: {url}\n" in said
    assert losses(records(url, "metrics.jsonl")) == pytest.approx(expected, rel=1e-12)
    starts = [one for one in records(url, "history.jsonl") if one["event"] == "start"]
    assert [(one["ranks"], one["from_step"]) for one in starts] == [(2, 0), (3, 15)]
    names = {name for name in ObjectStore(url).objects() if not name.startswith("checkpoints/")}
    assert names >= {"config.toml", "DONE", "saves.jsonl", "full_model/full-model.pt"}
    assert "CLAIM" not in names
    # the next command of the summary
    again = next(line for line in said.splitlines() if "# trains further" in line).partition("   #")[0]
    assert f"--config {url}/config.toml --run.dir {url}" in again
    words = again.replace("--train.steps 60", "--train.steps 31").split()[1:]
    with started(tmp_path / "two", url, "-m", *TORCHRUN, *words) as process:
        said, _ = process.communicate(timeout=ENDS_S)
    assert process.returncode == 0, said
    assert "resumes from step 30" in said
    assert "changed since the last start: train.steps: 30 → 31" in said


@pytest.mark.slow
@pytest.mark.long
def test_a_second_job_is_refused_and_a_stop_object_stops_the_first(url: str, tmp_path: Path) -> None:
    words = ["train.py", *flags(MORE), "--train.steps", "1000000"]
    with started(tmp_path / "one", url, *words) as first:
        eventually("a sealed step", lambda: records(url, "metrics.jsonl"), ENDS_S)
        with started(tmp_path / "two", url, *words) as second:
            said, _ = second.communicate(timeout=ENDS_S)
        assert second.returncode == 4
        assert f"train.py: {url} is being written by process {first.pid} on " in said
        assert said.rstrip().endswith("HINT: another --run.dir, or end that job")
        assert not (tmp_path / "two" / "shardrun" / "runs").exists()
        ObjectStore(url).put("STOP", [b""])
        said, _ = first.communicate(timeout=ENDS_S)
    assert first.returncode == 0, said
    assert "stopped by the stop file at step" in said
    names = ObjectStore(url).objects()
    assert "STOPPED" in names
    assert "STOP" not in names
    assert [one["event"] for one in records(url, "history.jsonl")] == ["start", "end"]


def test_a_run_without_its_bucket_is_one_line(url: str, tmp_path: Path) -> None:
    url = url.replace("s3://run-", "s3://absent-")
    with started(tmp_path, url, "train.py", *flags(MORE)) as process:
        said, _ = process.communicate(timeout=ENDS_S)
    assert process.returncode == 4
    assert said.splitlines()[-1].startswith(f"train.py: {url} cannot be written: ")
    assert "HINT: --run.dir FOLDER that is writable" in said
