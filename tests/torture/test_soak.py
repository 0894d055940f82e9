"""A soak in its short form: a run through every fault that this machine can make, in two sittings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture import record
from tests.torture.soak import last_step

ROOT = Path(__file__).parents[2]


def soak(place: Path, *more: str) -> subprocess.Popen[str]:
    words = ["--place", str(place), "--record", str(place.parent / "soak.json"), *more]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.torture.soak", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.long
def test_a_run_through_faults_in_two_sittings_ends_as_one_that_nothing_happened_to(tmp_path: Path) -> None:
    place = tmp_path / "soak"
    with soak(place, "--steps", "900", "--pace", "0.03", "--every", "2", "--seed", "11") as begun:
        assert begun.stdout is not None
        for line in begun.stdout:
            if (found := re.match(r"step (\d+), ", line)) is not None and int(found[1]) > 0:
                break
        begun.terminate()
        said = begun.stdout.read()
        assert begun.wait() == 0, said
    assert "continue it with: python -m tests.torture.soak --place" in said
    with soak(place) as ended:
        said = ended.communicate()[0]
        assert ended.returncode == 0, said
    assert "the losses and the model of the unbroken run, bit for bit; the report opens" in said
    first, second = record.read(tmp_path / "soak.json")
    assert (first["finished"], second["finished"]) == (0, 1)
    assert 0 < first["step"] < second["step"] == 900
    assert sum(first["faults"].values()) + sum(second["faults"].values()) > 2


def test_the_last_step_is_that_of_the_last_whole_line_with_a_loss(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert last_step(file) == 0
    file.write_text('{"step": 8, "loss": 1.5}\n{"step": 9, "loss": 1.4}\n{"step": 9, "eval_loss": 1}\n{"st')
    assert last_step(file) == 9
