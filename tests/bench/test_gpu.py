"""The battery for one GPU: its rows and files, and its parts on a CPU."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import gpu, gpu_attention, gpu_parts
from bench.gpu_parts import PARTS, Part
from bench.gpu_runs import Bench, Failed, NotPossible, Ran, apart, kill
from fsdp.base import proc
from tests.support.processes import eventually

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


def test_each_row_is_written_when_its_part_ends_and_resume_runs_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []

    def part(one: Part, device: str, folder: Path, left_s: float, running: gpu.Processes) -> gpu.Row:
        if one.name == "saves" and len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(one.name)
        return gpu.Row(one.name, one.claim, gpu.FAILED if one.name == "resume" else gpu.PASSED, "", 1.0)

    words = ["--run.device", "cpu", "--results", str(tmp_path / "new"), "--only", "ranks,resume,saves,syncs"]
    monkeypatch.setattr(gpu, "run_part", part)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(words)
    rows = gpu.earlier(gpu.device_name("cpu"), tmp_path / "new")
    assert {row["part"]: row["result"] for row in rows} == {
        "ranks": "passed",
        "resume": "failed",
        "saves": "not run",
        "syncs": "not run",
    }
    assert rows[3]["about"] == "interrupted before: python -m bench.gpu --only syncs"
    assert gpu.main([*words, "--resume"]) == 1
    assert ran == ["ranks", "resume", "resume", "saves", "syncs"]


def test_parts_share_a_gpu_but_those_that_measure_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three start together, and those that run alone only when all others have ended."""
    together, running, most = threading.Barrier(3, timeout=60), set[str](), list[tuple[str, int]]()

    def part(one: Part, device: str, folder: Path, left_s: float, processes: gpu.Processes) -> gpu.Row:
        running.add(one.name)
        if not one.alone:
            together.wait()
        most.append((one.name, len(running)))
        if not one.alone:
            together.wait()
        running.discard(one.name)
        return gpu.Row(one.name, one.claim, gpu.PASSED, "", 1.0)

    monkeypatch.setattr(gpu, "run_part", part)
    shared = [one for one in PARTS if not one.alone][:6]
    alone = [one for one in PARTS if one.alone]
    kept: list[str] = []
    rows = gpu.run_all([*alone, *shared], "cuda", lambda row: kept.append(row.part), at_once=3)
    assert [row.part for row in rows] == kept
    assert most[-len(alone) :] == [(one.name, 1) for one in alone]
    assert [count for _, count in most[: -len(alone)]] == [3] * 6


