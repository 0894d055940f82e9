"""The outputs of a run's numbers: files, sinks, the MFU of devices with a known peak, the times of saves."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from fsdp.record.recorder import Console, Pending, Recorder, Reporter
from fsdp.rundir.history import RunDir
from tests.support.env import env_of


class Hears:
    def __init__(self) -> None:
        self.heard: list[tuple[int, Mapping[str, float]]] = []
        self.closed = False

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.heard.append((step, values))

    def close(self) -> None:
        self.closed = True


def recorder(folder: Path, out: io.StringIO, hears: Hears, mfu_of: float = 0.0, rank: int = 0) -> Recorder:
    env = env_of(rank, 2)
    console = Console(total_steps=9, every=1, unit="img", stream=out)
    recorder = Recorder(RunDir(folder), env, Reporter(), console, from_step=0, mfu_of=mfu_of)
    recorder.add(hears)
    return recorder


def one_step(step: int = 1, tokens: int = 0) -> Pending:
    one = torch.tensor(1.5)
    record = {"step": step, "lr": 0.1, "samples": 8, "tokens": tokens, "step_time_s": 0.5, "data_wait_s": 0.0}
    return Pending(record, one, one)


def test_each_number_goes_to_the_file_and_to_everyone_who_asked(tmp_path: Path) -> None:
    hears, out = Hears(), io.StringIO()
    told = recorder(tmp_path, out, hears)
    told.step(one_step())
    told.values("eval", 1, {"eval_loss": 2.0})
    told.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 1]
    assert "mfu" not in lines[0]
    assert hears.heard[0][1]["train/loss"] == 1.5
    assert hears.heard[1] == (1, {"eval/eval_loss": 2.0})
    assert hears.closed
    assert list((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize(("tokens", "rate"), [(4096, 8192.0), (0, 16.0)])
def test_mfu_is_of_samples_and_the_rate_of_tokens_where_there_are_any(
    tokens: int, rate: float, tmp_path: Path
) -> None:
    out = io.StringIO()
    told = recorder(tmp_path, out, Hears(), mfu_of=0.025)
    told.step(one_step(tokens=tokens))
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (record["mfu"], record["per_s"]) == (8 / 0.5 * 0.025, rate)
    assert "40% MFU" in out.getvalue()
    assert f"{rate:.0f} img/s" in out.getvalue()


def test_texts_go_to_the_sinks_that_take_them_and_to_tensorboard(tmp_path: Path) -> None:
    class Texts(Hears):
        def texts(self, step: int, values: Mapping[str, object]) -> None:
            self.took = step, values

    hears, out, rows = Texts(), io.StringIO(), [{"question": "a|b?", "answer": "<c>\nd"}]
    told = recorder(tmp_path, out, hears)
    told.texts("eval/answers", 3, rows, "  answer  d")
    told.close()
    assert hears.took == (3, {"eval/answers": rows})
    assert out.getvalue() == "  answer  d\n"
    (events,) = (tmp_path / "tensorboard").iterdir()
    table = rb"| question | answer |\n| --- | --- |\n| a\\|b? | &lt;c&gt;<br>d |"
    assert table.decode("unicode_escape").encode() in events.read_bytes()


def test_the_rate_of_masked_data_is_that_of_trained_tokens_and_of_all(tmp_path: Path) -> None:
    console = Console(total_steps=9, every=1, unit="tok", stream=(out := io.StringIO()))
    told = Recorder(RunDir(tmp_path), env_of(0, 2), Reporter(), console, from_step=0, positions=1024)
    told.step(one_step(tokens=512))
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["positions_per_s"] == 8 * 1024 / 0.5
    assert "1024/16.4k tok/s" in out.getvalue()
