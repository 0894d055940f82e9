"""A holder whose process is invisible is not dead: hidden by /proc, in another PID namespace, or without
/proc.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp.base.errors import ShardrunError
from fsdp.rundir import lock
from fsdp.rundir.lock import Folder
from tests.support.locks import acquire

ROOT = Path(__file__).parents[2]
NOBODY = 65534
OWN_SPACE = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]


def in_namespaces(space: list[str], prepare: str, *command: str, cwd: Path = ROOT) -> str:
    """Standard output of a command in namespaces of its own, after `prepare`. Skips where these are not
    allowed.
    """
    tried = subprocess.run([*space, "sh", "-c", prepare], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"{shlex.join(space)}, then {prepare}: {tried.stderr.strip()}")
    shell = [*space, "sh", "-c", f"{prepare} && exec {shlex.join(command)}"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(shell, cwd=cwd, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_holder_in_another_pid_namespace_is_recognised_by_its_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process id may be another process here."""
    monkeypatch.setattr(Folder, "beat_s", 0.05)
    held = acquire(tmp_path, "torchrun")
    contend = "import sys; from pathlib import Path; from tests.support.locks import acquire\n"
    contend += "try: acquire(Path(sys.argv[1]), 'srun', stale_s=60.0)\n"
    contend += "except Exception as error: print(error)"
    said = in_namespaces(OWN_SPACE, "mount -t proc proc /proc", sys.executable, "-c", contend, str(tmp_path))
    assert f"is being written by process {os.getpid()} on " in said
    assert held.lost_now() is None
    held.release()


def test_an_unknown_place_equals_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Folder, "beat_s", 0.05)
    monkeypatch.setattr(lock, "this_place", lambda: "")
    held = acquire(tmp_path, "torchrun")
    with pytest.raises(ShardrunError, match="is being written by process"):
        acquire(tmp_path, "srun", stale_s=30.0)
    held.release()


@pytest.mark.parametrize(
    "foreign",
    [
        {"pid": 0},
        {"pid": -1},
        {"pid": 2**40},
        {"pid": "1"},
        {"pid": True},
        {"since": 1e300},
        {"since": "x"},
        {"host": ["a"]},
    ],
    ids=str,
)
def test_a_lock_file_with_invalid_values_is_watched_and_replaced(
    foreign: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folder, "beat_s", 3600.0)
    held = acquire(tmp_path, "torchrun")
    file = tmp_path / lock.FILE
    head, _, beat = file.read_text().partition("\n")
    file.write_text(json.dumps({**json.loads(head), **foreign}) + "\n" + beat)
    second = acquire(tmp_path, "srun", stale_s=0.1)
    assert "a holder without a name" in second.took_over
    held.release()
    second.release()
