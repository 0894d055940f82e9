"""The status page, read as a monitor reads it; and the device's clock, with a stand-in for the device."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fsdp.base.errors import TrainingError
from fsdp.base.phases import ACTIVITIES, Activity, announces
from fsdp.checkpoint.store import LocalStore
from fsdp.watch import status_page
from fsdp.watch.status_page import CUDA, STEP_S, STEPS, DeviceClock, StatusPage, Writer, failure_report
from tests.support.env import env_of


@pytest.fixture
def page() -> Iterator[StatusPage]:
    page = status_page.create()
    yield page
    page.close()


def test_a_step_is_read_as_it_was_written(page: StatusPage) -> None:
    writer = Writer(page.numbers)
    other = status_page.attach(os.dup(page.descriptor))
    for step in (1, 2, 3):
        for name in ("data", "forward", "backward", "reduce", "optimizer", "record"):
            writer.phase(name, step)
    status = status_page.read(other.numbers)
    assert (status["step"], status["phase"], other.numbers[STEPS]) == (3, "record", 2)
    assert {step for step, _ in status["work"]} == {1, 2}
    other.close()


def test_a_steps_time_is_without_the_evaluation_and_the_save_after_it(
    page: StatusPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monitor's patience is a multiple of it."""
    now = [100.0]
    monkeypatch.setattr(status_page, "clock", lambda: now[0])
    writer = Writer(page.numbers)
    for step in (1, 2, 3):
        for name in ("data", "forward", "record", "evaluate", "evaluate", "save"):
            writer.phase(name, step)
            now[0] += 1800.0 if name in ("evaluate", "save") else 1.0
    assert page.numbers[STEP_S] == 3.0


@pytest.mark.parametrize("filler", ["x", "😀", "\udcff"])
def test_a_failure_fits_in_any_script(page: StatusPage, filler: str) -> None:
    error = TrainingError(filler * 100_000, ranks=tuple(range(100_000)))
    page.write_failure(failure_report(error, env_of()))
    failure = page.read_failure()
    assert failure is not None
    assert failure["message"] == str(error)[: len(failure["message"])]
    assert failure["ranks"] == list(range(4096))
    page.write_failure(failure_report(ValueError(f"{filler * 900}\n" * 400), env_of()))


def test_activities_of_both_threads_are_read(
    page: StatusPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Activity, Activity]] = []

    def look(*_: object) -> None:
        status = status_page.read(page.numbers)
        seen.append((status["activity"], status["save_activity"]))

    monkeypatch.setattr(ACTIVITIES, "listener", Writer(page.numbers).activity)
    monkeypatch.setattr(os, "fsync", look)
    place = LocalStore(tmp_path)
    announces(Activity.SAVE)(announces(Activity.RANKS)(look))()
    announces(Activity.SAVE)(place.write)("", "a", [b"1"])
    behind = threading.Thread(target=place.write, args=("", "b", [b"1"]))
    behind.start()
    behind.join()
    look()
    assert seen == [
        (Activity.SAVE | Activity.RANKS, Activity.NONE),
        (Activity.SAVE | Activity.STORAGE, Activity.NONE),
        (Activity.NONE, Activity.STORAGE),
        (Activity.NONE, Activity.NONE),
    ]


class Tick:
    """A device on which an event is the time of its recording, in ms."""

    now = 0.0
    passed = 1e9

    def record(self) -> None:
        Tick.now += 10.0
        self.at = Tick.now

    def query(self) -> bool:
        return self.at <= Tick.passed

    def elapsed_time(self, end: Tick) -> float:
        return end.at - self.at


class Group:
    def wait_for_unshard(self) -> str:
        return "gathered"


def test_device_times_are_read_once_the_events_have_passed(
    page: StatusPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.numbers[CUDA] = 1
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Tick())
    clock = DeviceClock(Writer(page.numbers))
    Tick.passed = 0.0
    with clock.timed_waits(Group):
        for step in (1, 2):
            for name in ("data", "forward", "backward"):
                clock.phase(name, step)
                assert Group().wait_for_unshard() == "gathered"
        assert status_page.read(page.numbers)["work"] == []
        before = Tick.now
        clock.phase("evaluate", 2)
        assert {Group().wait_for_unshard() for _ in range(9)} == {"gathered"}
        assert Tick.now == before + 10.0  # of the phase: a long evaluation would keep an event for each wait
        Tick.passed = 1e9
        clock.phase("data", 3)
        clock.phase("forward", 3)
    spent = status_page.read(page.numbers)["spent"]
    # each phase is an event, and two around its wait: 20 ms without it
    assert spent["forward"] == spent["backward"] == pytest.approx(2 * 0.02)
    assert spent["waiting"] == pytest.approx(4 * 0.01)
    assert dict(status_page.read(page.numbers)["work"])[2] == pytest.approx(2 * 0.02)
    assert spent["data"] >= 0  # the host's: the device's waits are none of its own
    assert not hasattr(Group.wait_for_unshard, "__wrapped__")
