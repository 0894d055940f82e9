"""What happens to jobs on a Slurm: each function brings one up, does it, and returns what is left for the
tests to look at.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.slurm.cluster import REPOSITORY, Cluster, Shape
from tests.slurm.job import FLAGS, Job, Run, sbatch, torchrun

SLOWLY = {"SLOW_S": "0.4"}


@dataclass(frozen=True)
class Left:
    """One job after its scenario: the run directory stays, the cluster is gone."""

    run: Run
    state: str
    log: str
    restarts: int
    reached: int = 0
    """The step at which it happened."""
    code: int = 0
    """The job's own exit code, as Slurm keeps it."""


def left(job: Job, reached: int = 0) -> Left:
    """Wait for the job's end and keep what scontrol and the log say."""
    state = job.wait()
    facts = job.cluster.job(job.id)
    return Left(
        job.run, state, job.log(), int(facts["Restarts"]), reached, int(facts["ExitCode"].partition(":")[0])
    )


# ---------------------------------------------------------------- both modes, at once


def both_modes(folder: Path) -> dict[str, Left]:
    """Two jobs of four ranks, submitted together, on the same two nodes."""
    with Cluster(folder / "slurm") as cluster:
        jobs = {
            "torchrun": sbatch(cluster, folder / "torchrun", ranks=2),
            "srun": sbatch(cluster, folder / "srun", ranks=2, env={"LAUNCHER": "srun"}),
        }
        return {name: left(job) for name, job in jobs.items()}


# ---------------------------------------------------------------- stopped by the scheduler


def told(folder: Path) -> dict[str, Left]:
    """A deadline with no signal before it, and signals to the batch shell alone, of one job that scontrol
    does not requeue. The names of the nodes have addresses of a second network, each its interface's second.
    """
    unwilling = folder / "bin" / "scontrol"
    unwilling.parent.mkdir()
    unwilling.write_text(f'#!/bin/sh\n[ "$1" != requeue ] && exec {shutil.which("scontrol")} "$@"\n')
    unwilling.chmod(0o755)
    slow = {"SLOW_S": "1", "SLOW_STARTS": "1"}
    with Cluster(folder / "slurm", Shape(nodes=4)) as cluster:
        for number, node in enumerate(cluster.nodes, start=1):
            cluster.on_node(node, "ip", "addr", "add", f"10.88.0.{number}/24", "dev", "eth0")
        cluster.names(True, network="10.88.0")
        path = f"{unwilling.parent}:{cluster.environment()['PATH']}"
        options, env = ("--nodes=1", "--time=2", "--signal=URG@1"), {**slow, "SLOW_S": "4"}
        jobs = {
            # 40 steps of 4 s do not fit; half a minute passes before the first, on a busy machine
            "deadline": sbatch(cluster, folder / "1", *options, env=env),
            "batch": sbatch(cluster, folder / "2", "--nodes=2", env=slow),
            "unwilling": sbatch(
                cluster, folder / "3", "--nodes=1", "--time=9", env={"SLOW_S": "1", "PATH": path}
            ),
        }
        for name in ("batch", "unwilling"):
            jobs[name].until_resumable(13)
            cluster.run("scancel", "--batch", "--signal=USR1", jobs[name].id)
        ends = {name: left(job) for name, job in jobs.items()}
        if submitted := re.search(r"Submitted batch job (\d+)", ends["unwilling"].log):
            ends["new"] = left(Job(cluster, submitted[1], jobs["unwilling"].run))
        return ends


def interactive(folder: Path) -> Left:
    """The job script in the shell of salloc, with a limit that it does not fit in."""
    with Cluster(folder / "slurm") as cluster:
        script, run = str(REPOSITORY / "slurm" / "fsdp.sbatch"), Run(folder / "run")
        done = cluster.run(
            *("salloc", "--nodes=1", "--ntasks-per-node=1", "--time=2", "bash", script, *FLAGS),
            *("--run.dir", str(run.path)),
            env={"SLOW_S": "5"},
            check=False,
            timeout_s=240,
        )
        return Left(run, cluster.job("1")["JobState"], done.stdout + done.stderr, 0, code=done.returncode)


