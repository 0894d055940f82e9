"""The history of a run directory, as the next start and the report read it."""

from __future__ import annotations

import json
from pathlib import Path

from fsdp.rundir import history
from tests.support.runs import flags, on_a_rank
from tests.support.world import run_world


def start(folder: Path, *more: str) -> dict[str, object]:
    said = run_world(1, on_a_rank, ["--run.dir", str(folder), *flags(*more)])
    assert said == [None], said
    events = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    found: dict[str, object] = [event for event in events if event["event"] == "start"][-1]
    return found


def test_a_start_on_other_data_records_the_change(tmp_path: Path) -> None:
    data = ["--model.name", "mlp", "--data.name", "synthetic", "--train.steps", "4"]
    first = start(tmp_path / "run", *data, "--data.args.samples", "64", "--train.stop_after", "2")
    second = start(tmp_path / "run", *data, "--data.args.samples", "96")
    recorded = first["data"]
    assert isinstance(recorded, dict)
    assert recorded.keys() == {"samples", history.CLASSES}
    changed = second["changed"]
    assert isinstance(changed, list)
    assert "the data: samples 64 → samples 96; the samples of each step differ" in changed
