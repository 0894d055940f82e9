"""The lock of a run directory: a second job is refused, a dead holder is replaced, and a replaced one
notices.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fsdp.base.errors import RefusedError
from fsdp.rundir import lock
from fsdp.rundir.lock import FILE, Folder, hold
from tests.support.locks import acquire
from tests.support.processes import eventually

ROOT = Path(__file__).parents[2]

HOLD = """
import sys
from fsdp.rundir.lock import Folder, hold

held = hold(Folder(sys.argv[1]), None, "torchrun", "job 7")
print("held", flush=True)
sys.stdin.read()
"""


def holder(run_dir: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def rewrite(run_dir: Path, **changes: object) -> None:
    """Change the holder in the lock file, as another machine's would have written it."""
    file = run_dir / FILE
    head, _, beat = file.read_text().partition("\n")
    file.write_text(json.dumps({**json.loads(head), **changes}) + "\n" + beat)


def test_a_second_job_is_refused_with_the_holder_named(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        with pytest.raises(RefusedError) as refused:
            acquire(tmp_path, "srun")
        assert not open_below(tmp_path)
        assert f"process {first.pid} on {os.uname().nodename}, started by torchrun (job 7), since 20" in str(
            refused.value
        )
        assert "HINT: another --run.dir" in str(refused.value)
        first.kill()


def test_a_killed_holder_is_replaced_at_once_with_one_line(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        first.kill()
        first.wait()
        second = acquire(tmp_path, "srun", stale_s=1e9)
    assert f"took over from process {first.pid} on" in second.took_over
    assert second.took_over.endswith("it is dead")
    second.release()
    assert not (tmp_path / FILE).exists()


def test_a_live_holder_on_another_machine_is_recognised_by_its_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folder, "beat_s", 0.05)
    held = acquire(tmp_path, "srun")
    monkeypatch.setattr(lock, "this_place", lambda: "another machine")
    with pytest.raises(RefusedError, match="is being written by process"):
        acquire(tmp_path, "srun", stale_s=30.0)
    assert held.lost_now() is None
    held.release()


def test_a_silent_holder_on_another_machine_is_replaced_and_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folder, "beat_s", 3600.0)  # a disk's fsync may take longer than the ordinary one
    held = acquire(tmp_path, "srun")
    rewrite(tmp_path, place="another machine", host="n2")
    second = acquire(tmp_path, "srun", stale_s=0.3)
    assert "on n2" in second.took_over
    assert "gave no sign for 0.3 s" in second.took_over
    assert f"was taken over by process {os.getpid()}" in (held.lost_now() or "")
    held.release()
    assert second.lost_now() is None, "an ousted holder's release must not remove another's lock"
    second.release()


def test_a_lock_removed_by_hand_stops_its_holder(tmp_path: Path) -> None:
    held = acquire(tmp_path, "srun")
    (tmp_path / FILE).unlink()
    assert "is gone" in (held.lost_now() or "")
    held.release()


def try_once(run_dir: str, start: object, results: object) -> None:
    real = Path.unlink

    def slow(file: Path, missing_ok: bool = False) -> None:
        time.sleep(0.02)  # each place where another may come between
        real(file, missing_ok)
        time.sleep(0.02)

    Path.unlink = slow  # type: ignore[method-assign, assignment]
    start.wait()  # type: ignore[attr-defined]
    held = None
    with contextlib.suppress(RefusedError):
        held = acquire(Path(run_dir), "race")
    start.wait()  # type: ignore[attr-defined]
    results.put(held is not None and held.lost_now() is None)  # type: ignore[attr-defined]
    start.wait()  # type: ignore[attr-defined]


