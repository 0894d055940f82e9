"""The battery for one GPU: its rows and files, and its parts on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu

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


@pytest.mark.slow
@pytest.mark.long
def test_two_parts_on_a_cpu(tmp_path: Path) -> None:
    rows = battery(tmp_path, "ranks,nonfinite")
    assert "not finite" in (tmp_path / "logs" / "cpu-nonfinite.log").read_text()
    assert rows["ranks"][0] == "not possible here"
    assert rows["nonfinite"] == ("passed", "exit code 5; skipped 1")
