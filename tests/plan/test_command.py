"""python -m fsdp.plan as it is typed: the table, the line to paste, the recipe, and the messages about
mistakes.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp.config import load
from fsdp.plan.__main__ import main
from tests.plan.asked import SMALL

ROOT = Path(__file__).parents[2]
QUICK = (*SMALL, "--plan.gpus", "4", "--memory.activation_checkpointing", "none",
         "--mesh.reshard_after_forward", "true")  # fmt: skip
"""Few enough questions that they are answered in this process."""


def said(capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> str:
    assert main(list(flags)) == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


def best_flags(text: str) -> list[str]:
    return shlex.split(
        next(line for line in text.splitlines() if line.startswith("  best: ")).removeprefix("  best: ")
    )


@pytest.mark.slow
@pytest.mark.long
def test_the_best_line_planned_alone_has_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Pasted behind the question with --plan.fix, the best line gives the row that it was taken from."""
    table = said(capsys, *QUICK)
    first = table.splitlines()[3]
    again = said(capsys, *SMALL, "--plan.gpus", "4", "--plan.fix", "true", *best_flags(table))
    assert again.splitlines()[3].split() == first.split()


@pytest.mark.long
@pytest.mark.slow
def test_a_recipe_is_written_that_train_py_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "planned.toml"
    text = said(capsys, *QUICK, "--plan.write", str(recipe))
    config = load(["--config", str(recipe)])
    assert config.plan.predicted_peak_gib > 0
    assert config.plan.predicted_step_s > 0
    assert f"--train.micro_batch {config.train.micro_batch}" in text
    words = [sys.executable, "train.py", "--config", str(recipe), "--dry-run"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"{config.mesh.replicate or 1} × shard {config.mesh.shard or 1}" in done.stdout


WRONG = [
    ("--plan.gpu h900", "--plan.gpu h900 is not in the table: A100 .* HINT: --plan.gpu h100"),
    ("--plan.gpus 4 --train.global_batch 6", "--train.global_batch 6 .* HINT: --train.global_batch 8, or"),
    ("--plan.gpus 4 --train.global_batch 24 --train.micro_batch 4", "--train.global_batch 24 .* HINT: "),
    ("--plan.gpus 6 --mesh.replicate 4", "--mesh.strategy auto, replicate 4 .* HINT: "),
    ("--plan.gpus 4 --mesh.reshard_after_forward 3", "--mesh.reshard_after_forward 3 .* HINT: "),
    ("--plan.gpus 4 --model.name tests.plan.own:Reading", ".*Reading failed: .*meta.* HINT: "),
    (
        "--plan.gpus 4 --model.name tests.plan.own:Looking",
        ".*cannot make a step on fake tensors.*HINT: .*torch.where",
    ),
    (
        "--plan.gpus 4 --model.name tests.plan.own:Scaling",
        ".*cannot make a step on fake tensors.*scaled.* HINT: .*register_fake",
    ),
    ("--plan.gpus 4 --model.name tests.plan.own:Masked", ".*cannot make a step .*'mask'.* HINT: "),
    ("--gpus 8", "--gpus is not a flag. HINT: did you mean --plan.gpus?"),
    ("--plan.write tests", "tests cannot be written: .*HINT: --plan.write plan.toml"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_a_mistake_is_one_line_with_a_hint(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [] if "--model.name" in flags else ["--model.name", "transformer"]
    own = ["--data.name", "synthetic", "--data.args.kind", "tokens", "--data.seq_len", "32"]
    error = said(capsys, *words, *own, *QUICK_KNOBS, *flags.split(), code=2)
    assert re.fullmatch(f"fsdp.plan: {message}.*\n", error), error


QUICK_KNOBS = ("--memory.activation_checkpointing", "none")


@pytest.mark.slow
def test_if_nothing_fits_a_hint_names_flags(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, *QUICK, "--plan.memory_gib", "1.4")
    assert (
        "nothing fits. HINT: --plan.gpus 8, a --plan.gpu with more memory, or a lower --data.seq_len" in text
    )
    assert "best:" not in text
