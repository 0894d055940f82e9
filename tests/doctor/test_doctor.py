"""The doctor on real ranks: the command as typed, faults in one rank, and its time limit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp.doctor import checks
from fsdp.doctor.checks import Diagnosis, judge
from tests.doctor.faulty_ranks import examined
from tests.support.world import run_world

ROOT = Path(__file__).parents[2]


def verdict_on(fault: str, folder: Path) -> Diagnosis:
    """Four ranks; the third has the fault."""
    reports = run_world(4, examined, str(folder), fault, 2)[0]
    return judge(reports)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "says"),
    [("another torch", "torch 2.12.9, where most have"), ("a slow device", "of the median")],
)
def test_a_fault_is_found_on_its_rank(fault: str, says: str, tmp_path: Path) -> None:
    verdict = verdict_on(fault, tmp_path)
    assert not verdict.fit
    blamed = [finding for finding in verdict.findings if finding.out]
    assert 2 in {finding.rank for finding in blamed}
    assert says in "\n".join(str(finding) for finding in blamed if finding.rank == 2)


@pytest.mark.long
@pytest.mark.slow
def test_the_command_alone_starts_its_own_ranks_and_leaves_its_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fsdp.doctor", "--ranks", "2", "--dir", str(tmp_path)]
    said = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    lines = said.stdout.splitlines()
    assert lines[-1].startswith("verdict: "), said.stderr
    assert said.returncode == (0 if "fit to train" in lines[-1] and "not fit" not in lines[-1] else 3)
    assert lines[0].startswith("2 ranks on 1 node; checked in ")
    assert lines[1].startswith("rank 0 has cpu, torch ")
    rows = [line.split() for line in lines if line.startswith(f"{socket.gethostname()} ")]
    assert [row[1] for row in rows] == ["0", "1"]
    record = json.loads((tmp_path / "doctor" / "doctor.json").read_text())
    assert record["ranks"]["1"]["within_gb_s"] > 0
    assert "verdict: " in (tmp_path / "doctor" / "doctor.txt").read_text()
    assert not list((tmp_path / "doctor").glob("probe-*")), "what it wrote to measure is gone"


@pytest.mark.slow
@pytest.mark.long
def test_it_ends_within_its_limit_and_names_the_rank_that_hangs(tmp_path: Path) -> None:
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m"]
    flags = ["--dir", str(tmp_path), "--limit-s", "30"]
    said = subprocess.run(
        [*starter, "tests.doctor.faulty_ranks", *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert said.returncode != 0
    blamed = [line for line in said.stdout.splitlines() if line.startswith("OUT ")]
    assert len(blamed) == 1, said.stdout + said.stderr
    assert "(rank 2): not done in time, still in: a matrix product" in blamed[0]


# ---------------------------------------------------------------- its parts


def test_open_and_closed_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as closed:
        ports = [server.getsockname()[1], server.getsockname()[1], closed.getsockname()[1]]
        closed.close()
        failures = checks.unreachable(0, [("127.0.0.1", port) for port in ports])
    assert set(failures) == {2}
    assert "refused" in failures[2]


def test_a_probe_is_written_or_the_folder_is_named(tmp_path: Path) -> None:
    assert checks.write_probe(tmp_path / "here" / "probe-0", 1 << 20)["write_mb_s"] > 0
    (tmp_path / "file").touch()
    no_folder = tmp_path / ("x" * 300)  # as one above which this user may not look: Path.is_dir raises there
    for folder in (tmp_path / "file" / "below", no_folder):
        assert "cannot be written" in checks.write_probe(folder / "x", 1 << 20)["storage_error"]
