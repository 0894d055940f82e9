"""What bench.save computes of a save, and how its contender dcp.async_save is used."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bench import save_table
from bench.save_dcp import AsyncSaver
from bench.save_rank import SIZES, Bench, Tally
from fsdp.dist.env import DistEnv
from tests.support.world import run_world


def report(rounds: int) -> dict[str, Any]:
    """Steps of 1 s; with a save each third one is 0.6 s longer, of which 0.1 s are a stall."""

    def way(first_s: float, stall_s: float) -> dict[str, Any]:
        steps = [first_s, 1.0, 1.0]
        return {
            "steps_s": steps * rounds, "stalls_s": [stall_s] * rounds,
            "rounds_s": [sum(steps) / 3] * rounds, "cpu_s": [sum(steps)] * rounds,
        }  # fmt: skip

    load: dict[str, Any] = dict.fromkeys(("unique_bytes", "state_mib", "ours_bytes", "dcp_bytes"), 1.0)
    load |= {"ours_s": [1.0] * rounds, "dcp_s": [2.0] * rounds}
    rank = {
        "parameters": 10**6, "ways": {"none": way(1.0, 0.0), "ours": way(1.6, 0.1)},
        "memory_mib": [1.0], "load": load,
    }  # fmt: skip
    given = argparse.Namespace(size="500m", rounds=rounds, saves=1, ways=["none", "ours"])
    return save_table.summarise([rank, rank], given)


def test_the_whole_cost_of_a_save_is_before_its_stall() -> None:
    page = save_table.markdown(report(6))
    row = next(line for line in page.splitlines() if line.startswith("| ours"))
    assert row.startswith(
        "| ours | 1.200 | 1.200 | +0.60 [+0.60, +0.60] | 1.200 [1.200, 1.200] worse | 0.1000 |"
    )
    assert page.index("the steps together longer by") < page.index("a step held up")
    assert "`python -m bench.save --size 500m --rounds 6 --saves 1 --ways 'none,ours'`" in page


def one_round(env: DistEnv, folder: str) -> tuple[float, float, float]:
    """The mean step of a round whose save is still written for a second after its last step, the sum of the
    steps, and their number.
    """
    torch.set_num_threads(1)
    bench, tally = Bench(env, replace(SIZES["short"], every=2), Path(folder)), Tally()

    def slow() -> None:
        time.sleep(1.0)

    bench.wait_for_writes = slow  # type: ignore[method-assign]
    bench.round("none", tally)
    return tally.rounds_s[0], sum(tally.steps_s), bench.every


def test_writing_that_outlives_the_steps_is_part_of_the_cost(tmp_path: Path) -> None:
    for mean_s, steps_s, steps in run_world(2, one_round, str(tmp_path)):
        assert mean_s >= (steps_s + 1.0) / steps


def test_few_rounds_of_saves_have_no_interval() -> None:
    assert "1.200 (no interval below 6 rounds)" in save_table.markdown(report(5))


def updates_while_saving(env: DistEnv, folder: str) -> list[tuple[float, float]]:
    """The value in each checkpoint, and whether the staged copy is where that of the first save was."""
    weight = torch.nn.Parameter(torch.full((1 << 20,), 0.0))
    saver, found, places = AsyncSaver("thread", dist.new_group(backend="gloo")), [], []
    for step in (1, 2):
        with torch.no_grad():
            weight.fill_(step)
        place = str(Path(folder, str(step)))
        saver.save({"weight": weight.data}, place)
        saver.before_update()
        with torch.no_grad():
            weight.fill_(-1.0)
        saver.finish()
        (copy,) = saver.stager._state_dict_stager._cached_storage_mapping.values()
        places.append(copy.data_ptr())
        read = {"weight": torch.empty(1 << 20)}
        dcp.load(read, checkpoint_id=place)
        found.append((float(read["weight"].min()), float(read["weight"].max())))
    saver.close()
    return [*found, (float(places[0] == places[1]), 1.0)]


def test_the_contender_saves_the_state_before_the_update_with_one_stager(tmp_path: Path) -> None:
    for found in run_world(2, updates_while_saving, str(tmp_path)):
        assert found == [(1.0, 1.0), (2.0, 2.0), (1.0, 1.0)]


@pytest.mark.parametrize(("kind", "shared"), [("thread", False), ("process", True)])
def test_the_contenders_stager_copies_in_the_background(kind: str, shared: bool) -> None:
    saver = AsyncSaver(kind, None)  # type: ignore[arg-type]
    assert saver.stager._config.use_async_staging
    assert saver.stager._config.use_shared_memory is shared
    saver.close()


class Completion:
    """A future that notes when it is waited for."""

    def __init__(self, name: str, waited: list[str]) -> None:
        self.name, self.waited = name, waited

    def result(self) -> None:
        self.waited.append(self.name)


def test_an_update_waits_for_the_copy_and_a_save_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    def save(state: dict[str, str], **__: object) -> argparse.Namespace:
        staged, written = (Completion(f"{state['name']} {what}", waited) for what in ("copied", "written"))
        return argparse.Namespace(staging_completion=staged, upload_completion=written)

    monkeypatch.setattr(dcp, "async_save", save)
    saver = AsyncSaver("thread", None)  # type: ignore[arg-type]
    saver.save({"name": "first"}, "")
    assert not waited
    saver.before_update()
    assert waited == ["first copied"]
    saver.save({"name": "second"}, "")
    assert waited == ["first copied", "first written"]
    saver.close()
    assert waited[2:] == ["second copied", "second written"]
