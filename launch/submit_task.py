"""What submitit runs in each task of a job: one rank. Imported from the snapshot in the run directory, not
from the workplace.

submitit's way of stopping is joined with ours: its handlers are replaced while the ranks train
(fsdp/dist/stop.py only marks, all ranks save, once), and when they have stopped, its own requeue is called
from here, in the open, where a handler is not. Under Slurm the batch script's last lines requeue
(slurm/lib.sh), with the same bounds as every other job script's.
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

from fsdp.config import Config
from fsdp.dist import env as environment
from fsdp.dist.env import DistEnv
from fsdp.record.console import flush_output
from launch import rendezvous
from launch.guard import run_rank
from launch.policy import Kind, kind_of_stop


@dataclass(frozen=True)
class SubmittedRun:
    """Pickled by submitit with the resolved configuration: a recipe edited while the job waits changes
    nothing.
    """

    config: Config

    def __call__(self) -> str | None:
        """Why the run stopped, if it was asked to by a person; a run that the scheduler stopped never
        returns.
        """
        job = submitit.JobEnvironment()
        if job.cluster == "slurm":
            # until the ranks listen themselves: submitit's handler would requeue from within itself
            signal.signal(submitit.JobEnvironment._usr_sig(), signal.SIG_IGN)
        code, outcome = run_rank(self.config, rank_environment(job, self.config.run.device))
        if outcome is None:
            sys.exit(code)  # an exception here would be printed a second time, with submitit's frames
        if outcome.stopped and kind_of_stop(outcome.stopped) is Kind.PREEMPTED:
            leave_for_later(job)
        return outcome.stopped

    def checkpoint(self) -> DelayedSubmission:
        """Asked for when submitit requeues: the same again. The state is in the run directory."""
        return DelayedSubmission(self)


def rank_environment(job: submitit.JobEnvironment, device: environment.DeviceChoice) -> DistEnv:
    """Slurm's own variables in a Slurm job; submitit's where it started the tasks itself."""
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
            device=environment.pick_device(job.local_rank, device),
            launcher="submitit",
        )
    else:
        env = environment.from_environment({}, device)
    if env.world_size > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        environment.set_variable("GLOO_SOCKET_IFNAME", rendezvous.here(os.environ["MASTER_ADDR"])[1])
    return dataclasses.replace(env, launcher=f"submitit ({job.cluster})")


def leave_for_later(job: submitit.JobEnvironment) -> None:
    """End without a result, or submitit would call the job done. Every rank has saved and met the others by
    now.
    """
    logging.shutdown()
    flush_output()
    requeue = signal.getsignal(submitit.JobEnvironment._usr_sig())
    if job.cluster == "local" and job.global_rank == 0 and callable(requeue):
        # pickles the job again and exits with submitit's code for it
        requeue(submitit.JobEnvironment._usr_sig(), None)
    os._exit(0)
