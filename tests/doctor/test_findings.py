"""Findings for every fault: the right node is named, with a HINT, and no other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from fsdp.distributed.process_group import RankFacts
from fsdp.doctor.checks import NodeReports, can_form_group, judge, slower_attention, text

HOSTS = ("n0", "n1", "n2", "n3")
LINK, SLOW_LINK = 38.0, 3.0


Changes = dict[int, dict[str, Any]]


def facts(rank: int, **changes: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "rank": rank, "node": rank // 2, "host": HOSTS[rank // 2], "python": "3.11.7", "torch": "2.13.0",
        "cuda": "13.0", "nccl": "2.28", "driver": "580.1", "device": "NVIDIA H100",
    }  # fmt: skip
    return RankFacts(**(known | changes)).as_json()


def report(rank: int) -> dict[str, Any]:
    node = rank // 2
    values: dict[str, Any] = {
        "facts": facts(rank), "done": True, "tflops": 700.0, "product": 80.5, "in_use": "",
        "within_gb_s": 38.0, "all_gb_s": 38.0,
    }  # fmt: skip
    if rank % 2 == 0:
        values["between"] = {str(n): LINK for n in ((node - 1) % 4, (node + 1) % 4)}
        values |= {"unnamed": "", "unreachable": {}, "write_mb_s": 500.0}
    return values


def reports(
    changes: dict[int, dict[str, Any]] | None = None,
    missing: int | None = None,
    stages: dict[int, str] | None = None,
) -> NodeReports:
    """Of four sound nodes of two ranks; `changes`: rank → its other values."""
    by_rank = {rank: report(rank) | (changes or {}).get(rank, {}) for rank in range(8) if rank != missing}
    return NodeReports(by_rank, [[0, 1], [2, 3], [4, 5], [6, 7]], HOSTS, stages or {})


def alike(ranks: Iterable[int], **values: Any) -> Changes:
    return {rank: dict(values) for rank in ranks}


def test_sound_nodes_are_fit() -> None:
    verdict = judge(reports())
    assert verdict.fit
    assert not verdict.findings
    assert verdict.verdict.startswith("fit to train")


UNSEEN = "does not see what the first node wrote into /shared"


@pytest.mark.parametrize(
    ("rank", "values", "excluded", "says"),
    [
        (5, {"facts": facts(5, torch="2.12.1")}, "n2", "torch 2.12.1, where most have 2.13.0"),
        (5, {"facts": facts(5, nccl="2.27")}, "n2", "nccl 2.27"),
        (3, {"tflops": 300.0}, "n1", "43% of the median"),
        (3, {"product": 81.7}, "n1", "computes wrong"),
        (3, {"product": float("nan")}, "n1", "computes wrong"),
        (3, {"in_use": "60% of its device's memory is in use"}, "n1", "is in use"),
        (4, {"within_gb_s": 3.0}, "n2", "3 GB/s within the node"),
        (4, {"unseen": UNSEEN}, "n2", UNSEEN),
        (4, {"storage_error": "/shared cannot be written"}, "n2", "/shared cannot be written"),
        (4, {"unnamed": "its own name n2 does not resolve"}, "n2", "does not resolve"),
        (2, {"unreachable": {"2": "timed out"}}, "n2", "no connection between it and n1 (timed out)"),
        (4, {"between": {"1": SLOW_LINK, "3": SLOW_LINK}}, "n2", "to both its neighbours"),
    ],
)  # fmt: skip
def test_only_the_node_with_the_fault_is_excluded(
    rank: int, values: dict[str, Any], excluded: str, says: str
) -> None:
    verdict = judge(reports({rank: values}))
    assert not verdict.fit
    assert verdict.exclude == (excluded,)
    assert says in "\n".join(map(str, verdict.findings))
    assert all("HINT:" in str(finding) for finding in verdict.findings)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({5: {"facts": facts(5, driver="570.2")}}, "driver 570.2"),
        ({6: {"write_mb_s": 30.0}}, "writes 30 MB/s, 6% of the median"),
        ({3: {"cudnn": slower_attention((9, 0), 91002)}}, "cuDNN 91002 is below 91501"),
        ({2: {"between": {"0": LINK, "2": SLOW_LINK}}}, "3 GB/s to n2, where 38 is usual"),
    ],
)  # fmt: skip
def test_a_minor_finding_is_reported_and_excludes_no_node(changes: Changes, says: str) -> None:
    verdict = judge(reports(changes))
    assert verdict.fit
    assert not verdict.exclude
    assert says in "\n".join(map(str, verdict.findings))


def test_a_cudnn_that_torch_prefers_or_never_would_is_no_finding() -> None:
    for capability, cudnn in (((9, 0), 91501), ((10, 0), 91900), ((8, 0), 91002), ((9, 0), None), ((), 0)):
        assert not slower_attention(capability, cudnn)


def test_a_node_that_no_other_reaches_is_excluded_and_not_those_that_tried() -> None:
    assert judge(reports(alike((0, 2, 4), unreachable={"3": "timed out"}))).exclude == ("n3",)


def test_when_most_nodes_are_unfit_none_is_excluded() -> None:
    verdict = judge(reports(alike((0, 2, 4, 6), storage_error="/shared cannot be written")))
    assert not verdict.fit
    assert not verdict.exclude
    assert "no single node is at fault" in verdict.verdict


def test_a_rank_in_a_stage_of_its_own_is_at_fault() -> None:
    stages = dict.fromkeys(range(7), "waiting for the others after a product") | {7: "a matrix product"}
    verdict = judge(reports(stages=stages))
    assert verdict.exclude == ("n3",)
    assert "still in: a matrix product" in str(next(finding for finding in verdict.findings if finding.out))


def test_a_group_is_formed_only_if_every_connection_is_possible() -> None:
    assert can_form_group(reports().by_rank)
    assert not can_form_group(reports({2: {"unreachable": {"2": "refused"}}}).by_rank)
    assert not can_form_group(reports({5: {"facts": facts(5, torch="2.12.1")}}).by_rank)


# ---------------------------------------------------------------- output


def test_the_table_has_a_row_a_rank_and_the_verdict_last() -> None:
    slow = reports({3: {"tflops": 300.0}})
    lines = text(slow, judge(slow, "srun"), 12.3).splitlines()
    table = [line for line in lines if line.startswith(HOSTS)]
    assert [line.split()[1] for line in table] == [str(rank) for rank in range(8)]
    assert lines[1] == "rank 0 has NVIDIA H100, torch 2.13.0, Python 3.11.7, NCCL 2.28, driver 580.1"
    assert lines[-1] == "verdict: 1 node not fit, n1: srun --exclude=n1"
    nth = next(n for n, line in enumerate(lines) if line.startswith("OUT  n1 (rank 3): matrix product"))
    assert lines[nth + 1].startswith("     HINT: ")
