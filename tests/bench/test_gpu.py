"""The battery for one GPU: its rows and files, and its parts on a CPU."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bench import gpu, plan_cuda
from bench.gpu_parts import Part, fake_ranks
from bench.gpu_runs import Bench, Failed, Ran

ROOT = Path(gpu.__file__).parents[1]


def test_an_unknown_part_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--only", "saves,speed"])
    assert ended.value.code == 2
    assert "--only speed: no such part. HINT: --only options" in capsys.readouterr().err


def test_without_a_gpu_it_names_the_form_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "no CUDA device is here. HINT: python -m bench.gpu --run.device cpu" in capsys.readouterr().err


def battery(tmp_path: Path, only: str = "") -> dict[str, tuple[str, str]]:
    words = ["-m", "bench.gpu", "--run.device", "cpu", "--results", str(tmp_path), "--only", only]
    call = [sys.executable, *words]
    ran = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    (kept,) = tmp_path.glob("gpu-*.json")
    rows = {row["part"]: (row["result"], row["about"]) for row in json.loads(kept.read_text())["rows"]}
    failed = {name: row for name, row in rows.items() if row[0] not in ("passed", "not possible here")}
    assert not failed, failed
    assert ran.returncode == 0, ran.stderr
    return rows


def test_a_part_that_does_not_end_is_ended_and_named(tmp_path: Path) -> None:
    part = dataclasses.replace(gpu.PARTS[0], limit_s=0.5)
    row = gpu.run_part(part, "cpu", tmp_path, tmp_path)
    assert row.result == gpu.FAILED
    assert row.about == "ended after 0 s, its limit; its log is empty"


def test_parts_that_share_the_device_run_beside_each_other_and_then_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, ran = threading.Barrier(2), list[str]()

    def run_part(part: Part, *_: object) -> gpu.Row:
        if not part.alone:
            together.wait(30)
        ran.append(part.name)
        return gpu.Row(part.name, part.claim, gpu.PASSED, "", 0.0)

    monkeypatch.setattr(gpu, "run_part", run_part)
    parts = [next(part for part in gpu.PARTS if part.name == name) for name in ("states", "saves", "syncs")]
    assert len(gpu.run_all(parts, "cuda", tmp_path, at_once=2)) == 3
    assert ran[2] == "states"


@pytest.mark.parametrize("waits", [0, 1])
def test_a_rank_of_a_fake_group_has_a_row_of_each_model_and_never_waits(
    waits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = [("8b", 8), ("8b", 64), ("8b", 512), ("70b", 64)]
    planned, seen = plan_cuda.Peaks(1 << 30, 2 << 30), plan_cuda.Peaks(1 << 30, 1 << 30)
    rows = [plan_cuda.Row(plan_cuda.recipe(*world), planned, seen, 0.5, waits) for world in worlds]
    text = "\n".join(plan_cuda.table(rows, "here"))
    assert "+1024 MiB, +100.00%" in text
    monkeypatch.setattr(Bench, "tool", lambda *_, **__: Ran(0, text, tmp_path, 1.0))
    bench = Bench("cuda", tmp_path, tmp_path)
    if waits:
        with pytest.raises(Failed, match=r"the host waits in a step.*70b, 64 ranks"):
            fake_ranks(bench)
    else:
        assert [name.partition(" ranks")[0] for name in fake_ranks(bench)] == [
            f"{preset}, {ranks}" for preset, ranks in worlds
        ]


@pytest.mark.slow
@pytest.mark.long
def test_two_parts_on_a_cpu(tmp_path: Path) -> None:
    rows = battery(tmp_path, "ranks,nonfinite")
    assert "not finite" in (tmp_path / "logs" / "cpu-nonfinite.log").read_text()
    assert rows["ranks"][0] == "not possible here"
    assert rows["nonfinite"] == ("passed", "exit code 5; skipped 1")
