"""Cost of a save to the training step, and of a load: shardrun beside dcp.save and dcp.async_save, in one
run.

    python -m bench.save            124M parameters, Adam, 2 ranks; about half an hour
    python -m bench.save --size 500m    457M parameters, six rounds; 16 GiB of memory
    python -m bench.save --size second  20M parameters: steps of about a second
    python -m bench.save --short    6M parameters, some minutes: the same table
    python -m bench.save --ways none,ours --rounds 20 --saves 1
                                    only what a save adds to the mean step, with its interval
    python -m bench.save --run.device cuda --size 1b
                                    one rank and its GPU: dcp.async_save with pinned memory

Each round runs every way of saving for ten steps with one save. The order rotates from round to round, so
that other load affects all alike. The whole cost of a save is what the steps with one take longer than
those without, with the wait for what is still being written after a round's last step; a stall is the part
that the training thread spends in a save or waiting for one.
dcp.async_save has one stager for all saves and copies in the background (save_dcp.py). One save of each way
without steps, and a plain file of as many bytes, show whether the disk or the way is the limit. Results are
printed and written to bench/results/save.json and save.md (save-short.*, save-cuda-1b.*).

This module parses the command and starts the ranks; save_rank.py measures, save_table.py makes the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.save_rank import SIZES, WAYS, rank_main
from bench.save_table import markdown, summarise

ROOT = Path(__file__).parents[1]
RANKS = 2


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", default="124m", choices=list(SIZES), help="the model; the other defaults go by it")
    add("--short", dest="size", action="store_const", const="short", help="a small model, few rounds")
    add("--rounds", type=int, default=0, help="rounds of every way; 0 is 2 to 12, by the size")
    add("--saves", type=int, default=0, help="saves whose memory is measured; 0 is 1 to 10, by the size")
    add("--ways", default="", help="which ways, none among them; fewer than all write save-part.*")
    add("--run.device", dest="device", choices=("cpu", "cuda"), default="cpu")
    add("--threads", type=int, default=0, help="threads a rank; 0 shares the cores out")
    add("--place", default="", help="folder for checkpoints; empty makes one and removes it")
    add("--out", default=str(ROOT / "bench" / "results"))
    options = parser.parse_args(argv)
    size = SIZES[options.size]
    options.ways = options.ways.split(",") if options.ways else [*WAYS]
    if unknown := {"none", *options.ways} - {*WAYS} or {"none"} - {*options.ways}:
        parser.error(
            f"--ways: {unknown.pop()} HINT: {','.join(WAYS)}; none is what the others are compared with"
        )
    options.rounds = options.rounds or size.rounds
    options.saves = options.saves or size.saves
    ranks = RANKS if options.device == "cpu" else 1
    options.threads = options.threads or max(1, len(os.sched_getaffinity(0)) // ranks)
    if "RANK" in os.environ:
        rank_main(options)
    with tempfile.TemporaryDirectory(prefix="bench-save-", dir=options.place or None) as place:
        options.place = place
        results = _run_ranks(options, ranks)
    report = summarise(results, options)
    table = markdown(report)
    print(table)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    stem = "save" + "-cuda" * (options.device == "cuda") + f"-{options.size}" * (options.size != "124m")
    stem = stem if options.ways == [*WAYS] else "save-part"
    (out / f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / f"{stem}.md").write_text(table)
    return 0


def _run_ranks(options: argparse.Namespace, count: int) -> list[dict[str, Any]]:
    words = ["--place", options.place, "--rounds", options.rounds, "--saves", options.saves]
    words += ["--threads", options.threads, "--run.device", options.device, "--size", options.size]
    command = [sys.executable, "-m", "bench.save", *map(str, words), "--ways", ",".join(options.ways)]
    common = {
        **os.environ,
        "OMP_NUM_THREADS": str(options.threads),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    # Without this glibc keeps freed blocks, and a process's size shows nothing. All ways have it.
    common |= {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={
                **common,
                "RANK": str(r),
                "LOCAL_RANK": str(r),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
            },
        )
        for r in range(count)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")
    return [json.loads(Path(options.place, f"result-{rank}.json").read_text()) for rank in range(count)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
