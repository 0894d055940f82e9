"""Tokens a second read, beside Hugging Face datasets and Mosaic streaming; start against the data's size.

    python -m bench.data [--short]

Reading: shuffled batches of 16 windows of 1,024 tokens as int64 inputs and targets, from a corpus on disk,
in one process without workers; datasets and streaming through torch's DataLoader. Start: a process that has
imported torch builds the data set and reads three batches over it, from sparse token files of 1e6, 1e9 and
1e12 tokens; the second start finds the index in the cache. MiB: the rise of the peak of resident memory above
that after the imports. A ratio has an interval from six rounds on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench import tables
from bench.peers import setup

ROOT = Path(__file__).resolve().parents[1]
PEERS = ("datasets", "streaming")
SIZES = {"1e6": (1, 10**6), "1e9": (10, 10**8), "1e12": (10_000, 10**8)}
"""Files, and tokens in each."""

START = """
import json, resource, sys, time
from fsdp.config import DataSection
from fsdp.data import Cursor, build_dataset
before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
train = build_dataset(DataSection(name=sys.argv[1], seq_len=1024)).train
cursor = Cursor(seed=1, samples=len(train), global_batch=16)
for step in (0, cursor.steps_per_epoch // 2, cursor.steps_per_epoch - 1):
    train.batch(cursor.indices(step))
mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
print(json.dumps({"samples": len(train), "seconds": time.perf_counter() - began, "mib": mib}))
"""


class Reader:
    """A contender's process."""

    def __init__(self, way: str, folder: Path) -> None:
        python = sys.executable if way == "ours" else str(setup.python_of(way))
        folder.mkdir()
        (folder / "tokens.bin").symlink_to(folder.parent / "tokens.bin")
        self._process = subprocess.Popen(
            [python, "-m", "bench.data_reader", way, str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"},
        )
        self._answer("ready")

    def _answer(self, wanted: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(wanted):
                return line
        raise SystemExit(f"bench.data: a contender ended with exit code {self._process.wait()}")

    def round(self, batches: int) -> float:
        """Tokens a second."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batches}\n")
        self._process.stdin.flush()
        said = json.loads(self._answer("{"))
        return float(said["tokens"]) / float(said["seconds"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def read(names: Sequence[str], place: Path, rounds: int, batches: int, tokens: int) -> dict[str, list[float]]:
    np.random.default_rng(0).integers(0, 50_000, tokens).astype(np.uint16).tofile(place / "tokens.bin")
    seen: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        readers = {name: Reader(name, place / name) for name in names}
        for one in readers.values():
            stack.callback(one.close)
        for one in readers.values():
            one.round(max(1, batches // 4))
        for nth in range(rounds):
            for name in tables.turned(list(names), nth):
                seen[name].append(readers[name].round(batches))
    return seen


def read_table(seen: Mapping[str, Sequence[float]]) -> str:
    rows = []
    for name, speeds in seen.items():
        over = "" if name == "ours" else tables.ratio(seen["ours"], speeds).judged()
        rows.append([name, tables.spread(speeds), over])
    return tables.table(["reader", "tokens a second", "shardrun over it [95%]"], rows)


def sparse(root: Path, files: int, tokens: int) -> Path:
    """Token files of zeros that take no blocks on disk."""
    root.mkdir()
    (root / "tokens.json").write_text('{"dtype": "uint16", "vocab_size": 50257}', encoding="utf-8")
    for n in range(files):
        with (root / f"{n:05}.bin").open("wb") as file:
            os.truncate(file.fileno(), 2 * tokens)
    return root


def starts(place: Path, sizes: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    environ = {**os.environ, "XDG_CACHE_HOME": str(place / "cache")}
    for size in sizes:
        folder = sparse(place / size, *SIZES[size])
        for which in ("first", "second"):
            command = [sys.executable, "-c", START, str(folder)]
            out = subprocess.run(
                command, cwd=ROOT, env=environ, check=True, stdout=subprocess.PIPE, text=True
            )
            found.setdefault(size, {})[which] = json.loads(out.stdout)
    return found


def start_table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    rows = []
    for size, both in found.items():
        cells = [f"{tables.short(both[which][what])}" for which in both for what in ("seconds", "mib")]
        rows.append([size, SIZES[size][0], f"{both['second']['samples']:,.0f}", *cells])
    columns = ["tokens", "files", "samples", "first start, s", "MiB", "second start, s", "MiB"]
    return tables.table(columns, rows)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="three rounds of a smaller corpus")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of reading (default: 12, short: 3)")
    given = parser.parse_args(argv)
    rounds = given.rounds or (3 if given.short else 12)
    about = tables.machine()
    setup.set_up_all(PEERS)
    absent = {name: reason for name in PEERS if (reason := setup.missing(name))}
    names = ["ours", *(name for name in PEERS if name not in absent)]
    with tempfile.TemporaryDirectory(prefix="bench-data-") as folder:
        place = Path(folder)
        seen = read(names, place, rounds, 50 if given.short else 200, 10**6 if given.short else 10**7)
        found = starts(place, list(SIZES))
    listed = "".join(f"\n\n{name} is left out: {reason}" for name, reason in absent.items())
    text = f"## Reading, {rounds} rounds\n\n{read_table(seen)}{listed}\n\n## Start\n\n{start_table(found)}"
    command = "python -m bench.data" + " --short" * given.short + f" --rounds {rounds}"
    numbers: dict[str, Any] = {"tokens_per_s": seen, "starts": found}
    print(
        tables.write(
            "data",
            title="Data",
            command=command,
            about=f"{about}; load after {os.getloadavg()[0]:.1f}",
            text=text,
            numbers=numbers,
            short=given.short,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
