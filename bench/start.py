"""Start-up time from the command to the first optimizer step: shardrun beside a bare script and every
framework.

    python -m bench.start [--rounds 6] [--ranks 2]

Each contender is a script with its necessary imports alone, which builds the same vision transformer, shards
it and takes one step (bench/peers/alone.py). shardrun is train.py, and launch.local, with everything they
write. Rounds are interleaved; the result is the extra time over the bare script.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import tables
from bench.launched import STEP, alone, ours, surroundings, that_run
from bench.peers import setup
from bench.peers.roster import ROSTER, absent
from bench.processes import free_port

LABELS = {
    "bare": "bare fully_shard script", "ours": "shardrun, train.py",
    "local": "shardrun, python -m launch.local",
    "tutorial": "PyTorch's FSDP2 tutorial", "accelerate": "Accelerate, FSDP2",
    "fabric": "Lightning Fabric, ModelParallel",
    "ddp": "DDP",
}  # fmt: skip
SHORT = ("bare", "ours", "local", "accelerate")


@dataclass(frozen=True)
class Started:
    """One start: seconds to the first step, processor seconds of all ranks to their end, the largest rank's
    peak.
    """

    wall_s: float
    cpu_s: float
    peak_mib: float


def run_once(name: str, ranks: int, folder: Path) -> Started:
    if name == "local":
        command = [sys.executable, "-m", "launch.local", "--ranks", str(ranks), *ours(folder, 1, 0)]
        return _watch([command], [{}])
    words = ["train.py", *ours(folder, 1, 0)] if name == "ours" else alone(name, folder, 1, 0)
    meet = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    places = [{**meet, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return _watch([[str(ROSTER[name].python), *words]] * ranks, places)


def _watch(commands: Sequence[Sequence[str]], places: Sequence[dict[str, str]]) -> Started:
    began, first = time.monotonic(), 0.0
    with tempfile.TemporaryFile("w+") as errors:
        processes = [
            subprocess.Popen(
                command,
                env={**surroundings(), **place},
                cwd=setup.ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            for command, place in zip(commands, places, strict=True)
        ]
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            if not first and STEP.search(line):
                first = time.monotonic() - began
        ended = [os.wait4(process.pid, 0) for process in processes]
        if any(status for _, status, _ in ended) or not first:
            errors.seek(0)
            said = errors.read()[-2000:]
            raise SystemExit(
                f"{' '.join(commands[0])} ended with {[status for _, status, _ in ended]}:\n{said}"
            )
    usage = [one for _, _, one in ended]
    return Started(first, sum(u.ru_utime + u.ru_stime for u in usage), max(u.ru_maxrss for u in usage) / 1024)


def measure(names: Sequence[str], rounds: int, ranks: int) -> dict[str, list[Started]]:
    seen: dict[str, list[Started]] = {name: [] for name in names}
    for nth in range(rounds + 1):
        for name in tables.turned(list(names), nth):
            with tempfile.TemporaryDirectory(prefix="bench-start-") as place:
                took = run_once(name, ranks, Path(place, "run"))
            if nth:  # the first round fills the page cache
                seen[name].append(took)
    return seen


def shown(seen: dict[str, list[Started]]) -> str:
    bare = [one.wall_s for one in seen["bare"]]
    rows = []
    for name, starts in seen.items():
        walls = [one.wall_s for one in starts]
        extra = tables.difference(walls, bare)
        over = "" if name == "bare" else extra.judged("+.2f", more_is_better=False, same=0.0)
        cpu, peak = (
            statistics.median(getattr(one, what) for one in starts) for what in ("cpu_s", "peak_mib")
        )
        rows.append([LABELS[name], tables.spread(walls), over, f"{cpu:.1f}", f"{peak:.0f}"])
    columns = [
        "",
        "command to first step, s",
        "extra over bare, s [95%]",
        "processor s",
        "peak of a rank, MiB",
    ]
    return tables.table(columns, rows)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=0, help="0 is 6, or 2 with --short")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="these contenders: bare,ours,fabric")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args(argv)
    wanted = tables.chosen(parser, options.only, list(LABELS), SHORT if options.short else list(LABELS))
    names = that_run(wanted)
    rounds, about = options.rounds or (2 if options.short else 6), tables.machine()
    seen = measure(names, rounds, options.ranks)
    text = shown(seen)
    command = f"python -m bench.start --ranks {options.ranks} --rounds {rounds}"
    print(f"{about}\n\n{text}")
    tables.write_piece(
        "start",
        f"warm@{options.ranks}",
        short=options.short,
        title="Start to first step",
        piece_title=f"{options.ranks} ranks, {rounds} rounds",
        command=command,
        about=about,
        text=text,
        notes="\n".join(f"- {one}" for one in absent(list(ROSTER))),
        numbers={"rounds": seen},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
