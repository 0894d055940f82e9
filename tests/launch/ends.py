"""Twelve kinds of end on six launchers: what launch/policy.py decides, a model that ends so, and the table of
docs/restarts.md.

    python -m tests.launch.ends      prints the table
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launch.policy import EXIT_HUNG, Act, Allocation, End, Kind, Past, decide

LAUNCHERS: Mapping[str, Allocation | None] = {
    "torchrun": None,
    "launch.local": Allocation(tries_left=3),
    "sbatch": Allocation(requeue=True),
    "LAUNCHER=srun sbatch": Allocation(requeue=True),
    "launch.submit": Allocation(requeue=True, again=False),
    "Ray": Allocation(),
}
"""torchrun by hand decides nothing: it ends with 1 after any failure."""
SLURM = ("sbatch", "LAUNCHER=srun sbatch", "launch.submit")


@dataclass(frozen=True)
class Ended:
    """One kind of end: what a start ends with, and where another program decides."""

    kind: Kind
    code: int = 0
    instead: Mapping[str, str] | None = None
    """By launcher: what follows where launch/policy.py is not consulted."""


def on_slurm(text: str) -> dict[str, str]:
    return dict.fromkeys(SLURM, text)


ENDS: Mapping[str, Ended] = {
    "success": Ended(Kind.DONE),
    "a wrong flag or mesh": Ended(Kind.FINAL, 2),
    "numbers that are not finite": Ended(Kind.FINAL, 5),
    "a run directory that another job writes": Ended(Kind.REFUSED, 4),
    "an exception of your own code": Ended(Kind.ERROR, 1),
    "out of memory": Ended(Kind.ERROR, 6),
    "a killed rank": Ended(Kind.DIED, -9),
    "a rank that hangs": Ended(Kind.DIED, EXIT_HUNG),
    "a lost node": Ended(Kind.DIED, -9, {"launch.local": "–", **on_slurm("requeue, by Slurm")}),
    "Ctrl-C, SIGTERM; `scancel`": Ended(
        Kind.STOPPED, 0, {"torchrun": "end 1, saved", **on_slurm("CANCELLED, saved")}
    ),
    "a deadline or time limit": Ended(Kind.PREEMPTED),
    "preemption": Ended(
        Kind.PREEMPTED, 0, {"torchrun": "end 1, saved", "launch.local": "end 0, saved", "Ray": "again"}
    ),
}


def sequence(end: Ended, allocation: Allocation | None) -> tuple[list[Act], int]:
    """What follows if every start ends so at the same step, and the exit code."""
    if allocation is None:
        return [Act.END], int(end.kind not in (Kind.DONE, Kind.STOPPED, Kind.PREEMPTED))
    acts, crashes = list[Act](), list[End]()
    while True:
        one = End(end.kind, step=2, code=end.code, why="SIGTERM")
        left = None if allocation.tries_left is None else allocation.tries_left - len(crashes)
        past = Past(crashes=crashes, idle_stops=len(acts) + 1, unmet=1)
        able = Allocation(requeue=allocation.requeue, again=allocation.again, tries_left=left)
        decision = decide(one, past, able)
        acts.append(decision.act)
        if decision.act is Act.END:
            return acts, decision.code
        if end.kind is Kind.PREEMPTED:
            return acts, 0  # the next start has another limit
        crashes.append(one)


def cell(end: Ended, launcher: str) -> str:
    if end.instead is not None and launcher in end.instead:
        return end.instead[launcher]
    acts, code = sequence(end, LAUNCHERS[launcher])
    again = {Act.AGAIN: "again", Act.REQUEUE: "requeue"}
    tries = [again[act] for act in acts if act is not Act.END]
    if end.kind in (Kind.STOPPED, Kind.PREEMPTED):
        return "requeue, saved" if tries else f"end {code}, saved"
    times = f"{len(tries)} × " if len(tries) > 1 else ""
    return f"{times}{tries[0]}, end {code}" if tries else f"end {code}"


SRUN = "LAUNCHER=srun sbatch"
STOPPED, PREEMPTED = "Ctrl-C, SIGTERM; `scancel`", "preemption"
REFUSED, DEADLINE = "a run directory that another job writes", "a deadline or time limit"
ON_ONE_MACHINE = [(name, launcher) for launcher in ("torchrun", "launch.local") for name in ENDS]
ON_ONE_MACHINE.remove(("a lost node", "launch.local"))
FAILURES = ("an exception of your own code", "out of memory", "a killed rank", "a rank that hangs")
ON_SLURM = [
    (STOPPED, "sbatch"),
    (STOPPED, "launch.submit"),
    (DEADLINE, SRUN),
    ("a wrong flag or mesh", SRUN),
    ("numbers that are not finite", "sbatch"),
    (REFUSED, SRUN),
    *((name, "sbatch") for name in FAILURES),
    ("an exception of your own code", "launch.submit"),
    ("a killed rank", SRUN),
]
"""The cells of tests/slurm/test_ends.py; the others of Slurm have a test in tests/slurm/test_jobs.py."""
ON_RAY = [*FAILURES, DEADLINE]


def table() -> list[str]:
    """The lines of the table."""
    lines = ["| how a start ended | " + " | ".join(LAUNCHERS) + " |", "|---" * (len(LAUNCHERS) + 1) + "|"]
    for name, end in ENDS.items():
        texts = [cell(end, launcher) for launcher in LAUNCHERS]
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return lines


# ---------------------------------------------------------------- a model that ends so


class Ending(nn.Linear):
    """A classifier of 28 × 28 numbers whose rank 1 ends in its third training step."""

    def __init__(self, ends: str) -> None:
        super().__init__(784, 10)
        self.ends, self.calls = ends, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and dist.is_initialized() and dist.get_rank() == 1:
            self.calls += 1
            if self.calls == 3:
                self._end()
        return super().forward(x.flatten(1))

    def _end(self) -> None:
        if self.ends == "an exception of your own code":
            raise ValueError("of your own code")
        if self.ends == "out of memory":
            torch.empty(2**50)
        if self.ends == "a killed rank":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.ends == "a rank that hangs":
            os.kill(os.getpid(), signal.SIGSTOP)


def build(ends: str = "") -> nn.Module:
    return Ending(ends)


SMALL = (
    "--data.name", "synthetic", "--data.args.heldout", "0", "--train.global_batch", "8",
    "--checkpoint.export", "false", "--checkpoint.every_steps", "0", "--run.log_every_steps", "1",
)  # fmt: skip


def flags_of(name: str) -> list[str]:
    """train.py's flags of a run that ends so."""
    model = ["--model.name", "tests.launch.ends:build", "--model.args.ends", name]
    more = {
        "a wrong flag or mesh": ["--mesh.strategy", "fsdp", "--mesh.shard", "3"],
        "numbers that are not finite": ["--optim.lr", "1e30", "--train.clip_grad_norm", "0"],
        "a rank that hangs": ["--watch.hang_s", "5"],
        DEADLINE: ["--train.steps", "10000000", "--stop.deadline_s", "5"],
        STOPPED: ["--train.steps", "10000000"],
        PREEMPTED: ["--train.steps", "10000000"],
        "a lost node": ["--train.steps", "10000000"],
    }
    return [*SMALL, *model, "--train.steps", "5", *more.get(name, [])]


if __name__ == "__main__":
    print("\n".join(table()))
