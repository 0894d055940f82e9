"""From evidence to a verdict: who it was, and who only waited. Observation is made up here; real ranks are in
test_faults.py.
"""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp.base.phases import Activity
from fsdp.dist.launcher_hints import launcher_hints
from fsdp.watch.hang_verdict import Verdict, judge
from fsdp.watch.observation import WATCH_FOLDER, Frame, Observation, decode, own_line
from fsdp.watch.observe import parse_stacks
from fsdp.watch.responder import _stack

WATCH = Path(__file__).parents[2] / "fsdp" / "watch"
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


def on(**odd: Any) -> Verdict:
    verdict = judge(world(**odd))
    assert verdict is not None
    return verdict


OUT = {"begun": 49, "ended": 49, "stack": MINE}


@pytest.mark.parametrize(
    ("odd", "kind", "words"),
    [
        ({"alive": False, "state": "X"}, "died", "rank 2 (n1) died without an error message"),
        (
            {"alive": False, "state": "X", "oom_kills": 1},
            "died",
            "rank 2 (n1) was killed by the kernel, out of memory: step 7, forward",
        ),
        (
            {"alive": False, "fatal": "Fatal Python error: Segmentation fault\n", "ended": 50},
            "fault",
            "Segmentation fault",
        ),
        ({**OUT, "state": "T"}, "stopped", "rank 2 (n1) is stopped (SIGSTOP): step 7, forward"),
        (
            {**OUT, "state": "t", "answered": False},
            "stopped",
            "rank 2 (n1) is stopped (a debugger): step 7, forward",
        ),
        (
            {**OUT, "phase": "data"},
            "data",
            "rank 2 (n1) waits for its data, 3.0 s by now: step 7, data, at home/me/mine.py:12",
        ),
        (
            {**OUT, "cpu_s": 2.9, "state": "R", "moving": True},
            "loop",
            "computes without end, 2.9 s by now, in Python",
        ),
        ({**OUT, "answered": False}, "lock", "holds Python's lock in C"),
        (
            OUT,
            "blocked",
            "waits outside of any collective, 3.0 s by now: step 7, forward, at home/me/mine.py:12 forward",
        ),
        ({"step": 8}, "skipped", "has left out all_gather_single of step 7, forward"),
        (
            {"op": "all_reduce"},
            "collective",
            "entered another collective, all_reduce, where the others entered all_gather_single",
        ),
        ({"numel": 65}, "shapes", "came to all_gather_single with 65 numbers, the others with 64"),
        (
            {"silent_node_s": 3.2, "node": "n2"},
            "partition",
            "node n2 (rank 2) cannot be reached from n1 for 3.2 s",
        ),
    ],
)
def test_the_rank_at_fault_is_named_with_what_it_does(odd: dict[str, Any], kind: str, words: str) -> None:
    verdict = on(**odd)
    assert (verdict.kind, verdict.ranks) == (kind, (2,))
    assert words in verdict.what


@pytest.mark.parametrize(
    ("launcher", "leave_out", "killer"),
    [
        ("torchrun", "torchrun --nnodes=1 on the others", "dmesg on n2"),
        ("torchrun under Slurm", "sbatch --exclude=n2", "sacct, or dmesg on n2"),
        ("ray", "`ray stop` on n2", "dmesg on n2"),
    ],
)
def test_a_node_out_of_reach_is_left_out_as_one_types_it_under_the_launcher(
    launcher: str, leave_out: str, killer: str
) -> None:
    hints = launcher_hints(launcher, 2)
    found = world(silent_node_s=3.2, node="n2")
    verdict = judge(found, hints=hints)
    assert verdict is not None
    assert f"or leave it out: {leave_out}" in verdict.hint
    verdict = judge([replace(e, monitor_ended=e.node == "n2") for e in found], hints=hints)
    assert verdict is not None
    assert verdict.hint == f"{killer} shows what killed them"


