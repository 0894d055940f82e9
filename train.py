"""One FSDP2 training run, the same under every launcher:

    torchrun --nproc_per_node=2 train.py
    sbatch slurm/fsdp.sbatch
    python train.py --backend ray

`python train.py` alone is one process on the same code path. --config FILE.toml reads a recipe, which flags
override; --dry-run prints the resulting setup and exits. A stopped run resumes with the same command and
--run.dir RUN.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys

from fsdp import config as configuration
from fsdp.base import proc
from fsdp.base.errors import ConfigError, ShardrunError
from fsdp.base.text import as_typed, flush_output, prepare_streams, print_answer
from fsdp.config import Config, worker_range
from fsdp.distributed.env import prints_shared_errors, started_by
from fsdp.watch.status_page import ProcessExit


def main(argv: list[str]) -> int:
    prepare_streams()
    try:
        if any(word in ("-h", "--help", "--help-all") for word in argv):
            from fsdp.config.command_line import help_asked

            return print_answer(as_typed(help_asked(argv, __doc__ or "", data_args) or ""), "train.py")
        if not prints_shared_errors():
            logging.getLogger(configuration.__name__).setLevel(logging.ERROR)  # all ranks read one recipe
        config = configuration.load([word for word in argv if word != "--dry-run"])
        if "--dry-run" in argv:
            return dry_run(config)
        of_ray = [word for word in argv if word.startswith("--ray.")]
        if of_ray and config.backend != "ray":
            raise ConfigError(f"{of_ray[0]} has no effect without --backend ray.", "--backend ray")
        if config.backend == "ray":
            return under_ray(config)
        return run_here(config)
    except ShardrunError as error:
        return refused(error)
    except KeyboardInterrupt:
        from launch.guard import interrupted

        return interrupted("train.py")


def data_args(flags: list[str]) -> str:
    """What --help shows of the data set that the other flags name."""
    if any(word.startswith(("--data.", "--config")) for word in flags):
        with contextlib.suppress(ShardrunError):  # of the other flags
            from fsdp.data.check import args_help

            return args_help(configuration.load(flags).data)
    return ""


def under_ray(config: Config) -> int:
    """This process is the driver. A local Ray starts while it imports torch."""
    from fsdp.distributed.mesh import plan_batch, resolve
    from launch.ray_cluster import Stopping, own_ray, with_address

    config = with_address(config)
    maker = started_by()
    # of srun the first task may be the driver of a cluster that the tasks are, as under `ray symmetric-run`
    if maker and not (maker == "srun" and config.ray.address and prints_shared_errors()):
        hint = "--backend torchrun, or python train.py --backend ray with nothing in front"
        raise ConfigError(f"--backend ray starts the ranks, but {maker} has started them already.", hint)
    low, high = worker_range(config.ray.num_workers)
    for ranks in range(low, high + 1):  # of an elastic run
        plan_batch(config.train, resolve(config.mesh, ranks).data)
    stopping = Stopping()
    with own_ray(config.ray) as own:
        try:
            from launch.ray_trainer import run_on_ray

            return run_on_ray(config, own, stopping)
        except ShardrunError as error:
            return refused(error)  # before Ray is left


def run_here(config: Config) -> int:
    """This process is one rank, or the only one."""
    from launch.guard import already_failed, marker_of

    if (code := already_failed(marker_of(config), "train.py")) is not None:
        return code
    with proc.paused_for_imports():
        from fsdp.distributed.env import from_environment
        from fsdp.run import loop  # noqa: F401
        from launch.guard import run_rank

    return run_rank(config, from_environment(device=config.run.device))[0]


def dry_run(config: Config) -> int:
    with proc.collection_paused():
        from fsdp.distributed.env import from_environment, unused_allocation
        from fsdp.run.summary import dry_run as facts

        env = from_environment(device=config.run.device)
        if config.backend == "ray":
            env = dataclasses.replace(env, world_size=worker_range(config.ray.num_workers)[0])
        text = facts(config, env)
    if env.is_main:
        if config.backend != "ray" and (warning := unused_allocation(env)):
            print(f"train.py: {warning}", file=sys.stderr)
        return print_answer(text, "train.py")
    return 0


def refused(error: ShardrunError) -> int:
    from launch.guard import refuse

    return refuse(error, "train.py")


if __name__ == "__main__":
    FAREWELL = ProcessExit()
    code = FAREWELL.leave(main(sys.argv[1:]))
    flush_output()
    sys.exit(code)
