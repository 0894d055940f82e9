"""Findings for every fault: the right node is named, with a HINT, and no other."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

from fsdp.dist.preflight import RankFacts
from fsdp.doctor.findings import NodeReports, can_form_group, judge
from fsdp.doctor.measure import complaints
from fsdp.doctor.table import text

HOSTS = ("n0", "n1", "n2", "n3")
LINK = {"gather_gb_s": 40.0, "scatter_gb_s": 38.0, "latency_us": 20.0}


def facts(rank: int, **changes: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "rank": rank, "node": rank // 2, "host": HOSTS[rank // 2], "python": "3.11.7", "torch": "2.13.0",
        "cuda": "13.0", "nccl": "2.28", "driver": "580.1", "device": "NVIDIA H100 80GB HBM3",
        "packages": {"numpy": "2.1"},
    }  # fmt: skip
    return RankFacts(**(known | changes)).as_json()


def report(rank: int) -> dict[str, Any]:
    node = rank // 2
    seen: dict[str, Any] = {
        "facts": facts(rank),
        "device": {
            "tflops": 700.0, "product": 80.5, "peak_tflops": 989.4,
            "memory_free": 79 << 30, "memory_total": 80 << 30, "health": [],
        },
        "links": {"clock_s": 0.001, "within": dict(LINK), "all": dict(LINK)},
        "done": True,
    }  # fmt: skip
    if rank % 2 == 0:
        seen["links"]["between"] = {str(n): dict(LINK) for n in ((node - 1) % 4, (node + 1) % 4)}
        seen["network"] = {
            "host": HOSTS[node],
            "host_resolves": "10.0.0.1",
            "address": "10.0.0.1",
            "interface": False,
        }
        seen["ports"] = {str(n): "" for n in range(4) if n != node}
        seen["storage"] = {
            "folder": "/shared",
            "write_mb_s": 500.0,
            "read_mb_s": 900.0,
            "unseen": [],
            "free": 1 << 40,
        }
    return seen


def reports(
    change: Callable[[dict[int, dict[str, Any]]], None] = lambda _: None, stages: dict[int, str] | None = None
) -> NodeReports:
    by_rank = {rank: copy.deepcopy(report(rank)) for rank in range(8)}
    change(by_rank)
    return NodeReports(by_rank, [[0, 1], [2, 3], [4, 5], [6, 7]], HOSTS, stages or {})


def put(rank: int, *path: str, value: Any) -> Callable[[dict[int, dict[str, Any]]], None]:
    def change(by_rank: dict[int, dict[str, Any]]) -> None:
        place = by_rank[rank]
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value

    return change


def both(
    *changes: Callable[[dict[int, dict[str, Any]]], None],
) -> Callable[[dict[int, dict[str, Any]]], None]:
    def change(by_rank: dict[int, dict[str, Any]]) -> None:
        for one in changes:
            one(by_rank)

    return change


SLOW_LINK = {**LINK, "gather_gb_s": 3.0}


def test_sound_nodes_are_fit() -> None:
    verdict = judge(reports())
    assert verdict.fit
    assert not verdict.findings
    assert str(verdict) == "fit to train."


@pytest.mark.parametrize(
    ("change", "excluded", "says"),
    [
        (put(5, "facts", value=facts(5, torch="2.12.1")), "n2", "torch 2.12.1, where most have 2.13.0"),
        (put(5, "facts", value=facts(5, nccl="2.27")), "n2", "nccl 2.27"),
        (put(3, "device", "tflops", value=300.0), "n1", "43% of the median"),
        (put(3, "device", "product", value=81.7), "n1", "computes wrong"),
        (put(3, "device", "product", value=float("nan")), "n1", "computes wrong"),
        (put(3, "device", "memory_free", value=20 << 30), "n1", "60.0 of 80 GiB of its device are in use"),
        (
            put(3, "device", "health", value=["uncorrected memory errors: 2"]),
            "n1",
            "uncorrected memory errors",
        ),
        (put(4, "links", "within", value=SLOW_LINK), "n2", "3 GB/s within the node"),
        (put(4, "storage", "unseen", value=[0]), "n2", "does not see what n0 wrote into /shared"),
        (
            put(4, "storage", "error", value="cannot be written (Read-only file system)"),
            "n2",
            "Read-only file system",
        ),
        (put(4, "network", "host_resolves", value=""), "n2", "does not resolve"),
        (
            put(2, "ports", "2", value="Connection timed out"),
            "n2",
            "no connection between it and n1 (Connection timed out)",
        ),
        (lambda by_rank: by_rank.pop(7), "n3", "rank 7 did not start"),
    ],
)
def test_only_the_node_with_the_fault_is_excluded(change: Any, excluded: str, says: str) -> None:
    verdict = judge(reports(change))
    assert not verdict.fit
    assert verdict.exclude == (excluded,)
    assert says in "\n".join(map(str, verdict.findings))
    assert all("HINT:" in str(finding) for finding in verdict.findings)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put(5, "facts", value=facts(5, packages={"numpy": "1.9"})), "numpy 1.9"),
        (put(5, "facts", value=facts(5, driver="570.2")), "driver 570.2"),
        (put(6, "links", "clock_s", value=-7.5), "its clock is 7.5 s behind the first node's"),
        (put(6, "storage", "write_mb_s", value=30.0), "writes 30 MB/s, where 500 is usual"),
        (put(2, "links", "between", "2", value=SLOW_LINK), "3 GB/s to n2, where 38 is usual"),
        (
            both(*(put(rank, "device", "tflops", value=400.0) for rank in range(8))),
            "400 of the 989 TFLOP/s that the manufacturer specifies",
        ),
    ],
)
def test_a_minor_finding_is_reported_and_excludes_no_node(change: Any, says: str) -> None:
    verdict = judge(reports(change))
    assert verdict.fit
    assert not verdict.exclude
    assert says in "\n".join(map(str, verdict.findings))


def test_a_node_whose_links_are_all_slow_is_at_fault() -> None:
    change = both(*(put(4, "links", "between", n, value=SLOW_LINK) for n in ("1", "3")))
    verdict = judge(reports(change))
    assert verdict.exclude == ("n2",)
    assert "to both its neighbours" in str(verdict.findings[0])


def test_a_node_that_no_other_reaches_is_excluded_and_not_those_that_tried() -> None:
    change = both(*(put(rank, "ports", "3", value="timed out") for rank in (0, 2, 4)))
    assert judge(reports(change)).exclude == ("n3",)


def test_when_most_nodes_are_unfit_none_is_excluded() -> None:
    change = both(
        *(
            put(rank, "storage", "error", value="cannot be written (Permission denied)")
            for rank in (0, 2, 4, 6)
        )
    )
    verdict = judge(reports(change))
    assert not verdict.fit
    assert not verdict.exclude
    assert "no single node is at fault" in str(verdict)


def test_a_rank_in_a_stage_of_its_own_is_at_fault() -> None:
    stages = dict.fromkeys(range(7), "waiting for the others after a product") | {7: "a matrix product"}
    verdict = judge(reports(stages=stages))
    assert verdict.exclude == ("n3",)
    assert "still in: a matrix product" in str(next(finding for finding in verdict.findings if finding.out))


def test_a_group_is_formed_only_if_every_connection_is_possible() -> None:
    by_rank = dict(reports().by_rank)
    assert can_form_group(by_rank)
    assert not can_form_group(reports(put(2, "ports", "2", value="refused")).by_rank)
    assert not can_form_group(reports(put(5, "facts", value=facts(5, torch="2.12.1"))).by_rank)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("0, No, Not Active", []),
        ("[N/A], [N/A], Not Active", []),
        ("3, No, Active", ["uncorrected memory errors: 3", "slowed by its hardware (heat, power): Active"]),
    ],
)
def test_errors_that_the_driver_counts(line: str, found: list[str]) -> None:
    assert complaints(line + "\n") == found


# ---------------------------------------------------------------- output


def test_the_table_has_a_row_a_rank_and_the_verdict_last() -> None:
    seen = reports(put(3, "device", "tflops", value=300.0))
    lines = text(seen, judge(seen, "srun"), 12.3).splitlines()
    table = [line for line in lines if line.startswith(HOSTS) and " – " not in line]
    assert [line.split()[1] for line in table] == [str(rank) for rank in range(8)]
    assert "H100" in lines[0]
    assert lines[-1] == "verdict: 1 node is not fit: srun --exclude=n1"
    at = next(at for at, line in enumerate(lines) if line.startswith("OUT  n1 (rank 3): matrix product"))
    assert lines[at + 1].startswith("     HINT: ")
    assert any("n0 – n1" in line for line in lines)


DEAD = {"failure": "CUDA error: unknown error"}
"""Of a rank whose GPU does not answer: it has failed before its first measurement."""
FIRST = "the first calls of its device"


@pytest.mark.parametrize(
    ("change", "stages", "row"),
    [
        (lambda by_rank: by_rank.pop(2), {}, "n1 3"),
        (lambda by_rank: by_rank.update({2: DEAD}), {2: FIRST}, "n1 2"),
        (lambda by_rank: by_rank.update({0: DEAD}), {0: FIRST}, "n0 0"),
    ],
    ids=["a node's first rank did not start", "its GPU fails", "that of rank 0"],
)
def test_a_rank_that_measured_nothing_is_in_the_table(
    change: Callable[[dict[int, dict[str, Any]]], None], stages: dict[int, str], row: str
) -> None:
    """Before, such a rank ended the doctor without a table."""
    seen = reports(change, stages)
    verdict = judge(seen)
    assert not verdict.fit
    shown = text(seen, verdict, 1.0)
    assert re.search(rf"^{row.replace(' ', ' +')}\b", shown, re.MULTILINE), shown
    assert "has torch 2.13.0" in shown
    if stages:
        assert f"failed in: {FIRST} (CUDA error: unknown error)" in shown


def test_many_ranks_have_a_row_a_node() -> None:
    by_rank = {rank: report(0) for rank in range(64)}
    many = NodeReports(
        by_rank, [list(range(n * 8, n * 8 + 8)) for n in range(8)], [f"m{n}" for n in range(8)], {}
    )
    shown = text(many, judge(many), 1.0)
    assert sum(bool(re.match(r"m\d +\d+\* ", line)) for line in shown.splitlines()) == 8
    assert "slowest rank of its node" in shown
