"""The task of a job submitted with submitit: one rank. Imported from the snapshot in the run directory.

Stopping replaces submitit's own: its signal handlers are replaced while the ranks train (fsdp/dist/stop.py
records the signal, all ranks save once), and its requeue is called from here after they have stopped, outside
any handler. Under Slurm the last lines of the batch script requeue (slurm/lib.sh), with the same limits as
every other job script.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
from dataclasses import dataclass

import submitit
from submitit.helpers import DelayedSubmission

from fsdp.base.text import flush_output
from fsdp.config import Config
from fsdp.dist import env as environment
from fsdp.dist.env import DistEnv
from launch import rendezvous
from launch.guard import run_rank
from launch.policy import Kind, kind_of_stop


@dataclass(frozen=True)
class SubmittedRun:
    """Pickled by submitit with the resolved configuration: editing a recipe while the job waits has no
    effect.
    """

    config: Config

    def __call__(self) -> str | None:
        """The reason of a stop that a person requested. It never returns from a stop by the scheduler."""
        job = submitit.JobEnvironment()
        if job.cluster == "slurm":
            # until the ranks install theirs: submitit's handler would requeue inside the handler
            signal.signal(submitit.JobEnvironment._usr_sig(), signal.SIG_IGN)
        code, outcome = run_rank(self.config, rank_environment(job, self.config.run.device))
        if outcome is None:
            sys.exit(code)  # an exception here would be printed a second time, with submitit's frames
        if outcome.stopped and kind_of_stop(outcome.stopped) is Kind.PREEMPTED:
            exit_without_result(job)
        return outcome.stopped

    def checkpoint(self) -> DelayedSubmission:
        """Called by submitit's requeue: the same task again. The state is in the run directory."""
        return DelayedSubmission(self)


def rank_environment(job: submitit.JobEnvironment, device: environment.DeviceChoice) -> DistEnv:
    """The DistEnv from Slurm's variables, or from submitit's if it started the tasks itself."""
    if job.cluster == "slurm":
        env = environment.from_environment(device=device)
    elif job.num_tasks > 1:
        env = DistEnv(
            rank=job.global_rank,
            world_size=job.num_tasks,
            local_rank=job.local_rank,
            local_world_size=job.num_tasks,
            node_rank=0,
            num_nodes=1,
            device=environment.pick_device(job.local_rank, device, "submitit"),
            launcher="submitit",
        )
    else:
        env = environment.from_environment({}, device)
    if env.world_size > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        environment.set_variable("GLOO_SOCKET_IFNAME", rendezvous.here(os.environ["MASTER_ADDR"])[1])
    return dataclasses.replace(env, launcher=f"submitit ({job.cluster})")


def exit_without_result(job: submitit.JobEnvironment) -> None:
    """End without a result, which submitit would take as the job's end. All ranks have saved by now."""
    logging.shutdown()
    flush_output()
    requeue = signal.getsignal(submitit.JobEnvironment._usr_sig())
    if job.cluster == "local" and job.global_rank == 0 and callable(requeue):
        # pickles the job again and exits with submitit's code for a requeue
        requeue(submitit.JobEnvironment._usr_sig(), None)
    os._exit(0)
