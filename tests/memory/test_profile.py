"""Files of --profile: an account of memory, a trace with FSDP's ranges, a table whose parts add up."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
import torch

from fsdp import config as configuration
from fsdp.base.errors import ConfigError
from fsdp.config import ProfileSection, profile_steps
from fsdp.memory import profile
from fsdp.memory.account_timeline import Mark
from fsdp.memory.profile_trace import PARTS, Tracer, intersect, length, table, union, without
from tests.support import runs
from tests.support.env import env_of


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiled")
    profile_flags = "--profile.trace true --profile.memory true --profile.steps 2:3"
    failures = runs.failures(
        2, folder, profile_flags, "--train.steps 5 --checkpoint.every_steps 3 --train.micro_batch 3"
    )
    assert failures == [None, None], failures
    return folder / "profile"


def test_the_account_has_every_kind_and_phase(profiled: Path) -> None:
    account = json.loads((profiled / "rank1_memory.json").read_text())
    kinds = {kind for peak in account["phases"].values() for kind, count in peak["kinds"].items() if count}
    assert {"parameters", "gathered", "gradients", "optimizer", "activations", "communication"} <= kinds
    assert {"forward", "backward", "reduce", "optimizer"} <= set(account["phases"])
    assert account["peak"]["bytes"] == sum(account["peak"]["kinds"].values())


def test_the_trace_has_the_chosen_steps_and_fsdp_in_them(profiled: Path) -> None:
    for rank in range(2):
        with gzip.open(profiled / f"rank{rank}_trace.json.gz", "rt") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"] if "name" in event}
        assert {"shardrun::step 2", "shardrun::step 3", "shardrun::forward", "shardrun::optimizer"} <= names
        assert not {"shardrun::step 1", "shardrun::step 4"} & names
        assert any(name.startswith("FSDP::all_gather (blocks.0") for name in names)
        assert "FSDP::post_backward_reduce (blocks.2)" in names


def test_the_longest_operations_are_a_table(profiled: Path) -> None:
    text = (profiled / "rank1_operators.txt").read_text()
    assert "Self CPU" in text
    assert "# of Calls" in text
    rows = [line.split()[0] for line in text.splitlines() if "%" in line and "::" in line]
    assert any(row.startswith("aten::") for row in rows)
    assert len(rows) <= 30


@pytest.mark.parametrize(("shapes", "stacks"), [(False, False), (True, False), (False, True), (True, True)])
def test_shapes_and_callers_are_columns_of_the_table(shapes: bool, stacks: bool, tmp_path: Path) -> None:
    section = ProfileSection(trace=True, shapes=shapes, stacks=stacks)
    tracer = Tracer(section, torch.device("cpu"), with_account=False)
    tracer.begin()
    tracer.phase(Mark(0.0, "forward", 3))
    for width in (256, 512):  # slow enough for the table's 30 rows, in which Python's functions stand too
        torch.ones(width, width) @ torch.ones(width, width)
    tracer.close(tmp_path / "trace.json.gz")
    text = tracer.operators()
    assert ("[[512, 512], [512, 512]]" in text) is shapes
    assert ("test_profile.py" in text) is stacks


def test_memory_is_marked_at_four_points_of_the_start(profiled: Path) -> None:
    marks = json.loads((profiled / "rank1_startup.json").read_text())["marks"]
    assert [mark["at"] for mark in marks] == [
        "before the model",
        "after the model",
        "after sharding",
        "after the optimizer",
    ]
    assert all(mark["process"]["rss_anon"] > 0 for mark in marks)


def test_the_parts_add_up_to_the_step(profiled: Path) -> None:
    for rank in range(2):
        steps = json.loads((profiled / f"rank{rank}_steps.json").read_text())["steps"]
        assert [step["step"] for step in steps] == [2, 3]
        for step in steps:
            seconds = step["seconds"]
            assert sum(seconds[part] for part in PARTS) == pytest.approx(seconds["step"], rel=1e-9)
            assert all(seconds[part] >= 0 for part in PARTS)
            assert seconds["compute"] > 0
            assert seconds["communication"] > 0
            assert sum(step["phases"].values()) <= seconds["step"] * 1.001
            assert {"data", "forward", "backward", "reduce", "optimizer"} <= step["phases"].keys()


def test_rank_0_keeps_every_rank_s_peak(profiled: Path) -> None:
    summary = json.loads((profiled / "summary.json").read_text())
    assert [one["rank"] for one in summary] == [0, 1]
    accounts = [json.loads((profiled / f"rank{rank}_memory.json").read_text()) for rank in range(2)]
    assert [one["peak"] for one in summary] == [account["peak"] for account in accounts]
    lines = profile.summary_lines(summary)
    assert re.match(r"rank 0 peak .* in \w+ of step [23]: .*(activations|parameters|optimizer) ", lines[0])
    assert re.match(r"rank 1 step .* ms: compute \d+%, communication \d+%, data \d+%, host \d+%", lines[3])


def test_kernels_and_nccl_of_a_device() -> None:
    """compute 10–60 without 40–50, nccl 30–80: 20 ms of it exposed; the batch is waited for from 0 to 5. What
    the host calls is no communication, and its forward ends long before that of the device.
    """
    rows = [
        ("user_annotation", "shardrun::step 4", 0, 100, 1), ("user_annotation", "shardrun::data", 0, 5, 1),
        ("user_annotation", "shardrun::forward", 5, 20, 1), ("cpu_op", "aten::mm", 5, 3, 1),
        ("cpu_op", "c10d::_allgather_base_", 80, 9, 1), ("user_annotation", "gloo:all_reduce", 90, 9, 1),
        ("user_annotation", "nccl:_all_gather_base", 89, 1, 1),
        ("gpu_user_annotation", "shardrun::step 4", 10, 70, 7),
        ("gpu_user_annotation", "shardrun::forward", 10, 50, 7),
        ("gpu_user_annotation", "shardrun::forward", 30, 50, 20),
        ("kernel", "ampere_gemm", 10, 30, 7), ("kernel", "ampere_gemm", 50, 10, 7),
        ("kernel", "ncclDevKernel_AllGather_RING_LL", 30, 50, 20),
    ]  # fmt: skip
    events = [
        {"ph": "X", "cat": c, "name": n, "ts": t * 1e3, "dur": d * 1e3, "tid": tid}
        for c, n, t, d, tid in rows
    ]
    (step,) = table(events)["steps"]
    seconds = {part: round(step["seconds"][part] * 1e3, 6) for part in PARTS}
    assert seconds == {"compute": 40, "communication": 30, "data": 5, "host": 25}
    assert round(step["hidden"] * 1e3, 6) == 20
    assert {name: round(one * 1e3, 6) for name, one in step["phases"].items()} == {"data": 5, "forward": 70}


def test_set_operations_on_time_spans() -> None:
    a, b = union([(5, 7), (0, 2), (1, 3)]), union([(2, 6)])
    assert a == [(0, 3), (5, 7)]
    assert intersect(a, b) == [(2, 3), (5, 6)]
    assert without(a, b) == [(0, 2), (6, 7)]
    assert without([(0, 10)], [(1, 2), (3, 4), (9, 12)]) == [(0, 1), (2, 3), (4, 9)]
    assert without([(0, 1), (1.5, 4)], [(0.5, 2)]) == [(0, 0.5), (2, 4)]
    assert length(a) == 5


@pytest.mark.parametrize("text", ["0:3", "5:3", "a", "3:", "-1", ":4"])
def test_wrong_profile_steps(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--profile.steps .* is not first:last.*HINT: --profile.steps 3:5"):
        profile_steps(text)


def test_profile_flags_without_effect() -> None:
    with pytest.raises(ConfigError, match=r"--profile.steps 4:5 has no effect alone"):
        configuration.load(["--profile.steps", "4:5"])
    with pytest.raises(ConfigError, match=r"--profile.steps 30 starts after the last step, 10"):
        configuration.load(["--profile.steps", "30", "--profile.memory", "--train.steps", "10"])
    for name in ("shapes", "stacks"):
        with pytest.raises(
            ConfigError, match=rf"--profile.{name} true has no effect alone.*HINT: --profile.trace"
        ):
            configuration.load([f"--profile.{name}", "true"])
    assert profile_steps("4") == (4, 4)


def test_steps_before_the_start_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(profile.log, "warning", lambda text, *args: warnings.append(text % args))
    alone = env_of()
    model = torch.nn.Linear(2, 2)
    late = profile.Profile(
        ProfileSection(memory=True, steps="2:3"),
        tmp_path,
        alone,
        model,
        torch.optim.AdamW(model.parameters()),
    )
    for phase in ("data", "forward", "data", "end"):
        late.on_phase(phase, 7)
    late.close()
    assert warnings == [
        "--profile.steps 2:3 is before step 7, at which this start resumes. HINT: --profile.steps 9:11"
    ]
    assert not list(tmp_path.iterdir())
