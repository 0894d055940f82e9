"""A run under a memory limit of a third of its optimizer states: with states in files it fits, bit for bit.

    python -m tests.memory.bound          # a few minutes, 4 GB of disk, 4 GB of memory for the comparison
    python -m tests.memory.bound --limit-mib 512 --dir /local/nvme

The limit is on resident anonymous memory (RssAnon, polled), which can be released only by swapping.
RLIMIT_DATA would count untouched stacks and arenas. Three starts of train.py on one process: in memory, which
must exceed the limit; in files, killed after its checkpoint; and the same command again. The losses and the
digests of every parameter and state at the end must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp.base import proc

ROOT = Path(__file__).parents[2]
WIDTH, STEPS, SAVE_EVERY = 512, 6, 3
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH  # parameters of a block, but for its norms
LOOK_S = 0.005


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--limit-mib", type=int, default=384)
    parser.add_argument("--dir", default="")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="bound-") as folder:
        for line in compare(Path(folder), asked.limit_mib << 20, Path(asked.dir or Path(folder, "disk"))):
            print(line, flush=True)
    return 0


def compare(folder: Path, limit: int, disk: Path) -> Iterator[str]:
    """The three starts; AssertionError if one fails."""
    layers = 3 * limit // 8 // LAYER + 1
    outside = f"--memory.nvme all --memory.nvme_dir {disk}".split()
    states = layers * LAYER * 8
    assert states >= 3 * limit
    yield f"limit {limit >> 20} MiB; optimizer states {states >> 20} MiB, {layers} layers of {WIDTH}"
    plain = _run(folder / "plain", layers, [])
    yield f"in memory: {plain.anonymous >> 20} MiB anonymous at most, {plain.seconds:.0f} s"
    assert plain.anonymous > limit, "the limit does not bind: the run in memory keeps it too"
    killed = _run(folder / "files", layers, outside, kill_after=SAVE_EVERY)
    assert not any(disk.iterdir()), "a killed run left something behind"
    yield f"in files: {killed.anonymous >> 20} MiB at most; killed after step {killed.steps}; {disk} is empty"
    again = _run(folder / "files", layers, outside)
    assert not any(disk.iterdir())
    yield f"in files, resumed: {again.anonymous >> 20} MiB at most, {again.seconds:.0f} s"
    assert max(killed.anonymous, again.anonymous) <= limit, "in files it took more than the limit"
    losses = [_losses(folder / name) for name in ("plain", "files")]
    assert losses[0] == losses[1], losses
    assert len(losses[0]) == STEPS
    digests = [_digests(folder / name) for name in ("plain", "files")]
    assert digests[0] == digests[1]
    yield f"{len(digests[0])} tensors and {STEPS} losses are equal to the bit"


def _command(run: Path, layers: int, more: Sequence[str]) -> list[str]:
    words = (
        f"--run.dir {run} --model.name transformer --model.args.width {WIDTH} --model.args.heads 4 "
        f"--model.args.layers {layers} --model.args.ffn {4 * WIDTH} --model.args.vocab_size 256 "
        "--model.args.max_seq_len 16 --data.name synthetic --data.args.kind tokens "
        f"--data.args.vocab_size 256 --data.seq_len 16 --train.steps {STEPS} "
        "--train.global_batch 2 --train.micro_batch 1 "
        f"--train.eval_samples 1 --mesh.accumulate shard --checkpoint.every_steps {SAVE_EVERY} "
        "--checkpoint.keep_last 1 --checkpoint.export false"
    )
    return [sys.executable, "train.py", *words.split(), *more]


@dataclass(frozen=True)
class Start:
    """One start of train.py."""

    anonymous: int
    """Peak in bytes."""
    seconds: float
    steps: int


def _run(run: Path, layers: int, more: Sequence[str], kill_after: int = 0) -> Start:
    """To its end; or SIGKILL after a sealed checkpoint and one more step."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    run.mkdir(parents=True, exist_ok=True)
    most, began = 0, time.monotonic()
    with (run / "said").open("ab") as said:
        process = subprocess.Popen(
            _command(run, layers, more), cwd=ROOT, env=environ, stdout=said, stderr=said
        )
    try:
        while process.poll() is None:
            most = max(most, _anonymous(process.pid))
            if (
                kill_after
                and any(run.glob("checkpoints/step-*/manifest.json"))
                and len(_losses(run)) > kill_after
            ):
                break
            time.sleep(LOOK_S)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == (-signal.SIGKILL if kill_after else 0), (run / "said").read_text()[-2000:]
    return Start(most, time.monotonic() - began, len(_losses(run)))


def _anonymous(pid: int) -> int:
    """Bytes now; 0 of a process that has just ended."""
    return proc.memory_bytes(pid).get("RssAnon", 0)


def _losses(run: Path) -> list[float]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record["loss"] for record in records if "loss" in record]


def _digests(run: Path) -> dict[str, Any]:
    newest = max(run.glob("checkpoints/step-*/manifest.json"))
    found: dict[str, Any] = json.loads(newest.read_text())["manifest"]["digests"]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
