"""Remakes docs/pictures: report and memory page of a real run that was stopped, failed and continued, and the
other pages of tests/support/pages.py. Takes minutes and a browser.

    python -m tests.support.pictures                    into docs/pictures
    python -m tests.support.pictures --to FOLDER --keep RUN      elsewhere; the run is kept
    python -m tests.support.pictures --run RUN          of a run that is there, profiled with --profile.memory
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image

from fsdp.base import proc
from fsdp.memory.profile_page import page as memory_page
from fsdp.report.page import page as report_page
from fsdp.report.run_data import read_run
from tests.report.test_report import made
from tests.report.test_report import write as write_records
from tests.slurm.job import Run
from tests.support.browser import Browser
from tests.support.pages import write
from tests.support.processes import eventually

ROOT = Path(__file__).parents[2]
RANKS = 4
FLAGS = (
    "--config", "recipes/digits.toml", "--train.steps", "600", "--train.eval_every_steps", "25",
    "--checkpoint.every_steps", "100", "--run.log_every_steps", "50",
)  # fmt: skip
LARGEST = 200_000
PATIENCE_S = 240.0


@dataclass(frozen=True)
class Shot:
    name: str
    file: Path
    width: int
    height: int
    scheme: Literal["light", "dark"]
    at: str = ""
    """The heading that the picture begins with; the page's top where it is empty."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--keep", type=Path, help="where the run stays")
    parser.add_argument("--run", type=Path, help="a run that is there, in place of a new one")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        run = (options.run or options.keep or Path(folder, "digits")).absolute()
        if options.run is None:
            a_night(run)
        pages = write(Path(folder, "pages"))
        pages |= of_run(run, Path(folder)) | of_sweep(Path(folder))
        take(options.to, shots(pages))
    return 0


def of_run(run: Path, folder: Path) -> dict[str, Path]:
    """Its report and its memory page, written into `folder`."""
    account = json.loads((run / "profile" / "rank0_memory.json").read_text())
    texts = {"report": report_page([read_run(run)]), "memory": memory_page(account)}
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in texts}


def of_sweep(folder: Path) -> dict[str, Path]:
    """Three made-up runs of other learning rates: two of them compared, and all as a table."""
    runs = [read_run(decoder(folder / f"decoder-{n}", n)) for n in (1, 2, 3)]
    texts = {"compare": report_page(runs[:2]), "sweep": report_page(runs)}
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in texts}


def decoder(folder: Path, nth: int) -> Path:
    run = made(folder, steps=400, model__name="transformer", optim__lr=0.001 * nth)
    noise = random.Random(nth)
    records: list[dict[str, object]] = []
    for step in range(1, 401):
        loss = 2.1 + 6.0 / (1 + step * 0.02 * nth**0.5) + noise.gauss(0, 0.05)
        seconds = 0.21 * (1 + 0.04 * nth) * noise.uniform(0.95, 1.1)
        records.append({"step": step, "loss": loss, "grad_norm": noise.uniform(0.8, 1.3), "lr": 0.001 * nth})
        records[-1] |= {
            "step_time_s": seconds,
            "data_wait_s": 0.002,
            "per_s": 65536 / seconds,
            "tokens": step,
        }
        if step % 50 == 0:
            records.append({"step": step, "eval_loss": 2.15 + 6.0 / (1 + step * 0.02 * nth**0.5)})
    write_records(run / "metrics.jsonl", records)
    kinds = {"parameters": 3.1, "optimizer": 6.2, "gradients": 1.6, "activations": 9.0 / nth, "gathered": 0.8}
    peak = {
        "bytes": int(sum(kinds.values()) * 2**30),
        "step": 4,
        "phase": "backward",
        "kinds": {kind: int(size * 2**30) for kind, size in kinds.items()},
    }
    (run / "profile").mkdir()
    record = {"format": 1, "peak": peak, "phases": {"backward": peak}}
    (run / "profile" / "rank0_memory.json").write_text(json.dumps(record))
    return run


HEIGHTS = {
    "doctor-64": 1220,
    "doctor-1024": 1560,
    "report": 1320,
    "sweep": 1000,
    "oom": 1150,
    "compare": 1150,
}
"""Of the wide picture; 900 for others."""
TALL = ("doctor-64", "doctor-1024")
"""On a phone their maps begin below 1250."""


def shots(pages: Mapping[str, Path]) -> list[Shot]:
    """Each page at both widths, and the report's times."""
    wide = [Shot(name, file, 1280, HEIGHTS.get(name, 900), "light") for name, file in pages.items()]
    phone = [
        Shot(f"{name}-phone", file, 390, 2300 if name in TALL else 1250, "dark")
        for name, file in pages.items()
    ]
    times = Shot("report-time", pages["report"], 1280, 860, "light", "Where the time goes")
    return [*wide, *phone, times]


def take(folder: Path, wanted: list[Shot]) -> None:
    with Browser() as browser:
        for shot in wanted:
            page = browser.open(shot.file, width=shot.width, height=900, scheme=shot.scheme)
            top = 0
            if shot.at:
                heading = (
                    f"[...document.querySelectorAll('h2')].find((e) => e.textContent.startsWith({shot.at!r}))"
                )
                top = int(page.ask(f"{heading}.getBoundingClientRect().top + scrollY")) - 16
            whole = int(page.ask("document.documentElement.scrollHeight"))
            file = folder / f"{shot.name}.png"
            page.picture(file, top=top, height=min(shot.height, whole - top))
            Image.open(file).convert("RGB").save(file, optimize=True)
            assert file.stat().st_size < LARGEST, f"{file} has {file.stat().st_size} bytes"
            print(f"{file}  {file.stat().st_size // 1024} KiB")


# ---------------------------------------------------------------- a run with a history


def a_night(run: Path) -> None:
    """A run stopped on request, continued at another learning rate, with a rank stopped by SIGSTOP, restarted
    and finished.
    """
    shutil.rmtree(run, ignore_errors=True)
    started(run, "--train.stop_after", "200", "--profile.memory", "true", "--profile.steps", "3:5").wait()
    second = started(run, "--optim.lr", "3e-4", "--watch.hang_s", "3")
    log = Run(run)
    eventually("step 370", lambda: log.reaches(370), PATIENCE_S, lambda: f"{log.steps[-3:]}")
    os.kill(sorted(proc.children(second.pid))[2], signal.SIGSTOP)
    if second.wait(PATIENCE_S):
        raise SystemExit(f"the run ended with {second.returncode}")
    subprocess.run([sys.executable, "-m", "fsdp.report", str(run)], cwd=ROOT, check=True)


def started(run: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "launch.local",
        "--ranks",
        str(RANKS),
        *FLAGS,
        "--run.dir",
        str(run),
        *flags,
    ]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    sys.exit(main())
