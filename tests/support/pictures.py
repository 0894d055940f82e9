"""Remakes docs/pictures from real runs: the report of a run that was stopped, failed and continued, the
doctor on a Slurm with one unfit node, and the memory page. Takes minutes, a browser, and Slurm as root.

    python -m tests.support.pictures                    into docs/pictures
    python -m tests.support.pictures --to FOLDER --keep RUN      elsewhere; the run is kept
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image

from fsdp.base import proc
from tests.slurm import scenarios
from tests.slurm.job import Run
from tests.support.browser import Browser
from tests.support.processes import eventually

ROOT = Path(__file__).parents[1]
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
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        run = (options.keep or Path(folder, "digits")).absolute()
        a_night(run)
        sick = scenarios.preflight(Path(folder))["sick"].run.path / "doctor" / "doctor.html"
        memory = run / "profile" / "rank0_memory_profile.html"
        take(options.to, shots(run / "report.html", sick, memory))
    return 0


def shots(report: Path, doctor: Path, memory: Path) -> list[Shot]:
    return [
        Shot("report", report, 1100, 1320, "light"),
        Shot("report-time", report, 1100, 860, "light", "Where the time goes"),
        Shot("report-phone", report, 390, 1250, "dark"),
        Shot("doctor", doctor, 1000, 820, "light"),
        Shot("doctor-phone", doctor, 390, 1000, "dark"),
        Shot("memory", memory, 1100, 900, "light"),
        Shot("memory-phone", memory, 390, 1000, "dark"),
    ]


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
