"""Line files cut from the end: the result of a filter of the whole file, at a cost free of its size."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
from pathlib import Path

import pytest

from fsdp.rundir import history
from fsdp.rundir.history import RunDir

TORN = (b'{"step": 7, "lo', b"\0" * 90, b"12", b"[1, 2]", b"\xff\xfe", b"", b"[" * 2000)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return history.create(tmp_path / "run")


def record(step: int, **more: float) -> bytes:
    return json.dumps({"step": step, "loss": 1 / 3, **more}).encode()


def written(run: RunDir, lines: list[bytes], end: bytes = b"\n") -> None:
    run.metrics.write_bytes(b"\n".join(lines) + end)


def read_whole(path: Path) -> list[bytes]:
    """The lines with a step, without `fsdp`."""
    found = []
    for line in path.read_bytes().split(b"\n"):
        try:
            known = json.loads(line.lstrip(b"\0").decode())
        except (ValueError, RecursionError):
            continue
        if isinstance(known, dict) and type(known.get("step")) is int:
            found.append(line.lstrip(b"\0"))
    return found


def step_of(line: bytes) -> int:
    return int(json.loads(line)["step"])


def odd_file(chance: random.Random, run: RunDir) -> None:
    """Steps in order, some of them twice (evaluations), torn lines between, the last newline or none."""
    lines: list[bytes] = []
    for step in range(chance.choice((0, 1, 3, 40))):
        lines += [record(step)] * chance.choice((1, 1, 2))
        lines += [chance.choice(TORN)] * (chance.random() < 0.1)
        if chance.random() < 0.05:
            lines[-1] = b"\0" * 30 + lines[-1]
    written(run, lines, chance.choice((b"\n", b"", b'\n{"step": 8', b"\n\n", b"\n" + bytes(99))))


def test_a_cut_keeps_what_a_filter_of_the_whole_file_keeps(run: RunDir) -> None:
    for seed in range(60):
        chance = random.Random(seed)
        odd_file(chance, run)
        whole, step = read_whole(run.metrics), chance.choice((-1, 0, 2, 20, 38, 39, 100))
        assert history.last_step(run.metrics) == max(map(step_of, whole), default=0), seed
        history.truncate(run.metrics, step)
        left = [line for line in whole if step_of(line) <= step]
        assert read_whole(run.metrics) == left, seed
        assert history.last_step(run.metrics) == (step_of(left[-1]) if left else 0), seed
        history.append(run.metrics, {"step": step + 1})
        assert read_whole(run.metrics) == [*left, b'{"step": %d}' % (step + 1)], seed


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_the_other_name_of_a_file_keeps_its_records(link: object, run: RunDir, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(record(1) + b"\n" + record(2) + b"\n")
    link(other, run.metrics)  # type: ignore[operator]
    history.truncate(run.metrics, 1)
    assert [step_of(line) for line in read_whole(other)] == [1, 2]
    assert [step_of(line) for line in read_whole(run.metrics)] == [1]


# ---------------------------------------------------------------- cost


def bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def cost(run: RunDir, count: int) -> tuple[int, int]:
    """Bytes read and peak bytes of memory of a start's work on a file of `count` records, of which ten are
    removed.
    """
    line = b'{"step": %d, "loss": 2.302585092994046, "lr": 0.0003, "tokens": 65536, "per_s": 1048576.5}'
    written(run, [line % step for step in range(count)])
    tracemalloc.start()
    before = bytes_read()
    history.truncate(run.metrics, count - 11)
    assert history.last_step(run.metrics) == count - 11
    read, peak = bytes_read() - before, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return read, peak


def test_a_start_costs_the_same_after_any_number_of_steps(run: RunDir) -> None:
    (few_read, few_peak), (read, peak) = cost(run, 10_000), cost(run, 100_000)
    assert read < few_read + 100
    assert peak < 1.1 * few_peak < 10 << 20


def test_other_classes_are_a_line_of_their_own(run: RunDir) -> None:
    """`cat, dog` that became `dog, zebra` have as many samples and outputs."""
    old, trained, other = {"samples": 3, "fingerprint": "a"}, "c" * 16, "d" * 16
    record = {"event": "start", "from_step": 0, "data": {**old, "classes": trained}}
    run.history.write_text(json.dumps(record) + "\n")
    assert history.trained_classes(run) == trained
    assert history.data_changes(run, {**old, "classes": trained}) == []
    _, line = history.data_changes(run, {"samples": 3, "fingerprint": "b", "classes": other})
    assert line.startswith("the classes have other names or another order")
    run.history.write_text(json.dumps({**record, "data": old}) + "\n")
    assert history.data_changes(run, {**old, "classes": other}) == [], "an earlier version recorded none"
    assert history.trained_classes(run) == ""