def test_a_rank_that_aborts_when_its_peer_is_killed_for_memory_is_not_named() -> None:
    """The count of kills is of the cgroup that both share."""
    killed: dict[str, Any] = {"alive": False, "state": "X", "oom_kills": 1, "memory_limit": 4 << 30}
    found = world(**killed)
    found[3] = replace(found[3], **killed, fatal="Fatal Python error: Aborted\n")
    verdict = judge(found)
    assert verdict is not None
    assert verdict.ranks == (2,)
    assert verdict.hint.startswith("its cgroup allows 4 GiB: a larger limit (the container's, such as docker")
    found[3] = replace(found[3], fatal="")  # one kill of the kernel, two dead ranks: one is the launcher's
    verdict = judge(found)
    assert verdict is not None
    assert verdict.what.startswith(
        "each of ranks 2, 3 died without an error message (killed, or out of memory)"
    )


@pytest.mark.parametrize("how", [{"cpu_s": 10.7, "starved_s": 9.8}, {}, {"answered": False}])
def test_a_rank_that_computes_its_data_does_not_wait_for_them(how: dict[str, Any]) -> None:
    """In the training thread, in one that reads ahead, or in C code that holds Python's lock; with a
    processor that another process uses half of the time.
    """
    odd = {**OUT, "phase": "data", "still_s": 20.6, "process_cpu_s": 10.8, **how}
    verdict = judge(world(**odd), endless_s=3.0)
    assert verdict is not None
    assert verdict.kind == "data"
    assert verdict.what.startswith("rank 2 (n1) prepares its data, 20.6 s by now: step 7, data")


def test_a_rank_whose_call_ends_late_for_lack_of_pythons_lock_has_no_other_size() -> None:
    """A thread that reads holds the lock: its rank cannot leave the call, and the others are in the next."""
    ranks = world()
    ranks[2] = replace(ranks[2], begun=ranks[2].begun - 1, ended=ranks[2].ended - 1, numel=5, answered=False)
    found = judge(ranks)
    assert found is not None
    assert (found.kind, found.ranks) == ("lock", (2,))


def test_of_a_lock_held_in_c_the_thread_that_computes_is_named() -> None:
    """A regular expression in a thread that reads holds the lock; the training thread only waits for it."""
    threads = {
        "unnamed 0": (("/usr/lib/python3.11/threading.py", 327, "wait"), ("/home/me/other.py", 1, "waits")),
        "unnamed 1": ((f"{WATCH_FOLDER}responder.py", 85, "_serve"),),
        "unnamed 2": (
            ("/usr/lib/python3.11/re/__init__.py", 166, "match"),
            ("/home/me/words.py", 7, "split"),
        ),
    }
    found = on(**OUT, answered=False, threads=threads, process_cpu_s=1.5)
    assert (found.kind, found.ranks) == ("lock", (2,))
    assert "at home/me/words.py:7 split" in found.what
    assert "mine.py:12" in on(**OUT, answered=False, threads=threads, process_cpu_s=0.1).what


def test_a_rank_that_holds_pythons_lock_for_its_data_and_computes_nothing_is_named_so() -> None:
    assert on(**OUT, phase="data", answered=False).kind == "lock"


def test_a_verdict_names_what_the_others_wait_for() -> None:
    assert on(**OUT).others == "ranks 0, 1, 3 wait in all_gather_single (step 7, forward)"


def half_killed(**unseen: Any) -> list[Observation]:
    """Ranks 0 and 1 failed in different collectives because the processes of the other node are gone."""
    echo = said(5.0, "Connection closed by peer", secondary=True)
    here = [
        replace(WAITING, rank=0, failure=echo),
        replace(WAITING, rank=1, step=8, op="all_reduce", failure=echo),
    ]
    return here + [replace(WAITING, rank=rank, node="n2", step=8, **unseen) for rank in (2, 3)]


def test_a_node_whose_processes_are_gone_is_named_though_it_can_be_reached() -> None:
    verdict = judge(half_killed(silent_node_s=0.4, monitor_ended=True), ranks=4)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("died", (2, 3))
    assert verdict.what.startswith(
        "the processes of n2 (ranks 2, 3) are gone, and the node can still be reached"
    )
    assert verdict.others == "ranks 0, 1 ended after it"
    assert "network" not in verdict.hint


def test_collectives_are_compared_only_if_every_rank_is_seen() -> None:
    assert judge(half_killed()[:2], ranks=2) is not None
    assert judge(half_killed()[:2], ranks=4) is None
    verdict = judge(half_killed(silent_node_s=3.2), ranks=4)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("partition", (2, 3))


