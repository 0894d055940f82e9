"""docs/claims.md states whether each claim holds; the command beside it must agree."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench import claims
from fsdp.distributed.env import DistEnv
from tests.support.marks import quick_are
from tests.support.world import run_world

PAGE = (Path(__file__).parents[2] / "docs" / "claims.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (.*) \| (true|false) \| (.*) \| `python -m bench\.claims (\w+)` \|$", re.MULTILINE)
VERDICTS = {name: verdict == "true" for _, verdict, _, name in ROW.findall(PAGE)}
FIGURES = {
    name: re.findall(r"\d{1,3}(?:,\d{3}){2,}|\d+ GB|\d+\.\d%", happens)
    for _, _, happens, name in ROW.findall(PAGE)
}
LONG = {"half_activations_of_a_decoder", "reshard_frees", "unnormalised"}


def test_the_page_and_the_commands_name_the_same_claims() -> None:
    assert VERDICTS.keys() == claims.CLAIMS.keys()


def on_a_rank(env: DistEnv, name: str) -> tuple[bool, str]:
    seen = claims.CLAIMS[name].try_it()
    return seen.holds, seen.what


@pytest.mark.parametrize("name", quick_are(claims.CLAIMS.keys() - LONG, claims.CLAIMS, []))
def test_the_command_agrees_with_the_page(name: str) -> None:
    if claims.CLAIMS[name].ranks > 1:
        holds, what = run_world(claims.RANKS, on_a_rank, name)[0]
    else:
        seen = claims.check(name)
        holds, what = seen.holds, seen.what
    assert holds is VERDICTS[name], what
    assert [figure for figure in FIGURES[name] if figure not in what] == [], what


def test_the_round_numbers_are_those_of_the_results() -> None:
    """Each interval and peak on the page is in the committed results of bench.knobs."""
    page = PAGE[PAGE.index("## Round numbers") :]
    results = Path(__file__).parents[2] / "bench" / "results"
    groups = json.loads((results / "knobs.json").read_text(encoding="utf-8"))["pieces"].values()
    times = [row["time"] for group in groups for row in group["rows"] if "step_ms" in row]
    intervals = {tuple(f"{time[key]:.2f}" for key in ("value", "low", "high")) for time in times}
    table = (results / "knobs.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|") for line in table if line.startswith("| `--")]
    printed = re.findall(r"(\d\.\d\d) times \[(\d\.\d\d), (\d\.\d\d)\]", page)
    assert len(printed) == 2
    assert set(printed) <= intervals
    assert {"0.58", "0.74", "1.41"} <= {row[6].strip() for row in rows}
