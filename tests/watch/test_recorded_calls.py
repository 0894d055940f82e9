"""Hangs as on CUDA, judged from the flight recorder: real records of gloo, and records in NCCL's form."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp.base.torch_private.core import flight_recorder_entries
from fsdp.dist.env import DistEnv
from fsdp.watch.hang_verdict import judge
from fsdp.watch.messages import is_report
from fsdp.watch.observation import Observation, decode
from fsdp.watch.recorded_calls import GroupCalls, find_stuck, group_calls
from launch.policy import EXIT_HUNG
from tests.fuzz.targets import a_report
from tests.support.marks import sample_are
from tests.support.processes import eventually
from tests.support.runs import QUIET
from tests.support.world import run_world

ROOT = Path(__file__).parents[2]
GATHER = GroupCalls("mesh_dp_shard", 51, 51, "allgather", 4096)
HOST = (
    ("/venv/lib/python3.11/site-packages/torch/_tensor.py", 9, "tolist"),
    ("/home/me/mine.py", 12, "step"),
)
"""A host that waits for its device, with the processor."""
WAITING = Observation(
    0,
    "n1",
    1,
    phase="forward",
    step=7,
    cuda=True,
    still_s=12.0,
    cpu_s=12.0,
    state="R",
    answered=True,
    stack=HOST,
    calls=(GATHER,),
)


# ---------------------------------------------------------------- the recorder


def default_group() -> GroupCalls:
    return next(one for one in group_calls(flight_recorder_entries()) if one.group == "default_pg")


def ended(one: GroupCalls, whole: bool) -> bool:
    """All calls, or all but the newest."""
    return one.unfinished == (0 if whole else one.newest)


def records(env: DistEnv, folder: str) -> list[GroupCalls]:
    """All ranks end one collective, ranks 0 and 1 queue another, and each reads its record."""
    dist.all_reduce(torch.zeros(3))
    marks = dist.FileStore(f"{folder}/marks", env.world_size)
    work = dist.all_reduce(torch.zeros(7), async_op=True) if env.rank < 2 else None
    # A thread of gloo marks the first call as ended, a moment after it has returned.
    eventually("the end of the first call", lambda: ended(default_group(), work is None), 20)
    found = group_calls(flight_recorder_entries())
    marks.set(f"read {env.rank}", "")
    marks.wait([f"read {rank}" for rank in range(env.world_size)])
    if work is None:
        dist.all_reduce(torch.zeros(7))
    else:
        work.wait()
    return found


def ends_some(env: DistEnv) -> None:
    for _ in range(9):
        dist.all_reduce(torch.zeros(2))


def test_the_absent_rank_is_found_in_real_records(tmp_path: Path) -> None:
    run_world(3, ends_some)  # an earlier group of these processes, with the same name
    recorded = dict(enumerate(run_world(3, records, str(tmp_path))))
    stuck = find_stuck(recorded)
    assert stuck is not None
    assert (stuck.waiting, stuck.absent, stuck.odd) == ((0, 1), (2,), {})
    assert stuck.call.shown == f"all_reduce of 7 numbers (call {stuck.call.unfinished} of default_pg)"


def nccl(number: int, state: str = "completed", **other: Any) -> dict[str, Any]:
    """An entry as torch/csrc/distributed/c10d/FlightRecorder writes it."""
    return {
        "pg_id": 1,
        "process_group": ("1", "mesh_dp_shard"),
        "group_ranks": "[0, 1]",
        "collective_seq_id": number,
        "is_p2p": False,
        "profiling_name": "nccl:_all_gather_base",
        "input_sizes": [[16, 4]],
        "state": state,
        "retired": False,
    } | other


def test_a_record_of_nccl_in_brief() -> None:
    other = {"process_group": ("0", "default_pg"), "group_ranks": ""}
    entries = [
        nccl(1),
        nccl(2, "started"),
        nccl(3, "scheduled"),
        nccl(9, "scheduled", is_p2p=True),
        nccl(4, "scheduled", retired=True, **other),
    ]
    assert group_calls(entries) == [
        GroupCalls("mesh_dp_shard [0, 1]", 3, 2, "all_gather", 64, True),
        GroupCalls("default_pg", 4, 0),
    ]
    earlier = nccl(70, "started", pg_id=0)
    assert group_calls([earlier, *entries]) == group_calls(entries)
    # of calls that go out together the last entry alone is marked when all have ended
    together = [nccl(2, "scheduled"), nccl(2, "scheduled"), nccl(2, profiling_name="nccl:coalesced")]
    assert group_calls([nccl(1), *together]) == [GroupCalls("mesh_dp_shard [0, 1]", 2, 0)]
    assert group_calls([*together, nccl(3, "scheduled")])[0].unfinished == 3
    split = nccl(1, "scheduled", profiling_name="nccl:all_to_all")
    assert group_calls([split])[0].numel == 0  # shares may differ


def test_groups_without_a_description_are_told_apart() -> None:
    """As the two that a user makes of the same ranks."""
    first, second = (nccl(n, "scheduled", process_group=(str(n), "undefined")) for n in (3, 4))
    assert [one.group for one in group_calls([first, second])] == ["group 3 [0, 1]", "group 4 [0, 1]"]


# ---------------------------------------------------------------- the verdict


def world(**odd: Any) -> list[Observation]:
    """Four ranks that wait in one collective, but for rank 2."""
    ranks = [replace(WAITING, rank=rank, pid=100 + rank) for rank in range(4)]
    ranks[2] = replace(ranks[2], **odd)
    return ranks


OUT: dict[str, Any] = {
    "calls": (replace(GATHER, newest=50, unfinished=0),),
    "stack": (("/home/me/mine.py", 30, "forward"),),
    "state": "S",
    "cpu_s": 0.1,
}
AHEAD = {"step": 9, "phase": "optimizer"}
"""On CUDA hosts run ahead of their device: steps and phases prove nothing."""


@pytest.mark.parametrize(
    ("odd", "kind", "words"),
    [
        (OUT, "blocked", "rank 2 (n1) waits outside of any collective, 12.0 s by now: step 7, forward, at "),
        ({**OUT, **AHEAD}, "blocked", "step 9, optimizer, at home/me/mine.py:30 forward"),
        ({**OUT, "phase": "data"}, "data", "rank 2 (n1) waits for its data"),
        ({**OUT, "answered": False, "calls": ()}, "lock", "rank 2 (n1) holds Python's lock in C"),
        (
            {**OUT, "state": "R", "cpu_s": 11.0, "moving": True},
            "loop",
            "computes without end, 11.0 s by now, in Python",
        ),
        (
            {**OUT, "state": "R", "cpu_s": 11.0},
            "device",
            "rank 2 (n1) computes without end or waits for its GPU, 12.0 s by now",
        ),
        (
            {"calls": (replace(GATHER, op="allreduce"),), **AHEAD},
            "collective",
            "rank 2 (n1) entered another collective, allreduce, where the others entered allgather",
        ),
        (
            {"calls": (replace(GATHER, numel=4097),)},
            "shapes",
            "rank 2 (n1) came to allgather with 4097 numbers, the others with 4096",
        ),
    ],
)
def test_the_rank_at_fault_is_named(odd: dict[str, Any], kind: str, words: str) -> None:
    verdict = judge(world(**odd), ranks=4)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == (kind, (2,))
    assert words in verdict.what
    assert verdict.others.startswith("ranks 0, 1, 3 wait in allgather of 4,096 numbers (call 51 of mesh_dp")


def test_a_backward_is_named_by_the_line_of_its_own_thread() -> None:
    engine = (("/venv/lib/python3.11/site-packages/torch/autograd/graph.py", 9, "_engine_run_backward"),)
    threads = {"unnamed 77": (("/home/me/mine.py", 44, "backward"),), "reader-0": OUT["stack"]}
    verdict = judge(world(**{**OUT, "phase": "backward", "stack": engine, "threads": threads}), ranks=4)
    assert verdict is not None
    assert verdict.what.endswith("step 7, backward, at home/me/mine.py:44 backward")


def test_a_device_that_has_not_begun() -> None:
    begun = replace(GATHER, started=True)
    ranks = [replace(e, calls=(begun,)) for e in world()]
    ranks[2] = replace(ranks[2], calls=(GATHER,))
    verdict = judge(ranks, ranks=4)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("device", (2,))
    assert verdict.what.startswith("the GPU of rank 2 (n1) has not begun allgather of 4,096 numbers")


def test_all_in_one_call_is_the_network() -> None:
    verdict = judge(world(), ranks=4)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("network", (0, 1, 2, 3))
    assert verdict.what.startswith("ranks 0, 1, 2, 3 are in allgather of 4,096 numbers (call 51 of mesh_dp")
    assert judge([replace(e, still_s=9.0) for e in world()], ranks=4) is None


def test_of_two_groups_the_rank_at_the_end_of_the_chain_is_named() -> None:
    """Ranks 0 and 1 wait for 1 and 2 in their groups, and rank 2 waits nowhere."""
    first, second = replace(GATHER, group="first"), replace(GATHER, group="second")
    ended: dict[str, Any] = {"newest": 50, "unfinished": 0}
    ranks = world()[:3]
    ranks[0] = replace(ranks[0], calls=(first,))
    ranks[1] = replace(ranks[1], calls=(replace(first, **ended), second))
    ranks[2] = replace(ranks[2], **{**OUT, "calls": (replace(second, **ended),)})
    verdict = judge(ranks, ranks=3)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("blocked", (2,))
    assert "(call 51 of second)" in verdict.others


def test_groups_in_another_order() -> None:
    first, second = replace(GATHER, group="first"), replace(GATHER, group="second")
    ended: dict[str, Any] = {"newest": 50, "unfinished": 0}
    ranks = world()[:2]
    ranks[0] = replace(ranks[0], calls=(first, replace(second, **ended)))
    ranks[1] = replace(ranks[1], calls=(replace(first, **ended), second))
    verdict = judge(ranks, ranks=2)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("collective", (1,))
    assert "rank 1 (n1) waits in allgather of 4,096 numbers (call 51 of second)" in verdict.what
    assert verdict.others == "rank 0 waits in allgather of 4,096 numbers (call 51 of first)"
    assert "same order" in verdict.hint


@pytest.mark.parametrize(
    "odd",
    [
        {**OUT, "stack": (("/x/torch/_inductor/compile.py", 3, "compile"),), "cpu_s": 11.0},
        {**OUT, "phase": "end"},
        {**OUT, "answered": None},
        {**OUT, "state": "R", "starved_s": 8.0},
    ],
    ids=["it compiles", "the export", "nobody was asked", "no processor was free"],
)
def test_a_rank_that_may_be_at_work_is_not_at_fault(odd: dict[str, Any]) -> None:
    assert judge(world(**odd), ranks=4) is None


def test_a_loop_is_named_by_its_processor_time_where_processors_are_shared() -> None:
    shared = {**OUT, "state": "R", "cpu_s": 4.0, "starved_s": 8.0}
    assert judge(world(**shared), ranks=4, endless_s=6.0) is None
    verdict = judge(world(**shared), ranks=4, endless_s=3.0)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("device", (2,))


def test_a_host_s_busy_wait_is_not_reported_as_a_loop() -> None:
    """All have ended their calls, and one waits for a kernel of its own."""
    done = (replace(GATHER, unfinished=0),)
    assert judge([replace(e, calls=done) for e in world()], ranks=4) is None


def test_records_travel_between_monitors() -> None:
    one = world()[2]
    assert decode(json.loads(json.dumps(one.encoded()))) == one
    report = {**a_report(), "ranks": [json.loads(json.dumps(one.encoded()))]}
    assert is_report(report)
    report["ranks"][0]["calls"][0]["op"] = 3
    assert not is_report(report)


# ---------------------------------------------------------------- whole runs


FAULTS = {
    "blocked": "rank 2 .* waits outside of any collective, .*like_cuda.py:.* blocks",
    "loop": "rank 2 .* computes without end, .* in Python: .*like_cuda.py:.* loops",
    "device": "rank 2 .* computes without end or waits for its GPU, .*like_cuda.py:.* spins",
    "collective": "rank 2 .* entered another collective, all_reduce, where the others entered ",
}


@pytest.mark.parametrize("fault", sample_are([], FAULTS))
def test_a_run_with_a_stand_in_for_nccl(fault: str, tmp_path: Path) -> None:
    words = [one for one in QUIET if one not in ("--watch.enabled", "false")]
    model = ["--model.name", "tests.watch.like_cuda:Faulty", "--watch.hang_s", "8"]
    command = [sys.executable, "-m", "launch.local", "--ranks", "3", "--restarts", "0", *words, *model]
    done = subprocess.run(
        [*command, "--run.dir", str(tmp_path / "run")],
        cwd=ROOT,
        env={**os.environ, "FAULT": fault, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = [json.loads(line) for line in (tmp_path / "run/watch/verdicts.jsonl").read_text().splitlines()]
    assert [one["kind"] for one in said] == [fault, "ended"], done.stderr
    assert re.search(FAULTS[fault], done.stderr), done.stderr
    assert "ranks 0, 1 wait in" in done.stderr
    assert done.returncode == EXIT_HUNG, done.stderr
