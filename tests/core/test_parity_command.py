"""python -m fsdp.parity as a person types it: a table, a verdict, an exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsdp.parity import Row, difference, rows

ROOT = Path(__file__).parents[2]
SMALL = ["--model.name", "tests.core.own:Uneven", "--data.name", "tests.core.own:vectors", "--train.global_batch", "12"]


def parity(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fsdp.parity", *words], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_a_person_s_own_model_on_two_ranks() -> None:
    done = parity(*SMALL, "--parity.steps", "6")
    assert done.returncode == 0, done.stderr
    *table, verdict = done.stdout.splitlines()
    assert len(table) == 1 + len(rows(2))
    assert all(line.endswith("same") for line in table[1:])
    assert verdict == "parity holds: every mesh trains as one process does, 6 steps on 2 ranks in fp64"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train.stepz", "3"], "fsdp.parity: --train.stepz is not a flag. HINT: did you mean --train.steps?"),
        (["--parity.dtype", "fp8"],
         "fsdp.parity: --parity.dtype fp8 is not one of fp64, fp32, bf16, fp16. HINT: --parity.dtype fp64"),
        (["--parity.ranks", "0"], "fsdp.parity: --parity.ranks 0 is not a whole number from 1. HINT: --parity.ranks 2"),
        (["--parity.rank", "2"],
         "fsdp.parity: --parity.rank is not a flag. HINT: --parity.ranks, --parity.dtype or --parity.steps"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_one_line(words: list[str], message: str) -> None:
    done = parity(*words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message + "\n")


def test_what_is_tried_fits_the_ranks() -> None:
    for ranks in range(1, 9):
        assert all(row.replicate * row.shard == ranks for row in rows(ranks))
    assert Row("hsdp", 2, 2, "true", 1) in rows(4)


def test_a_difference_is_the_worst_parameter_s_and_a_nan_is_far() -> None:
    b = {"large": torch.full((4,), 10.0), "small": torch.ones(1)}
    a = {"large": b["large"].clone(), "small": torch.tensor([1.5])}
    assert difference(a, b, each=True) == pytest.approx(0.5)
    assert difference(a, b, each=False) == pytest.approx(0.5 / 401**0.5)
    assert difference({**a, "small": torch.tensor([float("nan")])}, b, each=True) == float("inf")