def test_of_several_that_see_a_dead_holder_one_takes_over(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(6), context.Queue()
    racers = [context.Process(target=try_once, args=(str(tmp_path), start, results)) for _ in range(6)]
    for racer in racers:
        racer.start()
    outcomes = [results.get(timeout=60) for _ in racers]
    for racer in racers:
        racer.join()
    assert sorted(outcomes) == [False] * 5 + [True]
    assert not [path for path in tmp_path.iterdir() if path.name != FILE]


@pytest.mark.parametrize(
    ("job", "other", "later"),
    [
        ("Slurm job 7, start 2", "Slurm job 7, start 1", True),
        ("Slurm job 7, start 1, try 2", "Slurm job 7, start 1", True),
        ("LSF job 7[3], start 10", "LSF job 7[3], start 9", True),
        ("LSF job 7[3], start 2", "LSF job 7[4], start 1", False),
        ("Slurm job 7, start 1", "Slurm job 7, start 2", False),
    ],
)
def test_which_start_is_a_later_one_of_the_same_job(job: str, other: str, later: bool) -> None:
    assert lock.is_later_start(job, other) is later


def open_below(folder: Path) -> list[str]:
    """This process's open files there, also deleted ones."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own is closed by now
            found.append(str(link.readlink()))
    return [name for name in found if name.startswith(f"{folder}/")]


BOTH = """
import sys
from fsdp.rundir.lock import Folder, hold

held = hold(Folder(sys.argv[1]), Folder(sys.argv[2]), "torchrun")
print("held", flush=True)
sys.stdin.read()
print(held.lost)
held.release()
"""


@pytest.mark.parametrize("checkpoints", ["run/checkpoints", "elsewhere"])
def test_of_a_suspended_job_and_a_second_one_on_its_directory_one_goes_on(
    checkpoints: str, tmp_path: Path
) -> None:
    """On another machine. Resumed between the takeovers of two locks, it kept one and lost the other: both
    jobs ended.
    """
    run, store = tmp_path / "run", tmp_path / checkpoints
    run.mkdir()
    words = [sys.executable, "-c", BOTH, str(run), str(store)]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdin is not None
        assert first.stdout.readline() == "held\n"
        for folder in (run, store):
            if (folder / FILE).exists():
                rewrite(folder, place="another machine")
        first.send_signal(signal.SIGSTOP)
        places = Folder(run), Folder(store)
        for place in places:
            place.stale_s = 1.0
        claim = places[0].claim

        def resumed(name: str, data: bytes, dead: bool) -> None:
            claim(name, data, dead)
            first.send_signal(signal.SIGCONT)
            time.sleep(1.2 * Folder.beat_s)  # it renews what it has

        places[0].claim = resumed  # type: ignore[method-assign]
        second = hold(*places, "srun")
        assert second.lost_now() is None
        assert "was taken over by" in first.communicate("", timeout=30)[0]
    second.release()
    assert not [path for path in tmp_path.rglob("*") if FILE in path.name]


ORPHAN = """
import signal, sys, time
from pathlib import Path
from fsdp.base.phases import follow_parent
from fsdp.rundir.lock import Folder, hold
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
follow_parent()
from fsdp.rundir.lock import Folder, hold

held = hold(Folder(sys.argv[1]), None, "torchrun")
print("held", flush=True)
while not (asked and Path(sys.argv[1], "saved").exists()):
    time.sleep(0.01)
held.release()
"""


def test_a_start_waits_for_a_rank_whose_launcher_was_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    words = [sys.executable, "-c", launcher, ORPHAN, str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "held\n"
        with pytest.raises(RefusedError):
            acquire(tmp_path, "torchrun")
        parent.kill()
        parent.wait()
        saves = threading.Thread(
            target=eventually, args=("the start waits", lambda: waits(tmp_path, caplog), 20)
        )
        saves.start()
        acquire(tmp_path, "torchrun").release()
        saves.join()


def waits(run_dir: Path, caplog: pytest.LogCaptureFixture) -> bool:
    if said := "was killed: waiting until it has saved" in caplog.text:
        (run_dir / "saved").touch()
    return said
