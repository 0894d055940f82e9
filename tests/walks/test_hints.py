"""What a run prints to type next is typed in the directory where it was printed: the lines at a run's end and
at its failure, and the hints of common mistakes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (
    "--model.name transformer --model.preset toy --data.name text --data.seq_len 32 --data.args.max_mb 0.1 "
    "--train.global_batch 4 --train.eval_samples 4 --checkpoint.every_steps 2"
)
LOCAL = "python -m launch.local --ranks 2 --restarts 0"
FAILS = """
import os
from torch import nn

class Fails(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 10))
        self.left = int(os.environ.get("LEFT", 10**6))

    def forward(self, images):
        self.left -= 1
        if not self.left:
            raise ValueError("my own")
        return super().forward(images)
"""


class Terminal:
    """Runs lines as a person types them, in one directory."""

    def __init__(self, place: Path) -> None:
        self.place, programs = place, place / "bin"
        programs.mkdir()
        for name, before in (("python", ""), ("torchrun", " -m torch.distributed.run --standalone")):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{before} "$@"\n')
            (programs / name).chmod(0o755)

    def typed(self, line: str, code: int = 0, **variables: str) -> str:
        path = f"{self.place / 'bin'}{os.pathsep}{os.environ['PATH']}"
        more = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        done = subprocess.run(
            line,
            shell=True,
            cwd=self.place,
            env=os.environ | more,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == code, f"{line}\n{done.stdout}{done.stderr}"
        return (done.stdout + done.stderr).rstrip()


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    (tmp_path / "mine.py").write_text(FAILS)
    return Terminal(tmp_path)


def hint(text: str) -> str:
    """The first suggestion of the last line."""
    return text.splitlines()[-1].partition("HINT: ")[2].partition(", or ")[0].partition(" to train")[0]


@pytest.mark.slow
def test_the_lines_at_the_end_and_hints_of_a_finished_run(terminal: Terminal) -> None:
    start = f"python {ROOT}/train.py {TEXT} --train.steps 4 --run.dir runs/a"
    text = terminal.typed(start)
    lines = [line for line in text.partition("next:\n")[2].splitlines() if line.startswith("  ")]
    assert len(lines) == 4
    for line in lines:
        terminal.typed(line)
    adapters = f"{start} --lora.rank 2 --model.frozen ''"
    refused = terminal.typed(adapters, 4)
    assert "runs/a/full_model" in hint(refused)
    again = terminal.typed(f"{adapters} {hint(refused)}")
    assert "finished at step 4: runs/a-adapters" in again
    damaged = terminal.place / "runs/a/checkpoints/step-00000008/.metadata"
    for folder in damaged.parents[1].iterdir():
        (folder / ".metadata").write_bytes(b"damaged")
    refused = terminal.typed(f"{start}-resumed --checkpoint.resume runs/a", 4)
    assert "step-00000008 is not whole (.metadata has 7 bytes" in refused
    assert "NOT whole: .metadata has 7 bytes" in terminal.typed(hint(refused), 1)


@pytest.mark.slow
@pytest.mark.parametrize("before", ["torchrun --nproc_per_node=2 {}/train.py", LOCAL])
def test_the_last_lines_of_a_failure_resume_the_run(before: str, terminal: Terminal) -> None:
    start = f"{before.format(ROOT)} --model.name mine:Fails --data.name digits --train.steps 12 --run.dir b"
    terminal.typed(f"{start} --train.stop_after 5")
    text = terminal.typed(start, 1, LEFT="4")
    saved, command = text.splitlines()[-2:]
    assert "b: step 5 is saved." in saved
    assert ("is torchrun's" in saved) == (before != LOCAL)
    assert "resumes from step 5" in terminal.typed(command)