def test_the_number_of_parts_at_once_follows_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, parts in ((2, 1), (8, 2), (16, 3), (64, 3)):
        monkeypatch.setattr(gpu.os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert (gpu.at_once("cuda"), gpu.at_once("cpu")) == (parts, 1)


def test_an_interruption_ends_the_parts_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave no process and no row, and no other part starts."""
    began, pids, rows = threading.Barrier(3, timeout=60), list[int](), list[str]()

    def part(one: Part, device: str, folder: Path, left_s: float, running: gpu.Processes) -> gpu.Row:
        if one.name == "saves":
            began.wait()
            raise KeyboardInterrupt
        with running.started(["sleep", "600"]) as process:
            pids.append(process.pid)
            if one.name in ("ranks", "resume"):
                began.wait()
            process.wait()
        return gpu.Row(one.name, one.claim, gpu.FAILED, "killed", 1.0)

    monkeypatch.setattr(gpu, "run_part", part)
    shared = [one for one in PARTS if not one.alone]
    with pytest.raises(KeyboardInterrupt):
        gpu.run_all(shared, "cuda", lambda row: rows.append(row.part), at_once=3)
    assert len(pids) >= 2
    assert not any(proc.is_alive(pid) for pid in pids)
    assert not rows


def test_no_process_starts_after_the_end() -> None:
    running = gpu.Processes()
    running.end()
    with pytest.raises(KeyboardInterrupt), running.started(["sleep", "600"]):
        pass


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


@pytest.mark.parametrize("over", [1.1, 0.9])
def test_the_throughput_of_a_gpu_is_beside_those_that_have_room(
    over: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def tool(self: Bench, *words: str, limit_s: float, **environment: str) -> Ran:
        asked.extend(words)
        return Ran(0, BENCH_TRAIN.format(over=over), tmp_path, 1.0)

    memory = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(gpu_parts, "_has", lambda package: True)
    monkeypatch.setattr(Bench, "tool", tool)
    bench = Bench("cuda", tmp_path)
    if over < 0.95:
        with pytest.raises(Failed, match="less than 95% of the bare loop's throughput"):
            gpu_parts.throughput(bench, "1b-cuda")
        return
    figures = gpu_parts.throughput(bench, "1b-cuda")
    assert asked[asked.index("--only") + 1] == "bare,ours,accelerate"
    assert figures["goal"] == "MFU 60%"
    assert figures["fabric"] == "left out, the device's memory holds no more"
    assert figures["Accelerate, FSDP2"].startswith("left out, accelerate, rank 0: ended")
    assert figures["Lightning Fabric, ModelParallel"].startswith("not run, not installed here")
    assert figures["bare fully_shard loop"].endswith("MFU 45.0%, ours over it 1.1 [0.9, 1.2]")
    memory.total_memory = 40 * 2**30
    with pytest.raises(NotPossible, match="two contenders need 53 GiB, and the device has 40"):
        gpu_parts.throughput(bench, "1b-cuda")


SMALL_STATES = """
fused AdamW        1.25 ms    1.00 × fused AdamW
bf16 eager        33.10 ms   26.48 × fused AdamW
bf16 compiled      1.30 ms    1.04 × fused AdamW
8bit eager        60.00 ms   48.00 × fused AdamW
8bit compiled  {took:8.2f} ms  {over:6.2f} × fused AdamW
"""


@pytest.mark.parametrize("over", [1.2, 1.6])
def test_compiled_updates_of_small_states_are_held_to_fused_adamw(
    over: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = SMALL_STATES.format(took=1.25 * over, over=over)
    monkeypatch.setattr(Bench, "tool", lambda self, *words, limit_s: Ran(0, text, tmp_path, 1.0))
    if over > 1.5:
        with pytest.raises(Failed, match=r"over fused AdamW: .*'8bit compiled': 1.6"):
            gpu_parts.small_states(Bench("cuda", tmp_path))
        return
    figures = gpu_parts.small_states(Bench("cuda", tmp_path))
    assert figures["8bit compiled, over fused AdamW"] == 1.2
    assert len(figures) == 4


def test_kernels_of_attention_are_held_to_fp32_and_auto_to_the_fastest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = gpu_attention.attention(Bench("cpu", tmp_path))
    assert re.fullmatch(r"auto \S+ ms, flash \S+ ms, math \S+ ms", figures["2 heads of 16, 64 tokens"])
    times = {"auto": 1.3, "flash": 1.0}
    monkeypatch.setattr(gpu_attention, "times_of", lambda device, shape: times)
    with pytest.raises(Failed, match=r"auto takes 1\.30 of the fastest's time"):
        gpu_attention.attention(Bench("cuda", tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr(gpu_attention, "OFF", 1e-9)
    with pytest.raises(Failed, match="gradients of auto are off"):
        gpu_attention.attention(Bench("cpu", tmp_path))


def test_on_a_cpu_a_row_claims_no_more_than_was_run(tmp_path: Path) -> None:
    rows = {part.name: part.claim_on("cpu") for part in PARTS}
    assert rows["resume"] == "SIGKILL and resume, eager: the losses of a run without it"
    assert rows["saves"] == "saves beside training steps have the bits of blocking saves"
    assert "float8 losses are bf16's" in {part.claim_on("cuda").partition(",")[0] for part in PARTS}
    for name in ("ranks", "syncs", "devices", "bytes", "oom", "mfu-1b", "states"):
        assert gpu.inside(name, "cpu", tmp_path)[0] == "not possible here"


STARTS_A_SESSION = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", [gpu.kill_tree, kill])
def test_what_is_killed_leaves_no_process_behind(end: Callable[[subprocess.Popen[str]], None]) -> None:
    words = [sys.executable, "-c", STARTS_A_SESSION]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as started:
        assert started.stdout is not None
        child = int(started.stdout.readline())
        end(started)
    assert started.returncode == -signal.SIGKILL
    eventually("its child has ended", lambda: not proc.is_alive(child), 30)


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


@pytest.mark.slow
def test_the_tests_of_cuda_need_torch_and_pytest_alone() -> None:
    words = [sys.executable, "-c", WITH_TORCH_ALONE]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout
    collected = dict(re.findall(r"^(\S+): (\d+)$", ran.stdout, re.M))
    assert list(collected) == ["tests/bench/test_cuda.py"]
    assert int(collected["tests/bench/test_cuda.py"]) > 10


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


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "only", ["resume,saves,precisions", "two-ranks,float8", "plan", "forked,time-outs,reductions"]
)
def test_other_parts_on_a_cpu(only: str, tmp_path: Path) -> None:
    """`python -m bench.gpu --run.device cpu` runs all, in minutes: these stand for them."""
    assert set(battery(tmp_path, only)) == set(only.split(","))
