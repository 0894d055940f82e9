"""Runs of train.py for bench.gpu: one process, or ranks side by side, with a time limit, and their losses.

Not here: what is compared (gpu_parts.py, gpu_two_ranks.py).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.processes import descendants, free_port

ROOT = Path(__file__).parents[1]
MODEL = (
    "--data.name", "synthetic", "--data.args.kind", "tokens", "--data.args.samples", "4096",
    "--data.args.heldout", "0", "--data.seq_len", "32", "--model.name", "transformer",
    "--model.args.width", "128", "--model.args.layers", "2", "--model.args.heads", "4",
    "--train.global_batch", "8", "--optim.warmup_steps", "0",
)  # fmt: skip
VECTORS = ("--model.name", "mlp", "--model.args.in_features", "64", "--train.global_batch", "16")
QUIET = ("--checkpoint.every_steps", "0", "--checkpoint.export", "false", "--run.log_every_steps", "1")
ALONE = ("--watch.enabled", "false", "--speed.compile", "false")

Figures = Mapping[str, Any]

TERMINATION_S = 10.0


class Failed(Exception):
    """The part's claim does not hold; the text says what was seen."""


class NotPossible(Exception):
    """The part cannot run on this machine; the text says why."""


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    code: int
    text: str
    run: Path
    seconds: float

    def losses(self) -> list[float]:
        return [one["loss"] for one in self.records()]

    def records(self) -> list[dict[str, Any]]:
        """The last record of each step: a resumed run repeats those after its checkpoint."""
        lines = (self.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = {one["step"]: one for one in map(json.loads, lines) if "loss" in one}
        return [steps[step] for step in sorted(steps)]

    def end(self) -> str:
        return " / ".join(self.text.strip().splitlines()[-3:])[-400:]


@dataclass(frozen=True)
class Bench:
    """Where the battery runs, the folder of its runs, and that of its results."""

    device: str
    folder: Path
    results: Path

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def need_cuda(self, why: str) -> None:
        if not self.cuda:
            raise NotPossible(f"no CUDA device: {why}")

    def environment(self, **more: str) -> dict[str, str]:
        """Without the ranks of a surrounding launcher; one thread a process on a CPU."""
        kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        hidden = {} if self.cuda else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        path = f"{ROOT}{os.pathsep}{kept['PYTHONPATH']}" if kept.get("PYTHONPATH") else str(ROOT)
        return {**kept, **hidden, "PYTHONPATH": path, **more}

    def command(self, name: str, flags: Sequence[str]) -> list[str]:
        run = ["--run.dir", str(self.folder / name), "--run.device", self.device]
        return [str(ROOT / "train.py"), *flags, *run]

    def start(self, name: str, *flags: str, **environment: str) -> subprocess.Popen[str]:
        return self.process(*self.command(name, flags), **environment)

    def train(self, name: str, *flags: str, limit_s: float = 180, **environment: str) -> Ran:
        """One process of train.py, without a launcher."""
        process = self.start(name, *flags, **environment)
        return ended(process, self.folder / name, limit_s)

    def trained(self, name: str, *flags: str, limit_s: float = 180, **environment: str) -> Ran:
        """The same; a run that does not finish fails the part."""
        ran = self.train(name, *flags, limit_s=limit_s, **environment)
        if ran.code:
            raise Failed(f"{name}: exit code {ran.code}: {ran.end()}")
        return ran

    def ranks(
        self, name: str, *flags: str, limit_s: float = 120, wait_for: int | None = None, killed: bool = False
    ) -> list[Ran]:
        """Two ranks that share one device, each under a torchrun of its own: to NCCL too, each is a node.
        Waits for the first `wait_for` of them, or for all, and ends the others; kills the last of `killed`
        ones after a save.
        """
        port = free_port()
        processes = []
        for rank in range(2):
            torchrun = "torch.distributed.run --nnodes=2 --nproc_per_node=1 --master_addr=127.0.0.1"
            words = [*torchrun.split(), f"--node_rank={rank}", f"--master_port={port}"]
            # Of two "nodes" on one machine: no adapter, no plugin.
            loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
            loopback["NCCL_HOSTID"] = f"bench-{rank}"
            processes.append(self.module(*words, *self.command(name, flags), **loopback))
        try:
            if killed:
                kill_after_save(processes[-1], self.folder / name)
            return [ended(process, self.folder / name, limit_s) for process in processes[:wait_for]]
        finally:
            for process in processes:
                end(process)

    def module(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Starts python -m WORDS."""
        return self.process("-m", *words, **environment)

    def process(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=self.environment(**environment),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def tool(self, *words: str, limit_s: float = 180, **environment: str) -> Ran:
        """python -m WORDS, to its end."""
        return ended(self.module(*words, **environment), self.folder, limit_s)


def ended(process: subprocess.Popen[str], run: Path, limit_s: float) -> Ran:
    """Waits; a process that takes longer is killed, and the part fails. What it prints goes to stderr at
    once, the part's log. A process that outlives it and holds its output is not waited for.
    """
    began, lines = time.monotonic(), list[str]()

    def read() -> None:
        for line in process.stdout or ():
            lines.append(line)
            print(
                f"{run.name} {time.monotonic() - began:6.1f} s  {line}", end="", file=sys.stderr, flush=True
            )

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        end(process)
        reader.join(1)
        text = "".join(lines).strip()[-300:]
        raise Failed(f"{run.name} ran longer than {limit_s:.0f} s: {text}") from None
    seconds = time.monotonic() - began
    reader.join(5)
    return Ran(process.returncode, "".join(lines), run, seconds)


def end(process: subprocess.Popen[str]) -> None:
    """SIGTERM, by which torchrun ends its ranks, then SIGKILL to the process and its children."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATION_S)
    kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the process and its descendants, if it still runs: torchrun's ranks have own sessions."""
    if process.poll() is not None:
        return
    for pid in (process.pid, *descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_after_save(process: subprocess.Popen[str], run: Path) -> None:
    began = time.monotonic()
    while not any(run.glob("checkpoints/step-*/manifest.json")):
        need(process.poll() is None, "the run ended before its first checkpoint")
        need(time.monotonic() - began < 150, "no checkpoint within 150 s")
        time.sleep(0.02)
    kill(process)


def apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference of two runs' losses."""
    if len(ours) != len(theirs) or not ours:
        raise Failed(f"{len(ours)} steps beside {len(theirs)}")
    worst = max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(ours, theirs, strict=True))
    return worst if math.isfinite(worst) else math.inf


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Failed(what)


def digests(run: Path) -> Mapping[str, Any]:
    """The digest of each tensor of each sealed checkpoint."""
    found = {}
    for path in sorted((run / "checkpoints").glob("step-*/manifest.json")):
        manifest = json.loads(path.read_text(encoding="utf-8").split("\n", 1)[1][:-2])
        found[path.parent.name] = manifest["digests"]
    return found
