"""Heat maps: what is marked is what the findings name, at any number of ranks."""

from __future__ import annotations

import re

import pytest

from fsdp.doctor.findings import judge
from fsdp.doctor.heat import drawn, heat_maps
from fsdp.doctor.table import page
from tests.support.pages import doctor


def marked(text: str) -> list[str]:
    return re.findall(r'<i class="low" title="([^"]*)"', text)


@pytest.mark.parametrize("ranks", [64, 1024])
def test_what_is_below_a_threshold_is_marked_and_found(ranks: int) -> None:
    seen = doctor(ranks)
    slow = ranks // 3
    assert marked(drawn(heat_maps(seen))) == [
        f"node-{slow // 8:03} rank {slow}: 410 TFLOP/s, 59% of the median",
        "node-002 – node-003: 12 GB/s, 32% of the median",
        "node-005: 90 MB/s, 18% of the median",
    ]
    named = [one.host for one in judge(seen).findings if "did not start" not in one.what]
    assert named == [f"node-{slow // 8:03}", "node-002", "node-005"]


def test_median_and_threshold_are_on_the_map() -> None:
    assert "median 700 TFLOP/s, threshold 595; lowest 410, highest 721; 1 without a value" in drawn(
        heat_maps(doctor(64))
    )


def test_a_thousand_ranks_are_a_cell_each_and_no_card() -> None:
    seen = doctor(1024)
    text = page(seen, judge(seen), 20.0)
    matrix = text.partition("Matrix product of each rank")[2].partition("</figure>")[0]
    assert len(re.findall(r'<i class="(?:low|h\d|none)"', matrix)) == 1024
    assert len(text) < 600_000
    assert "<tr" not in text.partition("Maps")[2].partition("<details>")[0]


def test_devices_are_compared_with_their_kind() -> None:
    seen = doctor(64)
    for rank in range(8):
        seen.by_rank[rank]["facts"]["device"] = "NVIDIA A100"  # type: ignore[index]
        seen.by_rank[rank]["device"]["tflops"] = 250.0
    assert [title for title in marked(drawn(heat_maps(seen))) if "TFLOP" in title] == [
        "node-002 rank 21: 410 TFLOP/s, 59% of the median"
    ]


def test_one_node_alone_has_no_map_of_links() -> None:
    assert [one.title for one in heat_maps(doctor(8))] == ["Matrix product of each rank"]