@dataclass(frozen=True)
class Suspended:
    second: Left
    first: Left
    second_s: float
    before: dict[str, bytes]
    after: dict[str, bytes]


def suspended(folder: Path) -> Suspended:
    """A job whose processes Slurm has stopped, and another that begins and ends on its run directory."""
    run = folder / "run"
    flags = [*FLAGS, "--run.dir", str(run)]

    def kept() -> dict[str, bytes]:
        """What only a start or an end changes."""
        names = ("history.jsonl", "config.toml", "STOPPED", "FAILED", "DONE")
        return {name: (run / name).read_bytes() for name in names if (run / name).exists()}

    with Cluster(folder / "slurm") as cluster:
        env = {**SLOWLY, "SLOW_STARTS": "1"}
        first = sbatch(cluster, folder / "first", "--nodes=1", flags=flags, env=env)
        first = Job(cluster, first.id, Run(run))
        first.until_step(4)
        cluster.run("scontrol", "suspend", first.id)
        before = kept()
        job = sbatch(cluster, folder / "second", "--nodes=1", flags=flags)
        second = left(Job(cluster, job.id, first.run))
        after = kept()
        cluster.run("scontrol", "resume", first.id)
        return Suspended(second, left(first), _seconds(job), before, after)


def preempt(cluster: Cluster) -> str:
    """A job of the higher partition takes all nodes for a moment."""
    command = ["-p", "high", f"-N{len(cluster.nodes)}", "--exclusive", "--output=/dev/null", "--wrap", "true"]
    return cluster.sbatch(*command)


# ---------------------------------------------------------------- failures


FLOOD = """
import resource, socket, sys, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
address = sys.argv[1], int(sys.argv[2])
idle = [socket.create_connection(address, 10) for _ in range(1100)]
try:
    for _ in range(60):
        socket.socket.sendall(idle[-1], b"x" * (1 << 20))
except OSError:
    pass
print("flooded", flush=True)
time.sleep(600)
"""
"""1,100 connections that say nothing, the last of which sends 60 MiB without an end of a line."""


def rank_stopped(folder: Path) -> Left:
    """On the node whose monitor does not judge: it tells the head's, which a stranger has flooded."""
    with Cluster(folder / "slurm") as cluster:
        job = sbatch(
            cluster, folder, flags=[*FLAGS, "--watch.hang_s", "5"], env={**SLOWLY, "SLOW_STARTS": "1"}
        )
        reached = job.until_resumable(13)
        with subprocess.Popen(
            cluster.within("n2", sys.executable, "-c", FLOOD, "n1", str(monitor_port(job, "n1"))),
            stdout=subprocess.PIPE,
        ) as flood:
            assert flood.stdout is not None
            assert flood.stdout.readline() == b"flooded\n"
            os.kill(rank_pid(job, "n2", rank=1), signal.SIGSTOP)
            end = left(job, reached)
            flood.kill()
            return end


