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


BENCH_TRAIN = """
Lightning Fabric, ModelParallel: not run, not installed here: python -m bench.peers.setup lightning

decoder, preset 1b; 1 ranks
Accelerate, FSDP2: left out, accelerate, rank 0: ended ImportError: no such name
decoder, preset 1b; 6 rounds

|  | tokens/s | step ms | processor ms a rank | ours/its throughput | ours/its processor |
|---|---|---|---|---|---|
| bare fully_shard loop | 60,000 (59,000 to 61,000), MFU 45.0% | 136.0 | 20.0 | {over} [0.9, 1.2] | |
| shardrun | 66,000 (65,000 to 67,000), MFU 50.0% | 124.0 | 20.0 |  |  |
"""


SMALL_STATES = """
fused AdamW        1.25 ms    1.00 × fused AdamW
bf16 eager        33.10 ms   26.48 × fused AdamW
bf16 compiled      1.30 ms    1.04 × fused AdamW
8bit eager        60.00 ms   48.00 × fused AdamW
8bit compiled  {took:8.2f} ms  {over:6.2f} × fused AdamW
"""


STARTS_A_SESSION = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


WITH_TORCH_ALONE = """
import sys

class Absent:
    names = "ray", "submitit", "safetensors", "PIL", "s3fs"

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Absent())
import pytest
sys.exit(pytest.main(["tests", "-m", "cuda", "--collect-only", "-q", "-p", "no:cacheprovider"]))
"""


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
