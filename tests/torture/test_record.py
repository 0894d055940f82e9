"""Sittings that add up: what a killed one has checked is counted, and two at once lose nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import eventually, pids_with
from tests.torture import kills_page, record, soak_page
from tests.torture.record import Record

ROOT = Path(__file__).parents[2]
START = {"seed": 3, "jobs": 1, "kills": 0, "ends": 0, "steps_repeated": 0, "most_repeated": 0, "left_out": []}


def counted(file: Path) -> Record:
    one = Record(file, kills_page.page, **START)
    for moment in ("saving", "saving", "sealing"):
        one.count(moments=moment, launchers="forked", victims="one rank", stores="folder", shapes="fsdp on 2")
        one.most(most_repeated=7)
        one.add(kills=1, steps_repeated=7)
    one.write()
    return one


def test_sittings_add_up_on_the_page(tmp_path: Path) -> None:
    first, second = counted(tmp_path / "torture.json"), counted(tmp_path / "torture.json")
    first.violation("fsdp on 2: full_model differs")
    second.add(ends=1)
    second.write()
    sittings = record.read(tmp_path / "torture.json")
    assert [one["kills"] for one in sittings] == [3, 3]
    assert record.counted(sittings, "moments") == {"saving": 4, "sealing": 2}
    page = (tmp_path / "torture.md").read_text()
    assert "6 kills in 2 sittings" in page
    assert "1 runs reached their end" in page
    assert "| saving | 4 |" in page
    assert "Violations: 1." in page
    assert "seed 3: fsdp on 2: full_model differs" in page
    assert "at most 7" in kills_page.summary(sittings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["torture.json", "torture.md"]


def test_a_soak_that_has_not_ended_says_how_far_it_came(tmp_path: Path) -> None:
    one = Record(
        tmp_path / "soak.json", soak_page.page, seed=1, every=60.0, steps=900, step=0, finished=0, left_out=[]
    )
    one.count(faults="SIGTERM")
    one.set(step=450)
    one.write()
    assert "| SIGTERM | 1 |" in (tmp_path / "soak.md").read_text()
    assert "450 of 900" in (tmp_path / "soak.md").read_text()
    assert "it has not ended" in soak_page.summary(record.read(tmp_path / "soak.json"))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_torture_that_is_ended_counts_what_it_has_checked(number: signal.Signals, tmp_path: Path) -> None:
    file, place = tmp_path / "torture.json", tmp_path / "place"
    place.mkdir()
    words = ["--kills", "1000", "--seed", "5", "--no-launchers", "--record", str(file), "--place", str(place)]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.torture", *words],
        cwd=ROOT,
        env={**os.environ, "MARKED": str(place)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as torture:
        assert torture.stdout is not None
        try:
            eventually(
                "two kills", lambda: file.exists() and record.read(file)[0]["kills"] >= 2, 600, file.read_text
            )
            torture.send_signal(number)
            code = torture.wait(600)
        finally:
            # Before its output is read: a rank of a killed torture that waits for a peer that was never
            # started keeps the pipe open for half an hour.
            while left := pids_with(f"MARKED={place}"):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        said = torture.stdout.read()
    [sitting] = record.read(file)
    assert sitting["kills"] >= 2, said
    assert sum(sitting["moments"].values()) == sitting["kills"]
    assert sitting["violations"] == []
    if number == signal.SIGTERM:
        assert code == 0, said
        assert f"{sitting['kills']} kills in " in said
        assert list(place.iterdir()) == []
    assert json.loads(file.read_text())["sittings"] == [sitting]