def test_a_rank_that_gloo_aborts_is_not_at_fault_if_a_node_is_gone() -> None:
    ranks = half_killed(silent_node_s=0.4, monitor_ended=True)
    ranks[0] = replace(ranks[0], failure=None, alive=False, fatal="Fatal Python error: Aborted")
    verdict = judge(ranks, ranks=4)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("died", (2, 3))


WRITING: dict[str, tuple[Frame, ...]] = {"checkpoint": (("/anywhere/place.py", 9, "write"),)}


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
    verdict = judge(ranks)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("storage", (1,))
    assert "at anywhere/place.py:9 write" in verdict.what
    ranks[1] = replace(ranks[1], still_s=17.0, io_bytes=int(12.3 * 2**30))
    assert judge(ranks) is None  # a large save at 0.73 GiB/s, such as the last, for which the run waits
    ranks[1] = replace(ranks[1], io_bytes=30 << 20)
    verdict = judge(ranks)
    assert verdict is not None
    assert "slow, 1.76 MiB/s, 17.0 s by now" in verdict.what


def test_a_rank_that_waits_for_the_storage_of_its_records_is_named_so() -> None:
    """A file server that is away for some minutes: a restart needs it too."""
    verdict = on(**OUT, phase="record", activity=Activity.STORAGE, state="D", threads=WRITING)
    assert (verdict.kind, verdict.ranks) == ("storage", (2,))
    where = "step 7, at home/me/mine.py:12 forward"
    assert verdict.what == f"rank 2 (n1) waits for the storage of its records, 0 B/s, 3.0 s by now: {where}"
    assert verdict.hint == "check the storage of --run.dir"


def test_a_save_does_not_hide_a_rank_that_holds_pythons_lock() -> None:
    """Its own save stands still because of that: the thread that writes needs the lock."""
    verdict = on(**OUT, answered=False, save_activity=Activity.STORAGE)
    assert (verdict.kind, verdict.ranks) == ("lock", (2,))


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
    verdict = judge(world(**shared), endless_s=3.0)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("loop", (2,))


def test_all_ranks_stopped_is_a_suspended_job() -> None:
    assert judge([replace(one, state="T") for one in world()]) is None
    assert judge(world(**OUT, state="t")[2:3]) is None


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
    words = {"kind": "exception", "ranks": [], "secondary": False, "ours": False, "hint": "", "trace": ""}
    return {**words, "time": time, "message": message, **more}


def test_the_first_own_failure_counts_and_consequences_do_not() -> None:
    ranks = world(failure=said(5.0, "a"))
    ranks[0] = replace(ranks[0], failure=said(4.0, "Connection closed by peer", secondary=True))
    ranks[1] = replace(ranks[1], failure=said(6.0, "b"))
    verdict = judge(ranks)
    assert verdict is not None
    assert (verdict.ranks, verdict.what) == ((2,), "rank 2 (n1) failed: a")
    assert verdict.others == "ranks 0, 1 ended after it"


def test_an_error_of_all_ranks_is_about_the_ranks_that_it_names() -> None:
    ranks = [
        replace(one, failure=said(1.0, "step 3: not finite", kind="nan", ranks=[3], ours=True))
        for one in world()
    ]
    verdict = judge(ranks)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.others) == ("nan", (3,), "")


def test_an_abort_of_gloo_is_the_fault_of_the_rank_with_another_shape() -> None:
    """gloo ends whoever receives too much, which is a neighbour."""
    ranks = world(numel=99)
    ranks[0] = replace(ranks[0], alive=False, fatal="Fatal Python error: Aborted")
    verdict = judge(ranks)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("shapes", (2,))


def test_an_abort_of_gloo_after_the_rank_with_another_shape_has_failed() -> None:
    echo = said(1.0, "Connection closed by peer", secondary=True)
    ranks = [replace(one, ended=50, failure=echo) for one in world(numel=99)]
    ranks[0] = replace(ranks[0], ended=49, failure=None, alive=False, fatal="Fatal Python error: Aborted")
    verdict = judge(ranks)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("shapes", (2,))


def test_shapes_are_compared_if_all_ranks_have_failed() -> None:
    echo = said(1.0, "op.preamble.length <= op.nbytes", secondary=True)
    verdict = judge([replace(one, ended=50, failure=echo) for one in world(numel=99)])
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("shapes", (2,))


