"""What Slurm's own variables make of a process: `srun python train.py`, one task a rank."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from fsdp.base.errors import LaunchError
from fsdp.distributed import env
from tests.slurm.cluster import Cluster

TASK: Mapping[str, str] = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x3)",
    "SLURM_STEP_NODELIST": "gpu[07-09],login",
}


def test_a_task_is_a_rank_also_where_nodes_differ() -> None:
    made = env.from_environment(TASK)
    assert (made.rank, made.world_size, made.local_rank, made.local_world_size) == (3, 5, 0, 1)
    assert (made.node_rank, made.num_nodes, made.launcher) == (2, 4, "srun")


def test_torchrun_inside_a_slurm_step_comes_first() -> None:
    made = env.from_environment(
        {**TASK, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    )
    assert (made.rank, made.world_size, made.launcher) == (1, 2, "torchrun under Slurm")


@pytest.mark.parametrize(
    "missing", ["SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"]
)
def test_a_task_in_a_container_without_one_of_slurm_s_variables_is_refused(missing: str) -> None:
    """`docker run -e SLURM_PROCID …`: such a task trained alone, or ended in an IndexError."""
    with pytest.raises(LaunchError, match=f"{missing} is .*HINT: "):
        env.from_environment({name: value for name, value in TASK.items() if name != missing}, device="cpu")


def test_the_meeting_place_of_a_bare_srun_is_new_at_each_requeue_and_step() -> None:
    first = env.slurm_rendezvous(TASK)
    assert first[0] == "gpu07"
    others = [
        {**TASK, "SLURM_RESTART_COUNT": "1"},
        {**TASK, "SLURM_STEP_ID": "3"},
        {**TASK, "SLURM_JOB_ID": "4712"},
    ]
    ports = {first[1], *(env.slurm_rendezvous(other)[1] for other in others)}
    assert len(ports) == 4
    assert all(20000 <= port < 32000 for port in ports)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs to be seen")
def test_gpus_that_slurm_gave_and_torch_does_not_see_are_an_error() -> None:
    with pytest.raises(LaunchError, match=r"Slurm gave 2 GPUs on \S+, but torch 2\.\S+ sees none"):
        env.from_environment({**TASK, "SLURM_GPUS_ON_NODE": "2"})
    with pytest.raises(
        LaunchError, match=r"sees none, with CUDA_VISIBLE_DEVICES=''\. HINT: .*run\.device cpu"
    ):
        env.from_environment({**TASK, "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(
    ("text", "end"),
    [("4102444800", 4102444780.0), ("1795000000", None), ("", None), ("0", None), ("Unknown", None)],
)
def test_the_end_of_the_job(text: str, end: float | None) -> None:
    """A shell that outlived its allocation has an end long ago, at which each run would stop at once."""
    assert env.end_time({"SLURM_JOB_END_TIME": text}) == end
    assert env.end_time({"SLURM_JOB_END_TIME": text, "SHARDRUN_BEGIN_S": "9"}) == (end and end - 7)


@pytest.mark.slurm
def test_the_first_host_of_a_list_is_scontrols(slurm: Cluster) -> None:
    for hosts in ("n1", "n[1-3]", "gpu[01-03,07],login", "rack[1-2]node[08-10]", "a,b[9-11],c7"):
        first = slurm.run("scontrol", "show", "hostnames", hosts).stdout.split()[0]
        assert env.slurm_rendezvous({**TASK, "SLURM_STEP_NODELIST": hosts})[0] == first
