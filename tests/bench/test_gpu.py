"""The battery for one GPU: its rows and files, and its parts on a CPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu
from bench.gpu_parts import PARTS, Part
from bench.gpu_runs import Bench, Failed, NotPossible, Ran, apart
from fsdp.base import proc

ROOT = Path(gpu.__file__).parents[1]


def test_help_shows_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--help"])
    assert ended.value.code == 0
    assert "python -m bench.gpu --only resume,saves" in capsys.readouterr().out


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


def test_a_part_past_its_limit_has_failed(tmp_path: Path) -> None:
    row = gpu.run_part(Part("doctor", "it ends", 0.01, PARTS[0].run), "cpu", tmp_path)
    assert (row.result, row.about) == ("failed", "ran longer than 0 s")
    row = gpu.run_part(Part("doctor", "it ends", 160, PARTS[0].run), "cpu", tmp_path, left_s=0.01)
    assert (row.result, row.about) == (
        "not run",
        "10 minutes were over while it ran: python -m bench.gpu --only doctor",
    )


def test_parts_that_did_not_start_are_not_passed_and_keep_their_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = [0.0]

    left: list[float] = []

    def slow(part: Part, device: str, folder: Path, left_s: float) -> gpu.Row:
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
    assert (tmp_path / "gpu-a-device.md").read_text().count("| passed |") == 2


def test_each_row_is_written_when_its_part_ends_and_resume_runs_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []

    def part(one: Part, device: str, folder: Path, left_s: float) -> gpu.Row:
        if one.name == "saves" and len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(one.name)
        return gpu.Row(one.name, one.claim, gpu.FAILED if one.name == "resume" else gpu.PASSED, "", 1.0)

    words = ["--run.device", "cpu", "--results", str(tmp_path / "new"), "--only", "ranks,resume,saves,syncs"]
    monkeypatch.setattr(gpu, "run_part", part)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(words)
    assert [row["part"] for row in gpu.earlier(gpu.device_name("cpu"), tmp_path / "new")] == [
        "ranks",
        "resume",
    ]
    assert gpu.main([*words, "--resume"]) == 1
    assert ran == ["ranks", "resume", "resume", "saves", "syncs"]


STARTS_A_SESSION = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_part_at_its_limit_leaves_no_process_behind() -> None:
    words = [sys.executable, "-c", STARTS_A_SESSION]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as started:
        assert started.stdout is not None
        child = int(started.stdout.readline())
        gpu.kill_tree(started)
    assert started.returncode == -signal.SIGKILL
    assert not proc.is_alive(child)


def test_losses_of_a_resumed_run_are_the_last_of_each_step(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 9.0},
        {"eval_loss": 1.0, "step": 2},
        {"step": 2, "loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Ran(0, "", tmp_path, 1.0).losses() == [2.0, 1.0]
    assert apart([1.0, 2.0], [1.0, 2.5]) == pytest.approx(0.2)
    assert apart([float("nan")], [1.0]) == float("inf")
    with pytest.raises(Failed, match="1 steps beside 2"):
        apart([1.0], [1.0, 2.0])


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
def test_two_parts_on_a_cpu(tmp_path: Path) -> None:
    rows = battery(tmp_path, "ranks,nonfinite")
    assert rows["ranks"][0] == "not possible here"
    assert rows["nonfinite"] == ("passed", "exit code 5; skipped 1")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("only", ["resume,saves,precisions", "two-ranks,float8", "plan"])
def test_other_parts_on_a_cpu(only: str, tmp_path: Path) -> None:
    """`python -m bench.gpu --run.device cpu` runs all, in minutes: these stand for them."""
    assert set(battery(tmp_path, only)) == set(only.split(","))