def test_different_sizes_of_a_reduction_are_named_by_the_parameters_that_a_rank_leaves_out() -> None:
    ranks = [replace(one, op="reduce_scatter_single", phase="backward") for one in world(numel=99)]
    ranks[2] = replace(ranks[2], left_out="extra.weight (and 1 more parameter)")
    ranks[0] = replace(ranks[0], alive=False, fatal="Fatal Python error: Aborted")
    verdict = judge(ranks)
    assert verdict is not None
    assert verdict.kind == "shapes"
    assert verdict.what == (
        "rank 2 (n1) came to reduce_scatter_single with 99 numbers, the others with 64: step 7, backward; "
        "rank 2 (n1) has no gradient of extra.weight (and 1 more parameter)"
    )
    assert verdict.hint.startswith("draw what is left out from a generator with the same seed")
    unused = judge([replace(one, left_out="never_used") for one in ranks])
    assert unused is not None
    assert "never_used" not in unused.what


def test_of_two_ranks_the_one_further_on_has_left_a_collective_out() -> None:
    verdict = judge([WAITING, replace(WAITING, rank=1, step=8, op="all_reduce")])
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("skipped", (1,))


def test_no_verdict_depends_on_the_path_of_a_source_file() -> None:
    """The files of this project can be moved without a verdict changing."""
    for name in ("node_ranks", "observation", "observe", "monitor", "hang_verdict", "responder"):
        tree = ast.parse((WATCH / f"{name}.py").read_text(encoding="utf-8"))
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        constants = [
            node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs
        ]
        paths = [node.value for node in constants if re.search(r"fsdp/|\.py\b", str(node.value))]
        assert not paths, f"{name}: {paths}"


def test_an_observation_survives_encoding() -> None:
    one = replace(WAITING, stack=MINE, threads=WRITING, failure=said(1.0), save_activity=Activity.STORAGE)
    assert decode(one.encoded()) == one


def test_a_line_of_the_run_is_preferred_to_one_of_torch() -> None:
    assert own_line(tuple(reversed(MINE))) == "home/me/mine.py:12 forward"
    wrapped = (("/v/lib/python3.11/site-packages/typing_extensions.py", 3140, "wrapper"), *MINE)
    assert own_line(wrapped) == "home/me/mine.py:12 forward"


def test_stacks_of_faulthandler_are_read() -> None:
    text = (
        'Thread 0x00007f (most recent call first):\n  File "/a.py", line 1 in x\n\n'
        "Current thread 0x00008f (most recent call first):\n"
        '  File "/b.py", line 2 in y\n  File "/c.py", line 3 in z\n'
    )
    first = (("/a.py", 1, "x"),)
    assert parse_stacks(text) == [(("/b.py", 2, "y"), ("/c.py", 3, "z")), first]
    assert parse_stacks(text.partition("Current")[0]) == [first]


def test_a_stack_that_is_still_being_written_is_read_as_far_as_it_is_there() -> None:
    text = "Current thread 0x01 (most recent call first):\n"
    text += '  File "/b.py", line ??? in y\n  File "/c.py", line 13 in z\n'
    for end in range(len(text) + 1):
        (found,) = parse_stacks(text[:end])
        assert found in ((), (("/b.py", 0, "y"),), (("/b.py", 0, "y"), ("/c.py", 13, "z")))
    assert len(found) == 2


def test_of_several_deaths_the_first_is_at_fault() -> None:
    ranks = [replace(one, alive=False, state="X", dead_s=0.1) for one in world()]
    ranks[3] = replace(ranks[3], dead_s=0.7)
    verdict = judge(ranks)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.others) == ("died", (3,), "ranks 0, 1, 2 ended after it")


def test_an_abort_after_a_death_is_a_consequence() -> None:
    ranks = world(alive=False, state="X", dead_s=0.6)
    ranks[0] = replace(ranks[0], alive=False, state="X", dead_s=0.2, fatal="Fatal Python error: Aborted")
    verdict = judge(ranks)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("died", (2,))


def test_an_instruction_without_a_line_is_in_a_stack() -> None:
    """CPython: `f_lineno` is None between the lines of a function."""
    code = SimpleNamespace(co_filename="a.py", co_name="f")
    frame: Any = SimpleNamespace(f_code=code, f_lineno=None, f_back=None)
    assert _stack(frame) == [["a.py", 0, "f"]]
