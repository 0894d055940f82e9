"""From evidence to a verdict: who it was, and who only waited. Observations are made up; real ranks are in
test_faults.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp.base.phases import Activity
from fsdp.base.torch_private import flight_recorder_entries
from fsdp.distributed.env import DistEnv
from fsdp.watch.observe import Frame, GroupCalls, Observation, group_calls, parse_stacks
from fsdp.watch.verdict import Verdict, find_stuck, judge
from tests.support.processes import eventually
from tests.support.world import run_world

MINE = (
    ("/home/me/mine.py", 12, "forward"),
    ("/venv/lib/python3.11/site-packages/torch/nn/module.py", 9, "_call"),
)
WAITING = Observation(
    0,
    "n1",
    1,
    phase="forward",
    step=7,
    begun=50,
    ended=49,
    op="all_gather_single",
    numel=64,
    still_s=3.0,
    answered=True,
)


def world(**odd: Any) -> list[Observation]:
    """Four ranks that wait in one collective, but for rank 2."""
    ranks = [replace(WAITING, rank=rank, pid=100 + rank) for rank in range(4)]
    ranks[2] = replace(ranks[2], **odd)
    return ranks


def judged(observations: list[Observation], **how: Any) -> Verdict:
    verdict = judge(observations, **how)
    assert verdict is not None
    return verdict


def on(**odd: Any) -> Verdict:
    return judged(world(**odd))


OUT = {"begun": 49, "ended": 49, "stack": MINE}


DEAD: dict[str, Any] = {"alive": False, "state": "X"}
FAULT = "Fatal Python error: Segmentation fault\n"


@pytest.mark.parametrize(
    ("odd", "kind", "words"),
    [
        (DEAD, "died", "rank 2 (n1) died without an error message"),
        ({**DEAD, "oom_kills": 1}, "died", "was killed by the kernel, out of memory: step 7, forward"),
        ({"alive": False, "fatal": FAULT, "ended": 50}, "fault", "Segmentation fault"),
        ({**OUT, "state": "T"}, "stopped", "rank 2 (n1) is stopped (SIGSTOP): step 7, forward"),
        ({**OUT, "state": "t", "answered": False}, "stopped", "is stopped (a debugger): step 7, forward"),
        ({**OUT, "phase": "data"}, "data", "waits for its data, 3.0 s by now: step 7, data, at home"),
        ({**OUT, "cpu_s": 2.9, "state": "R", "moving": True}, "loop", "without end, 2.9 s by now, in Python"),
        ({**OUT, "answered": False}, "lock", "holds Python's lock in C"),
        (
            OUT,
            "blocked",
            "waits outside of any collective, 3.0 s by now: step 7, forward, at home/me/mine.py",
        ),
        ({"left_out": "all_reduce"}, "skipped", "has left out a sum over tensor ranks or replicas (all_re"),
        ({"step": 8}, "skipped", "has left out all_gather_single of step 7, forward"),
        ({"op": "all_reduce"}, "collective", "all_reduce, where the others entered all_gather_single"),
        ({"numel": 65}, "shapes", "came to all_gather_single with 65 numbers, the others with 64"),
        ({"silent_node_s": 3.2, "node": "n2"}, "partition", "node n2 (rank 2) cannot be reached for 3.2 s"),
    ],
)
def test_the_rank_at_fault_is_named_with_what_it_does(odd: dict[str, Any], kind: str, words: str) -> None:
    verdict = on(**odd)
    assert (verdict.kind, verdict.ranks) == (kind, (2,))
    assert words in verdict.what


def test_a_rank_that_aborts_when_its_peer_is_killed_for_memory_is_not_named() -> None:
    """The count of kills is of the cgroup that both share."""
    killed: dict[str, Any] = {"alive": False, "state": "X", "oom_kills": 1, "memory_limit": 4 << 30}
    found = world(**killed)
    found[3] = replace(found[3], **killed, fatal="Fatal Python error: Aborted\n")
    verdict = judged(found)
    assert verdict.ranks == (2,)
    assert verdict.hint.startswith("its cgroup allows 4 GiB: a larger limit (the container's, such as docker")
    found[3] = replace(found[3], fatal="")  # one kill of the kernel, two dead ranks: one is the launcher's
    verdict = judged(found)
    assert verdict.what.startswith(
        "each of ranks 2, 3 died without an error message (killed, or out of memory)"
    )


@pytest.mark.parametrize("how", [{"cpu_s": 10.7, "starved_s": 9.8}, {}, {"answered": False}])
def test_a_rank_that_computes_its_data_does_not_wait_for_them(how: dict[str, Any]) -> None:
    """In the training thread, in one that reads ahead, or in C code that holds Python's lock; with a
    processor that another process uses half of the time.
    """
    odd = {**OUT, "phase": "data", "still_s": 20.6, "process_cpu_s": 10.8, **how}
    verdict = judged(world(**odd), endless_s=3.0)
    assert verdict.kind == "data"
    assert verdict.what.startswith("rank 2 (n1) prepares its data, 20.6 s by now: step 7, data")


def half_killed(**unseen: Any) -> list[Observation]:
    """Ranks 0 and 1 failed in different collectives because the processes of the other node are gone."""
    echo = said(5.0, "Connection closed by peer", secondary=True)
    here = [
        replace(WAITING, rank=0, failure=echo),
        replace(WAITING, rank=1, step=8, op="all_reduce", failure=echo),
    ]
    return here + [replace(WAITING, rank=rank, node="n2", step=8, **unseen) for rank in (2, 3)]


def test_a_node_whose_processes_are_gone_is_named_though_it_can_be_reached() -> None:
    verdict = judged(half_killed(silent_node_s=0.4, monitor_ended=True), ranks=4)
    assert (verdict.kind, verdict.ranks) == ("died", (2, 3))
    assert verdict.what.startswith(
        "the processes of n2 (ranks 2, 3) are gone, and the node can still be reached"
    )
    assert verdict.others == "ranks 0, 1 ended after it"
    assert "network" not in verdict.hint


def test_collectives_are_compared_only_if_every_rank_is_seen() -> None:
    assert judge(half_killed()[:2], ranks=2) is not None
    assert judge(half_killed()[:2], ranks=4) is None
    verdict = judged(half_killed(silent_node_s=3.2), ranks=4)
    assert (verdict.kind, verdict.ranks) == ("partition", (2, 3))


WRITING: dict[str, tuple[Frame, ...]] = {"checkpoint 7": (("/anywhere/place.py", 9, "write"),)}


def test_in_a_save_the_rank_at_its_storage_is_named() -> None:
    save: dict[str, Any] = {
        "phase": "save",
        "begun": 49,
        "ended": 49,
        "activity": Activity.SAVE,
        "threads": WRITING,
    }
    ranks = [replace(WAITING, rank=rank, save_activity=Activity.RANKS, **save) for rank in range(3)]
    ranks[1] = replace(ranks[1], save_activity=Activity.STORAGE)
    verdict = judged(ranks)
    assert (verdict.kind, verdict.ranks) == ("storage", (1,))
    assert "at anywhere/place.py:9 write" in verdict.what
    ranks[1] = replace(ranks[1], still_s=17.0, io_bytes=int(12.3 * 2**30))
    assert judge(ranks) is None  # a large save at 0.73 GiB/s, such as the last, for which the run waits
    ranks[1] = replace(ranks[1], io_bytes=30 << 20)
    verdict = judged(ranks)
    assert "waits for its storage, 1.76 MiB/s, 17.0 s by now" in verdict.what


@pytest.mark.parametrize(
    "odd",
    [
        {**OUT, "state": "R", "cpu_s": 0.4, "starved_s": 2.5},
        {**OUT, "state": "R", "cpu_s": 1.2},
        {**OUT, "phase": "end"},
        {**OUT, "stack": (("/x/torch/_inductor/compile.py", 3, "compile"), *MINE), "cpu_s": 3.0},
        {**OUT, "phase": "data", "answered": False, "process_cpu_s": 3.0, "activity": Activity.PROFILE},
        {**OUT, "answered": None},
    ],
    ids=[
        "no processor was free",
        "it computes",
        "the export",
        "it compiles",
        "it writes a profile",
        "nobody was asked",
    ],
)
def test_a_rank_that_may_be_at_work_is_not_at_fault(odd: dict[str, Any]) -> None:
    assert judge(world(**odd)) is None


def test_threads_that_the_compiler_leaves_behind_hide_no_hang() -> None:
    """As torch has them in each compiled run with Triton: in the pool of its worker processes."""
    left = (
        ("/x/torch/_inductor/compile_worker/subproc_pool.py", 9, "_recv_msg"),
        ("/x/torch/_inductor/compile_worker/subproc_pool.py", 9, "_read_thread"),
        ("/usr/lib/python3.11/threading.py", 9, "run"),
    )
    assert on(**OUT, threads={"InductorSubproc": left}).kind == "blocked"
    compiles = {"unnamed 77": (("/x/torch/_inductor/compile_fx.py", 3, "compile_fx"),)}
    assert judge(world(**OUT, threads=compiles)) is None


def test_a_loop_is_named_by_its_processor_time_where_processors_are_shared() -> None:
    shared = {**OUT, "state": "R", "still_s": 9.0, "cpu_s": 4.0, "starved_s": 5.0}
    assert judge(world(**shared), endless_s=6.0) is None
    verdict = judged(world(**shared), endless_s=3.0)
    assert (verdict.kind, verdict.ranks) == ("loop", (2,))


STATES: tuple[dict[str, Any], ...] = (
    {"alive": False, "state": "X"},
    {"alive": False, "state": "X", "fatal": "Fatal Python error: Aborted"},
    {"state": "T"},
    {"over": True},
    {"silent_node_s": 3.2, "node": "n2"},
    {},
)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_dead_rank_has_a_verdict_whatever_the_others_do(ranks: int) -> None:
    """Also where all that live are stopped."""
    for states in itertools.product(STATES, repeat=ranks):
        found = [replace(WAITING, rank=rank, **state) for rank, state in enumerate(states)]
        verdict = judge(found, ranks=ranks)
        if any(not one.alive for one in found):
            assert verdict is not None, states
            assert verdict.kind in ("died", "fault", "partition"), states
            assert not verdict.recoverable


def said(time: float, message: str = "it broke", **more: Any) -> dict[str, Any]:
    words = {"kind": "exception", "ranks": [], "secondary": False, "ours": False, "hint": ""}
    return {**words, "time": time, "message": message, **more}


def test_the_first_own_failure_counts_and_consequences_do_not() -> None:
    ranks = world(failure=said(5.0, "a"))
    ranks[0] = replace(ranks[0], failure=said(4.0, "Connection closed by peer", secondary=True))
    ranks[1] = replace(ranks[1], failure=said(6.0, "b"))
    verdict = judged(ranks)
    assert (verdict.ranks, verdict.what) == ((2,), "rank 2 (n1) failed: a")
    assert verdict.others == "ranks 0, 1 ended after it"


def test_an_error_of_all_ranks_is_about_the_ranks_that_it_names() -> None:
    ranks = [
        replace(one, failure=said(1.0, "step 3: not finite", kind="nan", ranks=[3], ours=True))
        for one in world()
    ]
    verdict = judged(ranks)
    assert (verdict.kind, verdict.ranks, verdict.others) == ("nan", (3,), "")


def test_of_two_ranks_the_one_further_on_has_left_a_collective_out() -> None:
    verdict = judged([WAITING, replace(WAITING, rank=1, step=8, op="all_reduce")])
    assert (verdict.kind, verdict.ranks) == ("skipped", (1,))


def test_stacks_of_faulthandler_are_read() -> None:
    text = (
        'Thread 0x00007f (most recent call first):\n  File "/a.py", line 1 in x\n\n'
        "Current thread 0x00008f (most recent call first):\n"
        '  File "/b.py", line 2 in y\n  File "/c.py", line 3 in z\n'
    )
    first = [("/a.py", 1, "x")]
    assert parse_stacks(text) == [[("/b.py", 2, "y"), ("/c.py", 3, "z")], first]
    assert parse_stacks(text.partition("Current")[0]) == [first]


def test_of_several_deaths_the_first_is_at_fault() -> None:
    ranks = [replace(one, alive=False, state="X", dead_s=0.1) for one in world()]
    ranks[3] = replace(ranks[3], dead_s=0.7)
    verdict = judged(ranks)
    assert (verdict.kind, verdict.ranks, verdict.others) == ("died", (3,), "ranks 0, 1, 2 ended after it")


# ---------------------------------------------------------------- on CUDA, from the flight recorder

GATHER = GroupCalls("mesh_dp_shard", 51, 51, "allgather", 4096)
HOST = (
    ("/venv/lib/python3.11/site-packages/torch/_tensor.py", 9, "tolist"),
    ("/home/me/mine.py", 12, "step"),
)
"""A host that waits for its device, with the processor."""
ON_CUDA = Observation(
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


def test_the_absent_rank_is_found_in_real_records(tmp_path: Path) -> None:
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
        GroupCalls("mesh_dp_shard [0, 1]", 3, 2, "all_gather", 64),
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


# ---------------------------------------------------------------- the verdict


def cuda_world(**odd: Any) -> list[Observation]:
    """Four ranks that wait in one collective, but for rank 2."""
    ranks = [replace(ON_CUDA, rank=rank, pid=100 + rank) for rank in range(4)]
    ranks[2] = replace(ranks[2], **odd)
    return ranks


NOT_QUEUED: dict[str, Any] = {
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
        ({**NOT_QUEUED, **AHEAD}, "blocked", "step 9, optimizer, at home/me/mine.py:30 forward"),
        ({**NOT_QUEUED, "answered": False, "calls": ()}, "lock", "rank 2 (n1) holds Python's lock in C"),
        ({**NOT_QUEUED, "state": "R", "cpu_s": 11.0, "moving": True}, "loop", "without end, 11.0 s by now"),
        ({**NOT_QUEUED, "state": "R", "cpu_s": 11.0}, "device", "without end or waits for its GPU, 12.0 s"),
        (
            {"calls": (replace(GATHER, op="allreduce"),), **AHEAD},
            "collective",
            "the others entered allgather",
        ),
        ({"calls": (replace(GATHER, numel=4097),)}, "shapes", "with 4097 numbers, the others with 4096"),
    ],
)
def test_on_cuda_the_rank_at_fault_is_named(odd: dict[str, Any], kind: str, words: str) -> None:
    verdict = judged(cuda_world(**odd), ranks=4)
    assert (verdict.kind, verdict.ranks) == (kind, (2,))
    assert words in verdict.what
    assert verdict.others.startswith("ranks 0, 1, 3 wait in allgather of 4,096 numbers (call 51 of mesh_dp")


def test_of_two_groups_the_rank_at_the_end_of_the_chain_is_named() -> None:
    """Ranks 0 and 1 wait for 1 and 2 in their groups, and rank 2 waits nowhere."""
    first, second = replace(GATHER, group="first"), replace(GATHER, group="second")
    ended: dict[str, Any] = {"newest": 50, "unfinished": 0}
    ranks = cuda_world()[:3]
    ranks[0] = replace(ranks[0], calls=(first,))
    ranks[1] = replace(ranks[1], calls=(replace(first, **ended), second))
    ranks[2] = replace(ranks[2], **{**NOT_QUEUED, "calls": (replace(second, **ended),)})
    verdict = judged(ranks, ranks=3)
    assert (verdict.kind, verdict.ranks) == ("blocked", (2,))
    assert "(call 51 of second)" in verdict.others


def test_groups_in_another_order() -> None:
    first, second = replace(GATHER, group="first"), replace(GATHER, group="second")
    ended: dict[str, Any] = {"newest": 50, "unfinished": 0}
    ranks = cuda_world()[:2]
    ranks[0] = replace(ranks[0], calls=(first, replace(second, **ended)))
    ranks[1] = replace(ranks[1], calls=(replace(first, **ended), second))
    verdict = judged(ranks, ranks=2)
    assert (verdict.kind, verdict.ranks) == ("collective", (1,))
    assert "rank 1 (n1) waits in allgather of 4,096 numbers (call 51 of second)" in verdict.what
    assert verdict.others == "rank 0 waits in allgather of 4,096 numbers (call 51 of first)"
    assert "another order" in verdict.hint
    # its step has no exchange where the step before had one: so the other rank only waits
    ranks[0] = replace(ranks[0], left_out="all_to_all_single", op="all_reduce")
    verdict = judged(ranks, ranks=2)
    assert (verdict.kind, verdict.ranks) == ("skipped", (0,))
    assert "has left out an exchange of tokens over context or expert ranks (all_to_all_" in verdict.what
    alike = [replace(one, left_out="all_to_all_single") for one in world(op="all_reduce")]
    assert judged(alike).kind == "collective", "no rank's step is as the one before"


# ---------------------------------------------------------------- whole runs
