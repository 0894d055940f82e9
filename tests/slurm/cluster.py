"""A real Slurm of its own: slurmctld, slurmd's and munged in one folder, on free ports, up in about a second.

Each node is a host: own address, host name, /etc/hosts and process space in namespaces, so that its plug can
be pulled. The network lies in the login host's namespace, not in the machine's: two clusters cannot meet, and
nothing of one outlives its processes. Here is the cluster; what runs on it is the tests'.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.host import NAMESPACES, Host
from tests.support.processes import dies_with_us, eventually, pids_with, process_space

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "unshare", "ip")
NETWORK, LOGIN = "10.77.0", "login"
DEAD_STATES = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY",
)  # fmt: skip
FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "MASTER_", "TORCHELASTIC_", "SHARDRUN_")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What differs between the clusters that tests ask for."""

    nodes: int = 2
    cpus: int = 8
    gpus: int = 2
    """GPUs of each node that Slurm counts and allocates: empty files fake-gpu-N, which torch cannot see."""
    grace_s: int = 0
    kill_wait_s: int = 15
    slurmd_timeout_s: int = 20
    message_timeout_s: int = 10
    """10 is Slurm's own default. On a busy machine the controller repeats the kill of a step after it, and
    ends the step of that number in the requeued job.
    """


def missing() -> str | None:
    """Why no Slurm can be brought up here, or None."""
    os.environ["PATH"] = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install slurm-wlm munge iproute2)"
    words = ["unshare", *NAMESPACES, "--pid", "--fork", "true"]
    made = subprocess.run(words, capture_output=True).returncode == 0
    return None if made else "nodes of a Slurm need namespaces: run as root"