def monitor_port(job: Job, node: str) -> int:
    """Where the head's monitor listens."""
    (pid,) = (
        pid
        for pid in job.cluster.pids(node, f"SLURM_JOB_ID={job.id}")
        if b"fsdp.watch.monitor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    sockets = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    listening = "0A"
    (port,) = {
        row[1].split(":")[1] for row in rows if row[3] == listening and f"socket:[{row[9]}]" in sockets
    }
    return int(port, 16)


def rank_pid(job: Job, node: str, rank: int) -> int:
    """The training process itself: torchrun sets RANK, Slurm SLURM_PROCID."""
    found = [
        pid
        for name in ("RANK", "SLURM_PROCID")
        for pid in job.cluster.pids(node, f"{name}={rank}")
        if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        and b"launch.node" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert found, f"rank {rank} of job {job.id} is not on {node}\n{job.log()}"
    return found[0]


def node_lost(folder: Path) -> Left:
    """Its power is cut; a third node stands by."""
    with Cluster(folder / "slurm", Shape(nodes=3, kill_wait_s=3, slurmd_timeout_s=6)) as cluster:
        job = sbatch(cluster, folder, env={**SLOWLY, "SLOW_STARTS": "1", "LAUNCHER": "srun"})
        reached = job.until_resumable(13)
        cluster.power_off("n2")
        return left(job, reached)


# ---------------------------------------------------------------- names and networks


@dataclass(frozen=True)
class Network:
    nameless: Left
    checked: Left


def network(folder: Path) -> Network:
    """Node names that do not resolve, one job in a container."""
    with Cluster(folder / "slurm") as cluster:
        cluster.names(False)
        facts = folder / "container.env"
        facts.write_text("CONTAINER=(env INSIDE=1)\n")
        nameless = sbatch(cluster, folder / "nameless", env={"CLUSTER_ENV": str(facts)})
        checked = sbatch(cluster, folder / "checked", flags=[*FLAGS, "--dry-run"])
        return Network(left(nameless), left(checked))


def preflight(folder: Path) -> dict[str, Left]:
    """The doctor in a job's place, one after the other: two measuring at once would find each other slow.
    Then the second node has another folder where the run directory is.
    """
    run = folder / "sick-run"
    run.mkdir()
    with Cluster(folder / "slurm") as cluster:
        fit = left(sbatch(cluster, folder / "fit", flags=[*FLAGS, "--preflight"], env={"LAUNCHER": "srun"}))
        cluster.on_node("n2", "mount", "-t", "tmpfs", "tmpfs", str(run))
        job = sbatch(cluster, folder, flags=[*FLAGS, "--preflight", "--run.dir", str(run)])
        return {"fit": fit, "sick": left(Job(cluster, job.id, Run(run)))}


def _seconds(job: Job) -> float:
    hours, minutes, seconds = (int(part) for part in job.cluster.job(job.id)["RunTime"].split(":"))
    return hours * 3600 + minutes * 60 + seconds


# ---------------------------------------------------------------- submitit, and through several launchers


def submit(
    cluster: Cluster,
    folder: Path,
    *options: str,
    flags: Sequence[str] = FLAGS,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Job:
    """`python -m launch.submit OPTIONS -- FLAGS`, as typed; the job that it printed."""
    folder.mkdir(exist_ok=True)
    with_tests = {"PYTHONPATH": str(REPOSITORY), **env}
    command = [sys.executable, "-m", "launch.submit", *options, "--", *flags]
    printed = cluster.run(*command, cwd=folder, env=with_tests, timeout_s=240).stdout
    said = dict(re.findall(r"^(job|run|log|cancel) {2,}(\S+)", printed, re.MULTILINE))
    assert set(said) == {"job", "run", "log", "cancel"}, printed
    return Job(cluster, said["job"], Run(Path(said["run"])))


def submitted(folder: Path) -> Left:
    """Two nodes of two ranks: slow until its limit in the first start, preempted in the second.

    The second start has a longer limit: Slurm looks at limits each half minute and gives its signal up to
    that much too early, which on a slow machine came before the preemption.
    """
    with Cluster(folder / "slurm", Shape(grace_s=30)) as cluster:
        options = ["--nodes=2", "--tasks-per-node=2", "--time=1", "--signal-s=10"]
        job = submit(cluster, folder, *options, env={"SLOW_S": "1.5", "SLOW_STARTS": "2"})
        job.until_end(1)
        cluster.run("scontrol", "update", f"jobid={job.id}", "TimeLimit=10")
        job.until_start(2)
        job.until_step(max(job.run.steps) + 1)
        reached = max(job.run.steps)
        cluster.wait(preempt(cluster))
        return left(job, reached)


def three_launchers(folder: Path) -> Left:
    """The first third under torchrun, the second under sbatch, the last under submitit."""
    run = folder / "run"
    mesh = ("--mesh.strategy", "hsdp", "--mesh.replicate", "2", "--mesh.shard", "1")
    torchrun(run, 2, *mesh, "--train.stop_after", "13")
    flags = [*FLAGS, *mesh, "--run.dir", str(run)]
    with Cluster(folder / "slurm") as cluster:
        second = sbatch(cluster, folder, flags=[*flags, "--train.stop_after", "26"])
        second.wait()
        return left(submit(cluster, folder, "--nodes=2", flags=flags))
