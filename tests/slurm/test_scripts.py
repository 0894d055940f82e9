"""The shell that people read and edit: clean to shellcheck, clear where it is used wrongly. And what a job
makes of its words and of what Slurm prints about it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fsdp.base.errors import ConfigError
from launch import slurm_job
from tests.slurm.cluster import REPOSITORY
from tests.support.needs import skip_or_fail


def bash(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], **environ}
    return subprocess.run(["bash", *words], cwd=REPOSITORY, env=environ, capture_output=True, text=True)


def program(path: Path, text: str) -> str:
    """The PATH with this program first."""
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return f"{path.parent}:{os.environ['PATH']}"


def test_shellcheck_has_nothing_to_say() -> None:
    if shutil.which("shellcheck") is None:
        skip_or_fail("shellcheck", "shellcheck is not installed (apt-get install shellcheck)")
    said = bash("-c", "shellcheck -x slurm/*")
    assert said.returncode == 0, said.stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [("before_node() { ; }", "syntax error"), ("VENV=/nowhere", "VENV=/nowhere has no bin/python")],
)
def test_settings_that_would_be_ignored_end_the_job(settings: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.env").write_text(settings)
    variables = {"CLUSTER_ENV": str(tmp_path / "cluster.env"), "SLURM_JOB_ID": "1"}
    ended = bash("-euc", "source slurm/lib.sh; read_record() { :; }; job_begin; echo went on", **variables)
    assert (ended.returncode, ended.stdout, said in ended.stderr) == (2, "", True), ended


def test_a_job_script_outside_a_job_says_how_it_is_used() -> None:
    said = bash("slurm/fsdp.sbatch")
    assert said.returncode != 0
    assert "HINT: sbatch slurm/fsdp.sbatch" in said.stderr


# ---------------------------------------------------------------- the job's words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ""),
        ("ddp --train.steps 5", "--mesh.strategy ddp --train.steps 5"),
        ("ddp text --dry-run", f"--mesh.strategy ddp --config {REPOSITORY}/recipes/text.toml"),
        ("mine/own.toml --train.steps 5", "--config mine/own.toml --train.steps 5"),
    ],
)
def test_a_word_in_front_is_a_strategy_or_a_recipe(words: str, expected: str) -> None:
    assert slurm_job.flags_of(words.split()) == expected.split()
    with pytest.raises(
        ConfigError, match=r"dpp is not a strategy \(ddp, fsdp, hsdp\) or a recipe .*llama-8b"
    ):
        slurm_job.flags_of(["dpp"])


def test_a_flag_of_several_lines_reaches_the_shell_whole() -> None:
    flags = ["--x", "a 'b'\n$(exit 1)", ""]
    said = bash("-euc", f'{slurm_job.as_bash("flags", flags)}; printf "%s|" "${{flags[@]}}"')
    assert said.stdout == "|".join([*flags, ""])


# ---------------------------------------------------------------- the job's record


def facts_of(folder: Path, record: str, **environ: str) -> list[str]:
    """The job, its restart, deadline, and Python; and what is left of variables that srun reads."""
    path = program(
        folder / "scontrol",
        '[ "$2" = hostnames ] && echo n1 && exit\n[ "$2" = node ] && exit 1\n'
        f"case $5 in 20*) echo '{record}' ;; *) exit 1 ;; esac",
    )
    script = (
        "source slurm/lib.sh; sleep() { :; }; SLURM_JOB_NAME=x\n"
        'on_head() { echo a line of a prolog; echo "export SHARDRUN_RUN=r SHARDRUN_RANKS_PER_NODE=1"; }\n'
        'job_begin >/dev/null; echo "$SHARDRUN_JOB $SLURM_RESTART_COUNT"; echo "$SLURM_JOB_END_TIME"\n'
        'echo "${RANK-}${SRUN_CPUS_PER_TASK-}${!SLURM_GPU@}${!SLURM_MEM@}${!SLURM_TRES@}${!SLURM_NTASKS@}"\n'
        'echo "$(command -v python)"'
    )
    job = {"SLURM_JOB_ID": "20", "SLURM_JOB_NODELIST": "n1", "PATH": path, "TZ": "UTC"}
    said = bash("-euc", script, **{**job, **environ})
    assert said.returncode == 0, said.stderr
    return said.stdout.splitlines()


ARRAY = {"SLURM_ARRAY_JOB_ID": "20", "SLURM_ARRAY_TASK_ID": "3"}
INTERACTIVE = {
    "SLURM_GPUS_ON_NODE": "1", "SLURM_GPUS_PER_NODE": "1", "SLURM_GPUS_PER_TASK": "1",
    "SLURM_MEM_PER_NODE": "9", "SLURM_MEM_PER_CPU": "9", "SLURM_TRES_PER_TASK": "gres:gpu:1",
    "SLURM_NTASKS": "9",
}  # fmt: skip
"""Of a shell with one GPU in which sbatch is called."""


@pytest.mark.parametrize(
    ("record", "environ", "expected"),
    [
        ("JobId=20 Restarts=2 EndTime=2030-01-02T03:04:05", {"SLURM_JOB_END_TIME": "7"}, "20 2 1893553445"),
        # submitted by a task of an array, in its fourth start, under torchrun
        ("JobId=20 Restarts=0 EndTime=Unknown", {**ARRAY, "SLURM_RESTART_COUNT": "3", "RANK": "1"}, "20 0 "),
        ("JobId=20 ArrayJobId=20 Restarts=1 EndTime=Unknown", ARRAY, "20_3 1 "),
        # a controller that does not answer
        ("", {"SLURM_RESTART_COUNT": "3", "SLURM_JOB_END_TIME": "7", "SRUN_CPUS_PER_TASK": "8"}, "20 3 7"),
        ("JobId=20 Restarts=0 EndTime=Unknown", INTERACTIVE, "20 0 "),
    ],
)
def test_a_job_s_own_facts_are_not_those_of_the_job_that_submitted_it(
    record: str, environ: dict[str, str], expected: str, tmp_path: Path
) -> None:
    job, deadline, leaked, _ = facts_of(tmp_path, record, **environ)
    assert (f"{job} {deadline}", leaked) == (expected, "")


GRES = "JobId=20 JOB_GRES=gpu:a100:{} Nodes={} CPU_IDs=0-7 Mem=0 GRES=gpu:a100:{}(IDX:0-1)"
NODE = "NodeName=n1 Arch=x86_64 CPUTot=8 Gres={} NodeAddr=10.0.0.1"


@pytest.mark.parametrize(
    ("record", "environ", "expected"),
    [
        (GRES.format(4, "n[1-2]", 2), {"SHARDRUN_GPUS": "1"}, (2, 2)),
        (GRES.format(4, "n[1-2]", 2), {"NPROC_PER_NODE": "1"}, (1, 1)),
        (f"{GRES.format(4, 'n1', 2)}   Nodes=n2 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)", {}, "n2 has 1"),
        ("JobId=20 Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=", {"SHARDRUN_TASKS": "4"}, (4, 0)),
        (
            "JobId=20 Nodes=n1 CPU_IDs=0 Mem=0 GRES=",
            {"SHARDRUN_NODE_RECORD": NODE.format("gpu:a:8")},
            "has 8",
        ),
        ("", {"SHARDRUN_GPUS": "8"}, (8, 8)),
        ("", {"NPROC_PER_NODE": "many"}, "NPROC_PER_NODE=many is not a number of ranks"),
    ],
)
def test_ranks_follow_the_gpus_of_the_job(
    record: str, environ: dict[str, str], expected: tuple[int, int] | str
) -> None:
    variables = {"SHARDRUN_RECORD": record, **environ}
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=f"{expected}.*HINT: "):
            slurm_job.ranks_and_gpus(variables, on_cpu=False)
    else:
        assert slurm_job.ranks_and_gpus(variables, on_cpu=False) == expected


# ---------------------------------------------------------------- the meeting and the end


RECORD = "JobId=5 JobState={state} Requeue=1 BatchFlag=1 Command={home}/slurm/fsdp.sbatch"


def judged(folder: Path, scontrol: str) -> subprocess.CompletedProcess[str]:
    """What judge_and_act asks of launch.slurm_job, for a start that ended with 9; pauses take no time."""
    script = (
        'source slurm/lib.sh; sleep() { :; }; say() { echo "$*"; }\n'
        'on_head() { kill -TERM $BASHPID; echo "$@"; return 3; }\n'
        "trap : TERM USR1; SHARDRUN_JOB=5 SLURM_RESTART_COUNT=0 rc=9 run=RUN record=\n"
        "judge_and_act; trap -p TERM USR1"
    )
    return bash("-euc", script, PATH=program(folder / "scontrol", scontrol))


@pytest.mark.parametrize(
    ("scontrol", "code", "said"),
    [
        (f"echo '{RECORD.format(state='RUNNING', home='/x')}'", 3, "--code 9"),
        (f"echo '{RECORD.format(state='CANCELLED', home='/x')}'", 9, "the job is CANCELLED"),
        # scancel's TERM comes to each process of a job: here to scontrol and to the subshell that started it
        (f"kill -TERM $PPID $$\necho '{RECORD.format(state='CANCELLED', home='/x')}'", 9, "is CANCELLED"),
        ("exit 1", 3, "scontrol does not answer"),
    ],
)
def test_a_job_is_judged_by_its_record_and_without_one_as_if_it_runs(
    scontrol: str, code: int, said: str, tmp_path: Path
) -> None:
    found = judged(tmp_path, scontrol)
    assert found.returncode == code, found.stderr
    assert said in found.stdout + found.stderr
    if code == 3:
        assert found.stdout.splitlines()[-1].endswith("--code 9")


@pytest.mark.parametrize("submits", ["true", "false"])
def test_a_job_that_cannot_be_requeued_is_submitted_anew_or_says_that_it_is_not(submits: str) -> None:
    script = (
        f"source slurm/lib.sh; left_out=; scontrol() {{ return 1; }}; again=({submits} -- 'a b')\n"
        "sleep() { echo nap; }; SHARDRUN_JOB=5; requeue"
    )
    said = bash("-euc", script)
    assert said.stdout.count("nap\n") == 13  # of 5 s
    assert f"in its place: '{submits}' '--' 'a b'" in said.stdout
    assert said.returncode == (submits == "false")
    assert (f"NOT requeued. HINT: '{submits}' '--' 'a b'" in said.stderr) == (submits == "false")
