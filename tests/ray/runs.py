"""The tiny run that these tests train, under Ray and under torchrun, as typed; and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.ray.cluster import REPOSITORY, Cluster, clean_environment
from tests.slurm import job
from tests.slurm.job import Run
from tests.support.processes import eventually
from tests.support.resumable import resumable_at

STEPS, EVERY = 24, 4
FLAGS = (
    "--model.name", "mlp", "--train.steps", str(STEPS), "--train.global_batch", "16",
    "--checkpoint.every_steps", str(EVERY), "--run.log_every_steps", "1", "--run.device", "cpu",
)  # fmt: skip
"""The nodes of tests/slurm have GPUs that only Slurm sees."""
SLOWLY = ("--data.name", "tests.slurm.slow:digits", "--data.args.seconds", "0.25")
HSDP = ("--mesh.strategy", "hsdp", "--mesh.replicate", "2", "--mesh.shard", "2")


class Driver:
    """`python train.py --backend ray …` while it runs."""

    def __init__(self, run: Path, *flags: str, cluster: Cluster | None = None, **variables: str) -> None:
        self.run = Run(run)
        address = ("--ray.address", cluster.address) if cluster and "RAY_ADDRESS" not in variables else ()
        command = [sys.executable, "train.py", "--backend", "ray", *address, *FLAGS, *flags]
        command += ["--run.dir", str(run)]
        # files, not pipes: a pipe that nobody reads while the test waits for a step would stop the run
        # Open as long as this object lives.
        self._out, self._err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.marker = f"SHARDRUN_TEST={run}"
        environment = (cluster.environment if cluster else clean_environment)(
            SHARDRUN_TEST=str(run), **variables
        )
        self.process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def until(self, step: int, starts: int = 1, timeout_s: float = 300) -> None:
        def there() -> bool:
            self._check_alive()
            return self.run.reaches(step, starts)

        eventually(f"step {step} of start {starts}", there, timeout_s, self.said)

    def until_resumable(self, step: int, timeout_s: float = 300) -> int:
        """The step that it has come to, `step` or a later one: an interval before it at most is sealed."""

        def there() -> int:
            self._check_alive()
            return resumable_at(self.run.path, step, EVERY)

        return eventually(f"step {step} and its checkpoint", there, timeout_s, self.said)

    def _check_alive(self) -> None:
        assert self.process.poll() is None, f"the driver ended with {self.process.poll()}\n{self.said()}"

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def wait(self, timeout_s: float = 300) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"not over after {timeout_s:.0f} s\n{self.said()}") from None

    def finish(self, timeout_s: float = 300) -> Run:
        assert self.wait(timeout_s) == 0, self.said()
        return self.run

    @property
    def out(self) -> str:
        return _all_of(self._out)

    @property
    def err(self) -> str:
        return _all_of(self._err)

    def said(self) -> str:
        return f"--- stdout\n{self.out}\n--- stderr\n{self.err}"


def _all_of(file: Any) -> str:
    file.flush()
    # A second descriptor with an offset of its own: the driver's must not move.
    with open(f"/proc/self/fd/{file.fileno()}") as again:  # noqa: PTH123
        return again.read()


def torchrun(run: Path, ranks: int, *flags: str) -> Run:
    """The same flags under torchrun."""
    return job.torchrun(run, ranks, *flags, of=FLAGS)


def check_whole(run: Run, undisturbed: Run) -> None:
    assert run.steps == list(range(1, STEPS + 1))
    assert run.losses == undisturbed.losses


def rank_pid(run: Run, rank: int) -> int:
    """The process of a rank of the newest start, from the name of the file that it speaks into."""
    newest = max(run.path.glob(f"logs/ray-*/rank-{rank}.*.err"), key=lambda path: path.stat().st_mtime_ns)
    return int(newest.name.split(".")[1].split("-")[1])
