"""Grouped records of steps: their sizes, numbers and ends, and what a resume removes of them."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fsdp.record.grouped import StepGroups
from fsdp.record.recorder import Recorder
from fsdp.rundir import history
from fsdp.rundir.paths import RunDir
from tests.record.test_recorder import Hears, one_step, recorder


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def take(told: Recorder, first: int, last: int) -> None:
    for step in range(first, last + 1):
        told.step(replace(one_step(), step=step, loss=torch.tensor(float(step))))
        told.flush()


def grouping(folder: Path, hears: Hears, full: int) -> Recorder:
    told = recorder(folder, io.StringIO(), hears)
    told._groups = StepGroups(full)
    return told


def test_the_size_of_a_group_grows_with_the_step() -> None:
    groups = StepGroups(100_000)
    sizes = {step: groups.size_at(step) for step in (1, 100_000, 100_001, 1_000_000, 1_000_001, 10_000_001)}
    assert list(sizes.values()) == [1, 1, 10, 10, 100, 1000]
    assert StepGroups(0).size_at(10**9) == 1


def test_a_record_of_several_steps_has_their_means_and_extremes(tmp_path: Path) -> None:
    hears = Hears()
    told = grouping(tmp_path, hears, 20)
    take(told, 1, 30)
    told.close()
    found = records(tmp_path)
    assert [one["step"] for one in found] == [*range(1, 21), 30]
    last = found[-1]
    assert (last["steps"], last["loss"], last["samples"]) == (10, 25.5, 8)
    assert (last["low"]["loss"], last["high"]["loss"]) == (21.0, 30.0)
    assert [step for step, _ in hears.heard] == list(range(1, 31)), "other sinks receive every step"


def test_a_group_ends_at_a_save_and_at_the_end_of_the_run(tmp_path: Path) -> None:
    told = grouping(tmp_path, Hears(), 20)
    take(told, 1, 24)
    told.saving(24)
    take(told, 25, 27)
    told.close()
    assert [(one["step"], one.get("steps", 1)) for one in records(tmp_path)[20:]] == [(24, 4), (27, 3)]
    run = RunDir(tmp_path)
    assert history.last_step(run) == 27
    history.truncate_metrics(run, 24)
    assert history.last_step(run) == 24


def test_a_value_that_is_not_finite_shows_in_the_mean_and_not_in_the_extremes() -> None:
    groups = StepGroups(10)
    found = [groups.add({"step": step, "loss": math.nan if step == 15 else 1.0}) for step in range(11, 21)]
    assert found[:-1] == [None] * 9
    assert found[-1] is not None
    assert math.isnan(found[-1]["loss"])
    assert found[-1]["high"] == {"loss": 1.0}
