"""The battery for one GPU: its rows and files, and its parts on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.gpu_parts import PARTS, Part
from bench.gpu_runs import Bench, Failed, NotPossible

ROOT = Path(gpu.__file__).parents[1]


def test_an_unknown_part_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--only", "saves,speed"])
    assert ended.value.code == 2
    assert "--only speed: no such part. HINT: --only ranks" in capsys.readouterr().err


def test_without_a_gpu_it_names_the_form_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "no CUDA device is here. HINT: python -m bench.gpu --run.device cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "result"),
    [(NotPossible("no GPU"), "not possible here"), (Failed("wrong"), "failed"), (KeyError("x"), "failed")],
)
def test_only_a_part_that_returns_has_passed(
    raised: Exception, result: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(bench: Bench) -> dict[str, float]:
        raise raised

    monkeypatch.setattr(gpu, "PARTS", (Part("one", "it holds", 5, run),))
    assert gpu.inside("one", "cpu", tmp_path)[0] == result


def test_parts_that_did_not_start_are_not_passed_and_keep_their_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = [0.0]

    left: list[float] = []

    def slow(part: Part, device: str, folder: Path, left_s: float, running: gpu.Processes) -> gpu.Row:
        now[0] += 400
        left.append(left_s)
        return gpu.Row(part.name, part.claim, gpu.PASSED, "", 400)

    monkeypatch.setattr(gpu, "run_part", slow)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    rows = gpu.run_all(PARTS, "cpu")
    assert [row.result for row in rows[:2]] == ["passed"] * 2
    assert left == [600, 200]
    assert {row.result for row in rows[2:]} == {"not run"}
    assert rows[2].about.endswith("python -m bench.gpu --only saves")
    text = gpu.write(rows, "A Device", tmp_path)
    assert f"2 passed, 0 failed, 0 not possible here, {len(PARTS) - 2} not run" in text
    gpu.write([gpu.Row("saves", "", gpu.FAILED, "wrong", 1.0), rows[3]], "A Device", tmp_path)
    kept = {
        row["part"]: row["result"] for row in json.loads((tmp_path / "gpu-a-device.json").read_text())["rows"]
    }
    assert [kept[name] for name in ("ranks", "resume", "saves", "syncs")] == [
        "passed",
        "passed",
        "failed",
        "not run",
    ]
    page = (tmp_path / "gpu-a-device.md").read_text()
    assert page.count("| passed |") == 2
    assert page.count(f"| torch {torch.__version__}") == len(PARTS)


def battery(tmp_path: Path, only: str = "") -> dict[str, tuple[str, str]]:
    words = [
        sys.executable,
        "-m",
        "bench.gpu",
        "--run.device",
        "cpu",
        "--results",
        str(tmp_path),
        "--only",
        only,
    ]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    (kept,) = tmp_path.glob("gpu-*.json")
    rows = {row["part"]: (row["result"], row["about"]) for row in json.loads(kept.read_text())["rows"]}
    failed = {name: row for name, row in rows.items() if row[0] not in ("passed", "not possible here")}
    assert not failed, failed
    assert ran.returncode == 0, ran.stderr
    return rows


@pytest.mark.slow
@pytest.mark.long
def test_two_parts_on_a_cpu(tmp_path: Path) -> None:
    rows = battery(tmp_path, "ranks,nonfinite")
    assert rows["ranks"][0] == "not possible here"
    assert rows["nonfinite"] == ("passed", "exit code 5; skipped 1")
