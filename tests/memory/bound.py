"""Does a run fit into memory that a third of its optimizer states would fill? In files it does, killed and resumed, to the bit.

    python -m tests.memory.bound                    # about two minutes, 5 GB of disk, 6 GB of memory for the comparison
    python -m tests.memory.bound --limit-mib 512 --dir /local/nvme

The limit is RLIMIT_DATA: what the kernel lets a process have of memory that is no file's. Four starts of train.py on one
process: in memory without a limit, in memory with it (which must fail), in files with it and killed after its checkpoint, and
the same command again. Compared are the losses and the digests of every parameter and every state at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WIDTH, STEPS, SAVE_EVERY = 512, 6, 3
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH  # parameters of a block, but for its norms
STARTER = (
    "import os, resource, sys; limit = int(sys.argv[1]);"
    "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)) if limit else None;"
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--limit-mib", type=int, default=448)
    parser.add_argument("--dir", default="")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="bound-") as folder:
        for line in compare(Path(folder), asked.limit_mib << 20, Path(asked.dir or Path(folder, "disk"))):
            print(line, flush=True)
    return 0


def compare(folder: Path, limit: int, disk: Path) -> list[str]:
    """The four starts; an AssertionError where one is not as it should be."""
    layers = 3 * limit // 8 // LAYER + 1
    outside = f"--memory.nvme all --memory.nvme_dir {disk}".split()
    said = [f"limit {limit >> 20} MiB; optimizer states {layers * LAYER * 8 >> 20} MiB, {layers} layers of {WIDTH}"]
    plain, plain_kib, plain_s = _run(folder / "plain", layers, 0, [])
    said.append(f"in memory, no limit: {plain_kib >> 10} MiB resident at most, {plain_s:.0f} s")
    assert plain == 0
    code, _, _ = _run(folder / "cramped", layers, limit, [])
    assert code != 0, "the limit does not bind: the run in memory passed under it"
    said.append(f"in memory, with the limit: fails with exit code {code}")
    step = _kill(folder / "files", layers, limit, outside)
    assert not any(disk.iterdir()), "a killed run left something behind"
    said.append(f"in files, with the limit: killed after step {step}; {disk} is empty")
    code, kib, seconds = _run(folder / "files", layers, limit, outside)
    assert code == 0, f"exit code {code}"
    assert not any(disk.iterdir())
    said.append(f"in files, with the limit, resumed: {kib >> 10} MiB resident at most, pages of files counted, {seconds:.0f} s")
    losses = [_losses(folder / name) for name in ("plain", "files")]
    assert losses[0] == losses[1], losses
    assert len(losses[0]) == STEPS
    digests = [_digests(folder / name) for name in ("plain", "files")]
    assert digests[0] == digests[1]
    said.append(f"{len(digests[0])} tensors and {STEPS} losses are equal to the bit")
    return said


def _command(run: Path, layers: int, limit: int, more: Sequence[str]) -> list[str]:
    arguments = {"width": WIDTH, "heads": 4, "layers": layers, "ffn": 4 * WIDTH, "vocab_size": 256, "max_seq_len": 16}
    words = [word for name, value in arguments.items() for word in (f"--model.args.{name}", str(value))]
    return [
        sys.executable, "-c", STARTER, str(limit), "train.py", "--run.dir", str(run), "--model.name", "transformer", *words,
        "--data.name", "synthetic", "--data.args.kind", "tokens", "--data.args.vocab_size", "256", "--data.seq_len", "16",
        "--train.steps", str(STEPS), "--train.global_batch", "2", "--train.micro_batch", "1", "--train.eval_samples", "1",
        "--mesh.accumulate", "shard", "--checkpoint.every_steps", str(SAVE_EVERY), "--checkpoint.keep_last", "1",
        "--checkpoint.export", "false", *more,
    ]  # fmt: skip


def _start(run: Path, layers: int, limit: int, more: Sequence[str]) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    run.mkdir(parents=True, exist_ok=True)
    with (run / "said").open("ab") as said:
        return subprocess.Popen(_command(run, layers, limit, more), cwd=ROOT, env=environ, stdout=said, stderr=said)


def _run(run: Path, layers: int, limit: int, more: Sequence[str]) -> tuple[int, int, float]:
    """Exit code, most KiB resident, seconds."""
    began = time.monotonic()
    process = _start(run, layers, limit, more)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, used.ru_maxrss, time.monotonic() - began


def _kill(run: Path, layers: int, limit: int, more: Sequence[str]) -> int:
    """SIGKILL once a checkpoint is sealed and a step is made after it."""
    process = _start(run, layers, limit, more)
    try:
        while not (any(run.glob("checkpoints/step-*/manifest.json")) and len(_losses(run)) > SAVE_EVERY):
            assert process.poll() is None, (run / "said").read_text()[-2000:]
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return len(_losses(run))


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
    assert resource.RLIMIT_DATA is not None, "RLIMIT_DATA is Linux's"
    sys.exit(main(sys.argv[1:]))
