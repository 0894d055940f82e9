"""The shell that people read and edit: clean to shellcheck, and clear where it is used wrongly."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import REPOSITORY
from tests.support.needs import skip_or_fail

FSDP = REPOSITORY / "slurm" / "fsdp.sbatch"


def bash(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *words],
        cwd=REPOSITORY,
        env={"PATH": os.environ["PATH"], **environ},
        capture_output=True,
        text=True,
    )


def test_shellcheck_has_nothing_to_say() -> None:
    if shutil.which("shellcheck") is None:
        skip_or_fail("shellcheck", "shellcheck is not installed (apt-get install shellcheck)")
    said = bash("-c", "shellcheck -x slurm/*")
    assert said.returncode == 0, said.stdout


def test_a_job_script_outside_a_job_says_how_it_is_used() -> None:
    said = bash("slurm/fsdp.sbatch")
    assert said.returncode != 0
    assert "HINT: sbatch slurm/fsdp.sbatch" in said.stderr


def test_a_copied_job_script_names_what_it_misses(tmp_path: Path) -> None:
    copied = shutil.copy(FSDP, tmp_path / "mine.sbatch")
    environ = {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": str(tmp_path)}
    said = bash(str(copied), **environ)
    assert said.returncode == 2
    assert said.stderr == (
        f"no lib.sh in {tmp_path}/slurm. HINT: export SHARDRUN_HOME=/path/to/shardrun before sbatch\n"
    )
    assert "no lib.sh" not in bash(str(copied), **environ, SHARDRUN_HOME=str(REPOSITORY)).stderr


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, "home/.venv"), ({"VENV": "other"}, "other"), ({"CONDA_PREFIX": "c"}, "home/.venv")],
)
def test_the_python_beside_train_py_comes_before_an_active_one(
    environ: dict[str, str], expected: str, tmp_path: Path
) -> None:
    """As slurm/cluster.env promises; VENV comes before both."""
    for place in ("home/.venv", "other"):
        (tmp_path / place / "bin").mkdir(parents=True)
        (tmp_path / place / "bin/python").symlink_to("/bin/true")
    shutil.copytree(REPOSITORY / "slurm", tmp_path / "home/slurm")
    script = "source home/slurm/lib.sh; CONTAINER=() home=home; find_python; command -v python"
    said = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", **environ},
        capture_output=True,
        text=True,
    )
    assert said.stdout == f"{expected}/bin/python\n", said.stderr


def words_of(*words: str) -> subprocess.CompletedProcess[str]:
    """The flags that job_begin passes on, one a line."""
    script = 'source slurm/lib.sh; name_in_front "$@"; printf "%s\\n" "${named[@]}"'
    return bash("-euc", script, "job", *words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ""),
        ("--dry-run", "--dry-run"),
        ("ddp --train.steps 5", "--mesh.strategy ddp --train.steps 5"),
        ("hsdp", "--mesh.strategy hsdp"),
        ("ddp text --dry-run", f"--mesh.strategy ddp --config {REPOSITORY}/recipes/text.toml --dry-run"),
        ("text --dry-run", f"--config {REPOSITORY}/recipes/text.toml --dry-run"),
        ("mine/own.toml --train.steps 5", "--config mine/own.toml --train.steps 5"),
    ],
)
def test_a_word_in_front_is_a_strategy_or_a_recipe(words: str, expected: str) -> None:
    assert words_of(*words.split()).stdout.split() == expected.split()


def facts_of(folder: Path, record: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """job, restart and ranks_per_node of a job whose scontrol prints this record, and nothing for others."""
    (folder / "scontrol").write_text(
        '#!/bin/bash\n[ "$2" = hostnames ] && echo n1 && exit\n'
        f"case $5 in 20) echo '{record}' ;; 20_*) echo '{record}' ;; *) exit 1 ;; esac\n"
    )
    (folder / "scontrol").chmod(0o755)
    script = (
        "source slurm/lib.sh; find_python() { :; }; job_facts\n"
        'echo "$job $restart $ranks_per_node ${RANK-} ${SRUN_CPUS_PER_TASK-}"\n'
        'leaks="${!SLURM_GPU@}${!SLURM_MEM@}${!SLURM_TRES@}${!SLURM_NTASKS@}"\n'
        'echo "${SLURM_JOB_END_TIME-}; ${node_gpus[*]}; $leaks"'
    )
    job = {"SLURM_JOB_ID": "20", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", **environ}
    return bash("-euc", script, **{"PATH": f"{folder}:{os.environ['PATH']}", "TZ": "UTC", **job})


ARRAY = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("record", "environ", "expected"),
    [
        ("JobId=20 Requeue=1 Restarts=0", {}, "20 0 1"),
        ("JobId=20 Requeue=1 Restarts=2", {}, "20 2 1"),
        # submitted by a task of the array 12, in its fourth start, on GPUs and under torchrun
        ("JobId=20 Requeue=1 Restarts=0", {**ARRAY, "SLURM_RESTART_COUNT": "3", "RANK": "1"}, "20 0 1"),
        ("JobId=20 ArrayJobId=20 Restarts=1", {**ARRAY, "SLURM_ARRAY_JOB_ID": "20"}, "20_3 1 1"),
        # a controller that does not answer
        ("", {"SLURM_RESTART_COUNT": "3"}, "20 3 1"),
        ("", {"SLURM_GPUS_ON_NODE": "0", "SLURM_NTASKS_PER_NODE": "2"}, "20 0 2"),
        ("", {"SLURM_GPUS_ON_NODE": "8", "SRUN_CPUS_PER_TASK": "32"}, "20 0 8"),
    ],
)
def test_a_job_s_own_facts_are_not_those_of_the_job_that_submitted_it(
    record: str, environ: dict[str, str], expected: str, tmp_path: Path
) -> None:
    found = facts_of(tmp_path, record, **environ)
    assert found.stdout.splitlines()[0].strip() == expected, found.stderr


GRES = (
    "JobId=20 Requeue=1 Restarts=0 JOB_GRES=gpu:a100:{} Nodes={} CPU_IDs=0-7 Mem=0 GRES=gpu:a100:{}(IDX:0-1)"
)
INTERACTIVE = {
    "SLURM_GPUS_ON_NODE": "1", "SLURM_GPUS_PER_NODE": "1", "SLURM_GPUS_PER_TASK": "1",
    "SLURM_MEM_PER_NODE": "9", "SLURM_MEM_PER_CPU": "9", "SLURM_TRES_PER_TASK": "gres:gpu:1",
    "SLURM_NTASKS": "9",
}  # fmt: skip
"""Of a shell with one GPU in which sbatch is called."""


@pytest.mark.parametrize(
    ("record", "ranks", "expected"),
    [
        (GRES.format(4, "n[1-2]", 2), "20 0 2", "; --gres=gpu:2; "),
        ("JobId=20 Restarts=0 JOB_GRES=(null) Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=", "20 0 1", "; ; "),
        ("", "20 0 1", "; --gres=gpu:1; "),
    ],
)
def test_requests_of_the_shell_in_which_sbatch_is_called_are_forgotten(
    record: str, ranks: str, expected: str, tmp_path: Path
) -> None:
    printed = facts_of(tmp_path, record, **INTERACTIVE).stdout.splitlines()
    assert [line.rstrip(" ") for line in printed] == [ranks, expected.rstrip(" ")]


def test_a_node_with_fewer_gpus_is_named(tmp_path: Path) -> None:
    record = f"{GRES.format(6, 'n[1-2]', 2)}   Nodes=n3 CPU_IDs=0-7 Mem=0 GRES=gpu:1(IDX:0)"
    failed = facts_of(tmp_path, record)
    assert failed.returncode == 1
    assert "need 2 GPUs a node, but n3 has 1. HINT: NPROC_PER_NODE=1 sbatch" in failed.stderr
    assert facts_of(tmp_path, record, NPROC_PER_NODE="1").stdout.startswith("20 0 1")


@pytest.mark.parametrize(
    ("record", "environ", "expected"),
    [
        ("JobId=20 EndTime=2030-01-02T03:04:05", {"SLURM_JOB_END_TIME": "7"}, "1893553445"),
        ("JobId=20 EndTime=Unknown", {"SLURM_JOB_END_TIME": "7"}, ""),
        ("", {"SLURM_JOB_END_TIME": "7"}, "7"),
    ],
)
def test_the_end_of_the_job_is_slurms_or_unset(
    record: str, environ: dict[str, str], expected: str, tmp_path: Path
) -> None:
    assert facts_of(tmp_path, record, **environ).stdout.splitlines()[1].partition(";")[0] == expected


def test_a_heterogeneous_job_is_refused(tmp_path: Path) -> None:
    """`sbatch --nodes=1 : --nodes=1 slurm/fsdp.sbatch`: Slurm runs the script in the first component, whose
    sruns reach its own nodes alone; the others would idle.
    """
    found = facts_of(tmp_path, "JobId=20 HetJobId=20 HetJobOffset=0 Requeue=1 Restarts=0")
    assert found.returncode == 1
    assert "the first component of a heterogeneous job alone. HINT: sbatch --nodes=2 slurm/" in found.stderr
    # of the heterogeneous job in which this one was submitted
    assert facts_of(tmp_path, "JobId=20 Requeue=1 Restarts=0", SLURM_HET_SIZE="2").stdout.startswith("20 0 1")


@pytest.mark.parametrize(
    ("said", "address"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("Welcome to the cluster: 2 nodes\n10.0.0.1\nWelcome to the cluster: 2 nodes", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::1"),
        ("fe80::1%ib0", "fe80::1%ib0"),
        ("Welcome", ""),
    ],
)
def test_the_address_is_found_beside_lines_of_a_site_s_prolog(said: str, address: str) -> None:
    script = (
        'source slurm/lib.sh; say() { :; }; on_head() { echo 20000; }; each_node() { echo "$SAID"; }\n'
        "nodes=(n1 n2) ranks_per_node=1 run=r job=1 restart=0 SLURM_JOB_ID=1 RDZV_HOST=n1\n"
        'meet 0; echo "$MASTER_ADDR"'
    )
    found = bash("-euc", script, SAID=said)
    assert found.stdout.strip() == address, found.stderr
    assert (found.returncode == 0) == bool(address)


def test_another_word_in_front_is_refused_with_the_names() -> None:
    said = words_of("dpp")
    assert said.returncode == 1
    assert "dpp is not a strategy (ddp, fsdp, hsdp) or a recipe (" in said.stderr
    assert "llama-8b" in said.stderr
    assert "HINT: sbatch slurm/fsdp.sbatch ddp" in said.stderr


RECORD = "JobId=5 JobState={state} Requeue={requeue} BatchFlag=1 Command={home}/slurm/fsdp.sbatch"


def judged(folder: Path, scontrol: str, verdict: int = 3) -> subprocess.CompletedProcess[str]:
    """What judge_and_act asks of launch.slurm_job, for a start that ended with 9; pauses take no time."""
    (folder / "scontrol").write_text(f"#!/bin/bash\n{scontrol}\n")
    (folder / "scontrol").chmod(0o755)
    script = (
        'source slurm/lib.sh; sleep() { :; }; say() { echo "$*"; }\n'
        'on_head() { kill -TERM $BASHPID; echo "$@"; return %d; }\n'
        "trap : TERM USR1; job=5 restart=0 rc=9 run=RUN; judge_and_act; trap -p TERM USR1"
    )
    return bash("-euc", script % verdict, PATH=f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("scontrol", "code", "said"),
    [
        (f"echo '{RECORD.format(state='RUNNING', requeue=1, home='/x')}'", 3, "--code 9"),
        (f"echo '{RECORD.format(state='RUNNING', requeue=0, home='/x')}'", 3, "--code 9 --no-requeue"),
        ("echo 'JobId=5 JobState=RUNNING Requeue=1 BatchFlag=0'", 3, "--code 9 --no-requeue"),  # salloc
        (f"echo '{RECORD.format(state='CANCELLED', requeue=1, home='/x')}'", 9, "the job is CANCELLED"),
        ("exit 1", 3, "scontrol does not answer"),
    ],
)
def test_a_job_is_judged_by_its_record_and_without_one_as_if_it_runs(
    scontrol: str, code: int, said: str, tmp_path: Path
) -> None:
    found = judged(tmp_path, scontrol)
    assert found.returncode == code, found.stderr
    assert said in found.stdout
    if "does not answer" in said:
        assert found.stdout.splitlines()[-1].endswith("--code 9")


CANCELLED_WHILE_ASKED = "kill -TERM $PPID $$\necho '{record}'"
"""scancel's TERM comes to each process of a job: here to scontrol and to the subshell that started it."""


def test_a_job_cancelled_while_its_record_is_read_is_not_judged(tmp_path: Path) -> None:
    record = RECORD.format(state="CANCELLED", requeue=1, home="/x")
    found = judged(tmp_path, CANCELLED_WHILE_ASKED.format(record=record))
    assert (found.returncode, found.stdout) == (9, "the job is CANCELLED: nothing more to do here\n")


def test_the_last_task_of_a_large_array_finds_its_scripts(tmp_path: Path) -> None:
    """Its id is the array's: scontrol writes a record for each task, more than a pipe holds."""
    copied = shutil.copy(FSDP, tmp_path / "mine.sbatch")
    record = RECORD.format(state="RUNNING", requeue=1, home=REPOSITORY) + " " + "x" * 1500
    (tmp_path / "scontrol").write_text(f"#!/bin/bash\nfor i in $(seq 200); do echo '{record}'; done\n")
    (tmp_path / "scontrol").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    said = bash(str(copied), SLURM_JOB_ID="1", **environ)
    assert "no lib.sh" not in said.stderr
