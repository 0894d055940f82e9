"""Tokens a second read, beside Hugging Face datasets and Mosaic streaming.

    python -m bench.data [--short]

Shuffled batches of 16 windows of 1,024 tokens as int64 inputs and targets, from a corpus on disk,
in one process without workers; datasets and streaming through torch's DataLoader. A ratio has an interval
from six rounds on.
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

import numpy as np

from bench import tables
from bench.peers import setup

ROOT = Path(__file__).resolve().parents[1]
PEERS = ("datasets", "streaming")


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


def speed_table(seen: Mapping[str, Sequence[float]]) -> str:
    rows = []
    for name, found in seen.items():
        over = "" if name == "ours" else tables.ratio(seen["ours"], found).judged()
        rows.append([name, tables.spread(found), over])
    return tables.table(["", "tokens a second", "shardrun over it [95%]"], rows)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="three rounds of a smaller corpus")
    parser.add_argument("--rounds", type=int, default=0, help="(default: 12, short: 3)")
    given = parser.parse_args(argv)
    rounds = given.rounds or (3 if given.short else 12)
    setup.set_up_all(PEERS)
    about = tables.machine()
    absent = {name: reason for name in PEERS if (reason := setup.missing(name))}
    names = ["ours", *(name for name in PEERS if name not in absent)]
    with tempfile.TemporaryDirectory(prefix="bench-data-") as folder:
        seen = read(names, Path(folder), rounds, 50 if given.short else 200, 10**6 if given.short else 10**7)
    text = speed_table(seen) + "".join(f"\n\n{name} is left out: {why}" for name, why in absent.items())
    tables.write_piece(
        "data",
        "read",
        short=given.short,
        title="Data",
        piece_title="Reading, one process without workers",
        about=f"{about}; load after {os.getloadavg()[0]:.1f}",
        text=text,
        notes="",
        command=f"python -m bench.data{' --short' * given.short} --rounds {rounds}",
        numbers={"tokens_per_s": seen},
    )
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
