"""One rank of one contender, which executes orders: `steps N`, `memory N`, `end`. Started by
bench/peers/team.py.

A line of JSON comes in on stdin; the answer goes out through the pipe whose number is in BENCH_ANSWERS,
because frameworks print to stdout. shardrun's contender is train(); its reporter, called after each step on
each rank, waits for orders.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from bench import processes
from bench.peers.roster import ROSTER
from bench.peers.work import WORKS, Place
from fsdp.base import proc
from fsdp.record.recorder import Reporter

HEAVY = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
)
"""What one contender imports with its packages and another in its first step: idle memory for all of them."""


class Orders:
    """Turns of some steps; time runs from the order to the end of the last step.

    On a device a contender asleep keeps its state alone, as several share the device's memory; the `untimed`
    first steps of a turn allocate the rest again.
    """

    def __init__(self, *, on_device: bool = False) -> None:
        self._on_device, self._untimed = on_device, 0
        self._answers = os.fdopen(int(os.environ["BENCH_ANSWERS"]), "w")
        self._left = 0
        self._memory = False
        self.idle_mib = memory_mib("VmRSS")
        self.losses: list[float | torch.Tensor] = []

    def after_step(self, loss: float | torch.Tensor) -> bool:
        """Whether to continue; waits for the next order after the last step of a turn."""
        if self._untimed:
            self._untimed -= 1
            if not self._untimed:
                torch.cuda.synchronize()
                self._start_clock()
            return True
        self.losses.append(loss)
        self._left -= 1
        if self._left <= 0:
            self._tell()
            return self.wait()
        return True

    def wait(self) -> bool:
        order = json.loads(sys.stdin.readline() or '{"do": "end"}')
        if order["do"] == "end":
            return False
        self._left, self._memory, self.losses = order["steps"], order["do"] == "memory", []
        if self._memory:
            processes.reset_peak_memory()
            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
        self._untimed = order.get("untimed", 0)
        self._start_clock()
        return True

    def _start_clock(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def say(self, **facts: Any) -> None:
        self._answers.write(json.dumps(facts) + "\n")
        self._answers.flush()

    def _tell(self) -> None:
        losses = [float(loss) for loss in self.losses]  # a device is waited for here
        facts: dict[str, Any] = {
            "wall_s": time.perf_counter() - self._wall,
            "cpu_s": time.process_time() - self._cpu,
            "losses": losses,
        }
        if self._memory and torch.cuda.is_initialized():
            facts |= {
                "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
                "rest_mib": torch.cuda.memory_allocated() / 2**20,
            }
        elif self._memory:
            facts |= {
                "peak_mib": memory_mib("VmHWM") - self.idle_mib,
                "rest_mib": memory_mib("VmRSS") - self.idle_mib,
            }
        if self._on_device:
            gc.collect()
            torch.cuda.empty_cache()
        self.say(**facts)


def memory_mib(name: str) -> float:
    return proc.memory_bytes()[name] / 2**20


class Turns(Reporter):
    """Holds the run between turns."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self._on = orders, True

    def report(self, metrics: Mapping[str, float], checkpoint: str | None = None) -> None:
        if "loss" in metrics:
            self._on = self._on and self._orders.after_step(metrics["loss"])

    def should_stop(self) -> str | None:
        return None if self._on else "the bench is over"


def run_ours(work: str, flags: tuple[str, ...], orders: Orders) -> None:
    from fsdp import config
    from fsdp.distributed.env import from_environment
    from fsdp.run.loop import train

    with tempfile.TemporaryDirectory(prefix="bench-run-") as folder:
        place = os.environ.get("BENCH_RUN") or folder
        loaded = config.load([*WORKS[work].all_flags, *flags, "--run.dir", place])
        orders.wait()
        train(loaded, from_environment(), Turns(orders))


def run_peer(name: str, work: str, orders: Orders) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl" if WORKS[work].cuda else "gloo")
    place = Place(WORKS[work], dist.get_rank(), dist.get_world_size())
    batches = place.batches()
    contender = ROSTER[name].load()(place.given())
    going = orders.wait()
    while going:
        loss = contender.step(*next(batches))
        going = orders.after_step(loss)
    dist.barrier()


def main() -> None:
    name, work, *flags = sys.argv[1:]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for heavy in HEAVY:
        importlib.import_module(heavy)
    entry = ROSTER[name]
    if entry.module:
        entry.load()  # so that what its packages hold is idle memory and not a step's
    else:
        import fsdp.run.loop  # noqa: F401
    orders = Orders(on_device=WORKS[work].cuda)
    orders.say(ready=os.getpid())
    if entry.module:
        run_peer(name, work, orders)
    else:
        run_ours(work, (*entry.flags, *flags), orders)
    orders.say(ended=True)
    os._exit(0)  # several frameworks leave threads that a plain exit would wait for


if __name__ == "__main__":
    main()
