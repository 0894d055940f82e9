"""python -m fsdp.plan as it is typed: the table, the line to paste, the recipe, and the messages about
mistakes.
"""

from __future__ import annotations

import os
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
QUICK = (
    *SMALL,
    "--plan.gpus",
    "4",
    "--memory.activation_checkpointing",
    "none",
    "--mesh.reshard_after_forward",
    "true",
)
"""Few enough questions that they are answered in this process."""


def said(capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> str:
    assert main(list(flags)) == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


def test_a_padded_batch_that_a_search_refuses_is_planned_with_the_hint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = (*QUICK, "--train.global_batch", "6")
    hint = said(capsys, *flags, code=2).rpartition(", or ")[2]
    assert said(capsys, *flags, *hint.split()).count("--train.global_batch 6") == 1


def best_flags(text: str) -> list[str]:
    return shlex.split(
        next(line for line in text.splitlines() if line.startswith("  best: ")).removeprefix("  best: ")
    )


@pytest.mark.slow
@pytest.mark.long
def test_the_command_of_the_page_as_typed() -> None:
    command = next(
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.strip().startswith("python -m fsdp.plan")
    ).strip()
    words = [sys.executable, *shlex.split(command.partition("#")[0])[1:]]
    done = subprocess.run(
        words,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^  mesh +reshard +checkpointing +micro-batch +peak GiB +fits 79 +step s +tok/s/GPU +MFU +bound by$",
        done.stdout,
        re.M,
    )
    assert re.search(r"^  \d+×\d+ +(true|false) ", done.stdout, re.M)
    assert "not modelled: torch.compile" in done.stdout
    assert "--mesh.strategy" in best_flags(done.stdout)


@pytest.mark.slow
@pytest.mark.long
def test_the_best_line_planned_alone_has_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Pasted behind the question with --plan.fix, the best line gives the row that it was taken from."""
    table = said(capsys, *QUICK)
    first = table.splitlines()[3]
    again = said(capsys, *SMALL, "--plan.gpus", "4", "--plan.fix", "true", *best_flags(table))
    assert again.splitlines()[3].split() == first.split()


@pytest.mark.slow
def test_a_recipe_is_written_that_train_py_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "planned.toml"
    text = said(capsys, *QUICK, "--plan.write", str(recipe))
    config = load(["--config", str(recipe)])
    assert config.plan.predicted_peak_gib > 0
    assert config.plan.predicted_step_s > 0
    assert f"--train.micro_batch {config.train.micro_batch}" in text
    done = subprocess.run(
        [sys.executable, "train.py", "--config", str(recipe), "--dry-run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert f"{config.mesh.replicate or 1} × shard {config.mesh.shard or 1}" in done.stdout


def test_help_lists_the_planners_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert not ended.value.code
    assert "--plan.node_link_gb_s" in capsys.readouterr().out


WRONG = [
    ("--plan.gpu h900", "--plan.gpu h900 is not in the table: a100, .* HINT: --plan.gpu h200 or h100"),
    ("--plan.gpu h100x", "--plan.gpu h100x is not in the table: .* HINT: --plan.gpu h100 or h200"),
    (
        "--plan.gpus 4 --train.global_batch 6",
        "--train.global_batch 6 over 4 ranks is 1.5 samples a rank: no mesh divides it, and a search plans "
        "no padded batch. HINT: --train.global_batch 8, or --plan.gpus 4 --plan.fix true",
    ),
    (
        "--plan.gpus 4 --train.global_batch 24 --train.micro_batch 4",
        "--train.micro_batch 4 does not divide a rank's share: .* a search plans no padded batch. "
        "HINT: --train.micro_batch 3, or --plan.gpus 4 --plan.fix true",
    ),
    (
        "--plan.gpus 8 --train.global_batch 26 --train.micro_batch 2",
        "--train.global_batch 26 over 8 ranks is 3.25 samples a rank: .* HINT: --train.global_batch 32, or",
    ),
    (
        "--plan.gpus 6 --mesh.replicate 4",
        "--mesh.strategy auto, replicate 4 × shard any: no such mesh has 6 ranks. HINT: ",
    ),
    (
        "--plan.gpus 4 --mesh.reshard_after_forward 3",
        "--mesh.reshard_after_forward 3 does not divide shard .* HINT: ",
    ),
    (
        "--plan.gpus 4 --plan.gpu a100 --speed.float8 tensorwise",
        "--speed.float8 tensorwise needs compute capability 8.9, .*HINT: --speed.float8 off",
    ),
    (
        "--plan.gpus 4 --memory.nvme optimizer --memory.nvme_dir /tmp",
        "--memory.nvme optimizer keeps the .*HINT: --memory.cpu_offload true",
    ),
    ("--plan.gpus 4 --plan.margin 2", "--plan.margin 2.0 is out of range: .* HINT: --plan.margin 0.03"),
    (
        "--plan.gpus 4 --model.name tests.plan.own:Reading",
        "--model.name tests.plan.own:Reading failed: .*meta.* HINT: ",
    ),
    (
        "--plan.gpus 4 --model.name tests.plan.own:Looking",
        "--model.name tests.plan.own:Looking reads tensor values in its forward .*HINT: torch.where",
    ),
    (
        "--plan.gpus 4 --model.name tests.plan.own:Scaling",
        r"--model.name tests.plan.own:Scaling cannot make a step on fake tensors of inputs \[\d+, 32\], "
        r"targets \[\d+, 32\]: .*scaled.* HINT: --data.name of .* torch.library.register_fake for ",
    ),
    (
        "--plan.gpus 4 --model.name tests.plan.own:Masked",
        r"missing a required argument: 'mask', and the data have only .*\. HINT: give it a default",
    ),
    ("--plan.gpus 4 --model.name tests.plan.own:Nothing", "--model.name tests.plan.own:Nothing: .* HINT: "),
    ("--gpus 8", "--gpus is not a flag. HINT: did you mean --plan.gpus?"),
    ("--gpu h100", "--gpu is not a flag. HINT: did you mean --plan.gpu?"),
    ("--plan.write tests", r"tests cannot be written \(a folder is there\). HINT: --plan.write plan.toml"),
    (
        "--plan.write absent/plan.toml",
        r"absent/plan.toml cannot be written \(its folder is not there.*\). HINT: --plan.write plan.toml",
    ),
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
    assert "nothing fits. HINT: --plan.gpus 8, a --plan.gpu with more memory, or --data.seq_len lower" in text
    assert "best:" not in text