def free_ports(count: int) -> list[int]:
    """Below the kernel's own range, so that no outgoing connection takes one between here and the daemon's
    bind.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(10000, 20000)
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            ports += [port] * (port not in ports)
    return ports


class Cluster:
    """One Slurm. Use as a context manager, or start() and stop()."""

    def __init__(self, folder: Path, shape: Shape | None = None) -> None:
        self.folder, self.shape = folder.resolve(), shape or Shape()
        self.nodes = [f"n{i}" for i in range(1, self.shape.nodes + 1)]
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.hosts: dict[str, Host] = {}
        self.conf = self.folder / "slurm.conf"

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ------------------------------------------------------------ up and down

    def start(self) -> None:
        for name in ("log", "run", "state", *(f"spool.{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        self._munge()
        self.names(True)
        self.conf.write_text(self._configuration(free_ports(self.shape.nodes + 1)))
        self._fake_gpus()
        self._login_host()
        self._daemon("slurmctld", self.on_login(["slurmctld", "-D"]))
        for node in self.nodes:
            self.power_on(node)
        eventually(f"{len(self.nodes)} idle nodes", self._all_idle, 120, self._logs)

    def _fake_gpus(self) -> None:
        files = [self.folder / f"fake-gpu-{i}" for i in range(self.shape.gpus)]
        for file in files:
            file.touch()
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={file}\n" for file in files))

    def stop(self) -> None:
        for host in self.hosts.values():
            host.end()
        for name in ("slurmctld", "munged"):
            self._end_daemon(name)
        self._end_leftovers()

    def _munge(self) -> None:
        run, key = self.folder / "run", self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        files = {
            "socket": run / "munge.sock",
            "pid-file": run / "munged.pid",
            "seed-file": run / "munge.seed",
        }
        options = [
            f"--{name}={path}"
            for name, path in {**files, "key-file": key, "log-file": run / "munged.log"}.items()
        ]
        self._daemon("munged", ["munged", "--foreground", "--force", *options])
        eventually("munged listens", files["socket"].exists, 60, self._logs)

    def _configuration(self, ports: Sequence[int]) -> str:
        facts = {
            "host": LOGIN, "address": f"{NETWORK}.254", "port": ports[0], "user": getpass.getuser(),
            "folder": self.folder,
            "kill_wait": self.shape.kill_wait_s, "slurmd_timeout": self.shape.slurmd_timeout_s,
            "message_timeout": self.shape.message_timeout_s,
            "controller": "requeue_on_resume_failure",
        }  # fmt: skip
        lines = (HERE / "slurm.conf.in").read_text().format(**facts)
        for i, (node, port) in enumerate(zip(self.nodes, ports[1:], strict=True), start=1):
            what = f"CPUs={self.shape.cpus} Gres=gpu:{self.shape.gpus} RealMemory=8000 State=UNKNOWN"
            lines += f"NodeName={node} NodeAddr={NETWORK}.{i} Port={port} {what}\n"
        main = f"Default=YES State=UP PreemptMode=REQUEUE GraceTime={self.shape.grace_s}"
        lines += f"PartitionName=main Nodes=ALL {main}\n"
        return lines + "PartitionName=high Nodes=ALL PriorityTier=10 State=UP PreemptMode=OFF\n"

    def names(self, resolve: bool, network: str = NETWORK) -> None:
        """Do the nodes' names resolve, and in which network? The file keeps its inode: it is bound over every
        host's /etc/hosts.
        """
        lines = ["127.0.0.1 localhost", f"{NETWORK}.254 {LOGIN}"]
        lines += [f"{network}.{i} {node}" for i, node in enumerate(self.nodes, start=1)] if resolve else []
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def _login_host(self) -> None:
        self._host(LOGIN, own_processes=False)
        for words in (
            "link add bridge0 type bridge",
            f"addr add {NETWORK}.254/24 dev bridge0",
            "link set bridge0 up",
        ):
            self._ip(*words.split())

    def _host(self, name: str, *, own_processes: bool = True) -> Host:
        log = self.folder / "log" / f"{name}.out"
        self.hosts[name] = Host(name, self.folder / "hosts", log, own_processes=own_processes)
        return self.hosts[name]

    # ------------------------------------------------------------ one node

    def power_on(self, node: str) -> None:
        host = self._host(node)
        cable, number = f"cable-{node}", self.nodes.index(node) + 1
        self._ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(host.shell))
        self._ip("link", "set", cable, "master", "bridge0", "up")
        host.say(f"ip addr add {NETWORK}.{number}/24 dev eth0; ip link set eth0 up")
        self.start_slurmd(node)

    def power_off(self, node: str) -> None:
        """The cable first: a host that loses its power sends no last packet."""
        self._ip("link", "set", f"cable-{node}", "down")
        self.hosts.pop(node).end()
        # The kernel takes the cable away with the host's namespace, sometime: whoever comes first.
        self._ip("link", "del", f"cable-{node}", check=False)
        assert f"cable-{node}" not in self._ip("link", "show").stdout

    def start_slurmd(self, node: str) -> None:
        self.hosts[node].say(f"SLURM_CONF='{self.conf}' slurmd -D -N {node} &")

    def on_node(self, node: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside a node."""
        return subprocess.run(
            self.within(node, *command), env=self.environment(), capture_output=True, text=True, check=True
        )

    def within(self, node: str, *command: str) -> list[str]:
        """The command inside a node."""
        return [*self._enter(self.hosts[node].shell, REPOSITORY, "--pid"), *command]

    def pids(self, node: str, environ: str) -> list[int]:
        """Processes of a node whose environment holds this `NAME=value`, as this machine numbers them."""
        space = process_space(self.hosts[node].shell)
        ours = pids_with(f"SLURM_CONF={self.conf}", environ)
        return [pid for pid in ours if process_space(pid) == space]

    # ------------------------------------------------------------ commands and jobs

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        path = f"{Path(sys.executable).parent}:{HERE / 'standin'}:{os.environ['PATH']}"
        return {**kept, "PATH": path, "SLURM_CONF": str(self.conf), "OMP_NUM_THREADS": "1", **(extra or {})}

    def popen(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY
    ) -> subprocess.Popen[str]:
        """A command on the login host."""
        return subprocess.Popen(
            self.on_login(list(command), cwd),
            env=self.environment(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
        check: bool = True,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """A command on the login host, to its end."""
        with self.popen(*command, env=env, cwd=cwd) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        if check and process.returncode:
            raise AssertionError(
                f"{' '.join(command)} ended with {process.returncode}:\n{out}\n{err}\n{self._logs()}"
            )
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def sbatch(self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY) -> str:
        """Submit; the job's id."""
        return self.run("sbatch", "--parsable", *arguments, env=env, cwd=cwd).stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """scontrol's view of one job."""
        text = self.run("scontrol", "show", "job", "-o", job).stdout.strip()
        # values such as folders may have spaces
        return dict(word.split("=", 1) for word in re.split(r" (?=[A-Z][\w:/]*=)", text) if "=" in word)

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def wait(self, job: str, timeout_s: float = 120) -> str:
        """Until the job is done for good; its state."""
        eventually(
            f"the end of job {job}", lambda: self.state(job) in DEAD_STATES, timeout_s, lambda: self.log(job)
        )
        return self.state(job)

    def log(self, job: str) -> str:
        """What the job wrote so far, behind scontrol's view of it."""
        facts = self.job(job)
        path = Path(facts["StdOut"])
        return f"{facts['JobState']} {facts['Reason']}\n" + (
            path.read_text(errors="replace") if path.exists() else ""
        )

    # ------------------------------------------------------------ inside

    def _daemon(self, name: str, command: list[str]) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                [*dies_with_us(), *command],
                env={**os.environ, "SLURM_CONF": str(self.conf)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _end_daemon(self, name: str) -> None:
        daemon = self.daemons.pop(name, None)
        if daemon is None:
            return
        daemon.terminate()
        try:
            daemon.wait(5)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def _end_leftovers(self) -> None:
        """End all processes with this folder's SLURM_CONF, by id: this cluster has started them."""
        for pid in pids_with(f"SLURM_CONF={self.conf}"):
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def on_login(self, command: list[str], cwd: Path = REPOSITORY) -> list[str]:
        return [*self._enter(self.hosts[LOGIN].shell, cwd), *command]

    def _enter(self, pid: int, cwd: Path, *more: str) -> list[str]:
        # another mount namespace starts at its root, whatever the caller's directory
        return ["nsenter", f"--target={pid}", *NAMESPACES, *more, f"--wdns={cwd}", "--"]

    def _ip(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = ["nsenter", f"--target={self.hosts[LOGIN].shell}", "--net", "ip", *words]
        return subprocess.run(command, check=check, capture_output=True, text=True)

    def _all_idle(self) -> bool:
        idle = self.run("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D", check=False).stdout.strip()
        return idle == str(len(self.nodes))

    def _logs(self) -> str:
        ends = []
        for path in sorted((self.folder / "log").glob("*")):
            ends.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-8:]))
        return "\n".join(ends)
