"""What a soak judges as growing."""

from __future__ import annotations

import os
from pathlib import Path

from tests.torture import growth
from tests.torture.growth import Growth, Sample


def test_a_process_is_compared_with_itself_alone(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    growth.append(
        file, [Sample("launcher", "1-1", 1, 100, 200.0, 9), Sample("rank", "2-1", 1, 100, 300.0, 40)]
    )
    growth.append(
        file, [Sample("launcher", "1-1", 11, 900, 201.0, 9), Sample("rank", "3-1", 11, 900, 400.0, 60)]
    )
    assert growth.grown(growth.read(file)) == [Growth("launcher", 1.0, 0, 10, 800)]
    assert growth.too_much(growth.grown(growth.read(file))) == []


def test_descriptors_that_stay_open_over_restarts_are_named() -> None:
    leaking = Growth("launcher", 1.0, 40, 20, 2000)
    assert growth.too_much([leaking]) == [
        "it grows: launcher: +1.00 MiB, +40 descriptors over 20 restarts, 2,000 steps"
    ]


def test_a_run_directory_is_measured_without_what_grows_with_the_steps(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "history.jsonl", "tensorboard/one", "checkpoints/step/a", "watch/page"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 1024)
    found = growth.of_run(tmp_path, 3, 40)
    assert (found.count, found.mib) == (2, 2048 / 2**20)


def test_this_process_has_memory_and_descriptors() -> None:
    found = growth.of_process("rank", os.getpid(), 1, 1)
    assert found is not None
    assert found.mib > 1
    assert found.count >= 3
