"""The DistEnv from torchrun's variables or none, who prints shared errors."""

from __future__ import annotations

import time

import pytest

import train
from fsdp.base.errors import LaunchError
from fsdp.distributed.env import from_environment, prints_shared_errors, started_by, unused_allocation
from fsdp.distributed.process_group import rendezvous_store

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2",
}  # fmt: skip


def test_torchrun_s_variables() -> None:
    made = from_environment(TORCHRUN)
    assert str(made) == "rank 5(8) local 1(4) node 1(2) cpu via torchrun"
    assert not made.is_main


def test_ranks_without_an_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    made = from_environment(TORCHRUN, device="cpu")
    with pytest.raises(LaunchError, match=r"rank 5 has no MASTER_ADDR\. HINT: start with torchrun, or srun"):
        rendezvous_store(made, 1.0)


@pytest.mark.parametrize(
    ("environ", "prints"),
    [
        ({}, True),
        ({"RANK": "0"}, True),
        ({"RANK": "1"}, False),
        ({"SLURM_PROCID": "2"}, False),
        ({"SLURM_PROCID": "0"}, True),
        ({"RANK": "1", "SLURM_PROCID": "0"}, False),
        ({"RANK": "0", "SLURM_PROCID": "1"}, True),
        ({"OMPI_COMM_WORLD_RANK": "1"}, False),
        ({"PMI_RANK": "0", "SLURM_PROCID": "1"}, True),
    ],
)
def test_one_process_prints_an_error_of_all_ranks(environ: dict[str, str], prints: bool) -> None:
    """torchrun numbers nodes by their addresses: 10.0.0.10, the second task of srun, before 10.0.0.9."""
    assert prints_shared_errors(environ) is prints


@pytest.mark.parametrize("rank", ["0", "1"])
def test_under_torchrun_an_error_of_all_ranks_is_printed_before_rank_0_is_ended(
    rank: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """torchrun ends all ranks as soon as one has ended: rank 1 waits, or rank 0 is ended before it has
    printed.
    """
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for name, value in {**TORCHRUN, "RANK": rank}.items():
        monkeypatch.setenv(name, value)
    assert train.main(["--backend", "ray"]) == 2
    assert capfd.readouterr().err.count("HINT: ") == (rank == "0")
    assert len(waited) == (rank == "1")


@pytest.mark.parametrize(
    ("environ", "warned"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "8"}, True),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, True),
    ],
)
def test_one_process_in_an_allocation_for_several_is_a_warning(environ: dict[str, str], warned: bool) -> None:
    said = unused_allocation(from_environment({}, device="cpu"), environ)
    assert bool(said) is warned
    assert not warned or "HINT: srun python train.py, or sbatch --nodes=" in said
    assert not unused_allocation(from_environment(TORCHRUN, device="cpu"), environ)


@pytest.mark.parametrize(
    ("tasks", "nodes", "warned"), [("4", "2", True), ("2", "2", False), ("1", "1", False)]
)
def test_more_torchruns_in_a_slurm_step_than_nodes_are_a_warning(
    tasks: str, nodes: str, warned: bool
) -> None:
    """`srun torchrun --node_rank=0` with several tasks a node."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_NUM_NODES": nodes}
    environ = {**TORCHRUN, **step, "GROUP_WORLD_SIZE": nodes}
    said = unused_allocation(from_environment(environ, device="cpu"), environ)
    assert bool(said) is warned
    assert not warned or "HINT: sbatch --nodes=2 slurm/fsdp.sbatch" in said


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, "torchrun"),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, "srun"),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ""),
        ({"SLURM_STEP_NUM_TASKS": "4"}, ""),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, "mpirun"),
        ({"PMI_SIZE": "4", "PMI_RANK": "1"}, "mpirun"),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, ""),
        ({"RANK": "1", "WORLD_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "2"}, "torchrun"),
        # `srun --mpi=pmi2`, and ranks of mpirun whose daemons srun has started
        ({"PMI_SIZE": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, "srun"),
        ({"PMI_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "mpirun"),
        ({}, ""),
    ],
)
def test_which_launcher_started_several_ranks(environ: dict[str, str], launcher: str) -> None:
    """A batch shell has one task, and is no rank."""
    assert started_by(environ) == launcher


MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def test_processes_of_mpirun_are_refused_where_each_would_train_alone() -> None:
    with pytest.raises(
        LaunchError,
        match=r"mpirun started 2 processes, .* HINT: torchrun --nproc_per_node=2 train\.py; or export RANK, ",
    ):
        from_environment(MPIRUN, device="cpu")
    exported = {**MPIRUN, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert str(from_environment(exported, "cpu")) == "rank 1(2) local 1(2) node 0(1) cpu via torchrun"


def test_a_launcher_that_numbers_ranks_alone_gives_each_node_its_number() -> None:
    """As Kubeflow's PyTorchJob, which sets RANK and WORLD_SIZE in each pod, and no GROUP_RANK."""
    pod = from_environment({"RANK": "2", "WORLD_SIZE": "4"}, device="cpu")
    assert str(pod) == "rank 2(4) local 0(1) node 2(4) cpu via torchrun"
    eight = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert str(from_environment(eight, "cpu")) == "rank 5(8) local 1(4) node 1(2) cpu via torchrun"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4, and WORLD_SIZE is 4: ranks count from 0"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
            "LOCAL_WORLD_SIZE is 1: .* HINT: export LOCAL_RANK",
        ),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}, "SLURM_PROCID is 5, and "),
    ],
)
def test_a_rank_outside_its_number_is_refused(environ: dict[str, str], said: str) -> None:
    """The others would wait for the ranks below it."""
    with pytest.raises(LaunchError, match=said):
        from_environment(environ, device="cpu")
