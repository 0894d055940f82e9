"""What each bench computes from given measurements, its flags, and the cheap ones in short."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import bench.__main__ as whole
from bench import (
    data,
    data_reader,
    launched,
    overhead,
    ray_tutorial,
    restart,
    start,
    tables,
    train,
)
from bench.peers import setup

HERE = (*whole.SHORT, "data", "overhead")


# ---------------------------------------------------------------- what is made of measurements


def test_a_higher_throughput_and_less_processor_time_are_better() -> None:
    ours, bare = train.Seen(wall_s=[1.0] * 6, cpu_s=[0.5] * 6), train.Seen(wall_s=[1.25] * 6, cpu_s=[1.0] * 6)
    own, other = train.rows({"ours": ours, "bare": bare}, samples=10)
    assert own["per_s"] == [10.0] * 6
    assert "ours_over_it" not in own
    assert (other["ours_over_it"].value, other["cpu_over_it"].value) == (1.25, 0.5)
    text = train.shown([own, other], "tiny")
    assert "1.250 [1.250, 1.250] better" in text
    assert "0.500 [0.500, 0.500] better" in text


def test_ddp_is_compared_with_ddp() -> None:
    def seen(wall_s: float) -> train.Seen:
        return train.Seen(wall_s=[wall_s] * 3, cpu_s=[1.0] * 3)

    found = train.rows(
        {"bare": seen(2.0), "ours": seen(2.0), "ddp": seen(3.0), "ours-ddp": seen(1.0)}, samples=1
    )
    assert {row["name"]: row["ours_over_it"].value for row in found if "ours_over_it" in row} == {
        "bare": 1.0,
        "ddp": 3.0,
    }


class LossTeam:
    """A team with the losses of its name, which takes no round."""

    losses: ClassVar = {"bare": [2.0, 1.0], "ours": [2.0, 1.0], "expert": [2.0, 1.01]}

    def __init__(self, name: str, *_: object, **__: object) -> None:
        self.name = name

    def steps(self, count: int) -> dict[str, list[float]]:
        assert count == train.WARM, "a round began"
        return {"losses": self.losses[self.name]}

    def close(self) -> None:
        pass


def test_different_losses_end_the_bench_before_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "Team", LossTeam)
    with pytest.raises(SystemExit, match=r"expert has loss 1.01 .* same work. HINT: --only bare,ours leaves"):
        train.measure("tiny", 2, ["bare", "ours", "expert"], rounds=6, threads=1)


def test_overhead_is_against_each_hand_written_loop() -> None:
    def seen(wall_s: float) -> train.Seen:
        return train.Seen(wall_s=[wall_s] * 6, cpu_s=[wall_s / 2] * 6, faults=[1000.0] * 6)

    found = overhead.figures({"bare": seen(0.0021), "expert": seen(0.002), "ours": seen(0.002)})
    bare, expert = overhead.rows("tiny", found)
    assert bare[5:9] == [
        "-100 [-100, -100] better", "-50 [-50, -50] better", "1.050 [1.050, 1.050] better",
        "at most 100 µs: yes",
    ]  # fmt: skip
    assert expert[5:8] == ["0 [0, 0] equal", "0 [0, 0] equal", "1.000 [1.000, 1.000] equal"]


@pytest.mark.parametrize(("ours_s", "word"), [(4.4, "within it"), (4.6, "not within it")])
def test_start_is_judged_by_half_of_the_fastest_frameworks_extra(ours_s: float, word: str) -> None:
    walls = {"bare": 4.0, "ours": ours_s, "accelerate": 5.5, "fabric": 5.0}
    text, said = start.shown({name: [start.Started(wall, 8.0, 300.0)] * 3 for name, wall in walls.items()})
    assert "Lightning Fabric, ModelParallel, takes +1.00 s" in said[0]
    assert said[1].endswith(word + ".")
    assert "| shardrun, train.py | " + f"{ours_s} ({ours_s} to {ours_s})" in text


@pytest.mark.parametrize(
    ("ours_s", "lost", "word"), [(3.0, 10, "reached"), (3.5, 3, "not reached"), (3.0, 11, "not reached")]
)
def test_restart_is_judged_by_a_third_and_one_interval(ours_s: float, lost: int, word: str) -> None:
    seen = {"local": [restart.Back(1.0, ours_s, lost)] * 3, "bare": [restart.Back(8.0, 10.0, 5)] * 3}
    assert restart.verdict(seen, every=10).endswith(f"{lost} steps lost at most: {word}.")
    assert f"{ours_s / 10:.3f}" in restart.shown(seen)


def test_rays_tutorial_is_the_lower_row_of_the_ratio() -> None:
    seen = {
        "tutorial": [ray_tutorial.Seen(20.0, 2.0, 1.0, 2.0)] * 2,
        "ours": [ray_tutorial.Seen(10.0, 3.0, 0.5, 1.0)] * 2,
    }
    last = ray_tutorial.table(seen).splitlines()[-1]
    assert [cell.split()[0] for cell in last.split("|")[2:6]] == ["0.500", "1.500", "0.500", "0.500"]


# ---------------------------------------------------------------- rounds in several sittings


def test_added_rounds_keep_both_loads() -> None:
    assert tables.joined("", "4 cores; load before 1.0") == "4 cores; load before 1.0"
    assert (
        tables.joined("4 cores; load before 1.0", "4 cores; load before 2.0")
        == "4 cores; load before 1.0; then load before 2.0"
    )


def test_an_ended_command_is_reported_with_its_error_line(tmp_path: Path) -> None:
    words = "print('step 1/9', flush=True); raise ValueError('no such rank')"
    run = launched.Launched([sys.executable, "-c", words], tmp_path / "log")
    with pytest.raises(launched.Ended, match="step 2 never came: ValueError: no such rank"):
        run.wait_for(2, 20)


# ---------------------------------------------------------------- peers


def test_an_unknown_peer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert setup.main(["lightnin"]) == 2
    assert "HINT: python -m bench.peers.setup accelerate lightning" in capsys.readouterr().err


# ---------------------------------------------------------------- data


def test_a_reader_without_enough_rounds_gets_no_interval() -> None:
    few, many = (data.speed_table({"ours": [2.0] * n, "datasets": [1.0] * n}) for n in (5, 6))
    assert "2.000 (no interval below 6 rounds)" in few
    assert "2.000 [2.000, 2.000] better" in many


def test_the_contenders_windows_are_shardruns(tmp_path: Path) -> None:
    np.arange(20 * data_reader.SEQ_LEN + 1, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    inputs, targets = next(data_reader.ours(tmp_path))
    rows = data_reader.rows_of(tmp_path)
    assert rows.shape == (20, data_reader.SEQ_LEN + 1)
    assert inputs.shape == targets.shape == (data_reader.BATCH, data_reader.SEQ_LEN)
    for row, following in zip(inputs.numpy(), targets.numpy(), strict=True):
        (place,) = np.flatnonzero(rows[:, 0] == row[0])
        assert np.array_equal(rows[place], [*row, following[-1]])


def test_the_readers_take_rounds(tmp_path: Path) -> None:
    seen = data.read(["ours"], tmp_path, rounds=2, batches=2, tokens=50_000)
    assert len(seen["ours"]) == 2
    assert min(seen["ours"]) > 0
