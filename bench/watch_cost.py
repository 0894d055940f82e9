"""Cost of the watch: time a step on the training thread, and processor time of its monitor.

    python -m bench.watch_cost

Recording a phase and recording a collective are timed alone, a hundred thousand times, and multiplied by
their number in a real step of two ranks. The bar is 0.2% of a step of 20 ms, 40 µs. The monitor's processor
time is read during that run.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.fault_runs import import_once
from bench.ports import free_port
from bench.tables import machine, write
from fsdp.base import proc

STEPS = 150
TIMES = 100_000


def microseconds(act: Callable[[], object]) -> float:
    """The median of seven rounds."""
    rounds = []
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(TIMES // 7):
            act()
        rounds.append((time.perf_counter() - began) / (TIMES // 7) * 1e6)
    return sorted(rounds)[3]


def told() -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from fsdp.watch import status_page
    from fsdp.watch.status_page import Writer, counted_collectives

    writer = Writer(status_page.create().numbers)
    original = dist.all_reduce

    def nothing(tensor: torch.Tensor) -> None:
        """Replaces a collective."""

    dist.all_reduce = nothing  # type: ignore[assignment]
    tensor, names = torch.ones(4), ("data", "forward", "backward", "reduce", "optimizer", "record")
    bare = microseconds(lambda: dist.all_reduce(tensor))
    with counted_collectives(writer):
        call = microseconds(lambda: dist.all_reduce(tensor)) - bare
    dist.all_reduce = original  # type: ignore[assignment]
    step = [0]

    def phases() -> None:
        step[0] += 1
        for name in names:
            writer.phase(name, step[0])

    return {"call_us": call, "phase_us": microseconds(phases) / len(names)}


def counted(folder: Path) -> dict[str, float]:
    """A real run of two ranks: collectives and phases a step, step time, and the monitor's share of a
    processor.
    """
    address, pids = ("127.0.0.1", free_port()), []
    for rank in range(2):
        pid = os.fork()
        if not pid:
            os._exit(_rank(rank, address, folder))
        pids.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    assert codes == [0, 0], codes
    found: dict[str, float] = json.loads((folder / "counts").read_text())
    return found


def _rank(rank: int, address: tuple[str, int], folder: Path) -> int:
    import train
    from fsdp import config as configuration
    from fsdp.base.phases import Phases
    from fsdp.watch import status_page
    from fsdp.watch.rank import Watch

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
    entered, leave, began = [0], Watch.__exit__, [0.0]
    enter = Phases.enter

    def counting(self: Phases, name: str, step: int | None = None) -> None:
        entered[0] += 1
        began[0] = began[0] or time.perf_counter()
        enter(self, name, step)

    def leaving(self: Watch, *error: object) -> None:
        if self._page is not None and rank == 0:
            numbers, seconds = self._page.numbers, time.perf_counter() - began[0]
            monitor = proc.stat(self._monitor.process.pid) if self._monitor else None
            used = monitor.cpu_s if monitor is not None else 0.0
            counts = {
                "calls": numbers[status_page.BEGUN] / numbers[status_page.STEPS],
                "phases": entered[0] / numbers[status_page.STEPS],
                "step_ms": 1e3 * seconds / numbers[status_page.STEPS],
                "monitor_percent": 100 * used / seconds,
            }  # fmt: skip
            (folder / "counts").write_text(json.dumps(counts))
        leave(self, *error)  # type: ignore[arg-type]

    Phases.enter = counting  # type: ignore[method-assign]
    Watch.__exit__ = leaving  # type: ignore[method-assign, assignment]
    quiet = (
        "--checkpoint.every_steps", "0", "--checkpoint.export", "false", "--train.global_batch", "16",
        "--train.steps",
        str(STEPS),
    )  # fmt: skip
    os.dup2(os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT), 1)
    return train.run_here(configuration.load(["--run.dir", str(folder / "run"), *quiet]))


def main() -> int:
    import_once()
    one = told()
    with tempfile.TemporaryDirectory(prefix="watch-cost-") as folder:
        counts = counted(Path(folder))
    cost = one["call_us"] * counts["calls"] + one["phase_us"] * counts["phases"]
    row = {**one, **counts, "step_us": cost, "percent_of_20_ms": cost / 200, "load": os.getloadavg()[0]}
    text = (
        f"a collective told {one['call_us']:.2f} µs × {counts['calls']:.1f}, a phase told "
        f"{one['phase_us']:.2f} µs × "
        f"{counts['phases']:.1f} = {cost:.1f} µs a step: {cost / 200:.3f}% of 20 ms (bar 0.2%)\n"
        f"the monitor took {counts['monitor_percent']:.1f}% of one processor beside steps of "
        f"{counts['step_ms']:.0f} ms"
    )
    print(text)
    about = f"Two ranks. {machine()}."
    numbers = {name: round(value, 4) for name, value in row.items()}
    write(
        "watch_cost",
        title="What the watch costs a step",
        command="python -m bench.watch_cost",
        about=about,
        text=text,
        numbers=numbers,
    )
    return 0 if cost <= 40 else 1


if __name__ == "__main__":
    raise SystemExit(main())
