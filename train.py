"""One FSDP2 training run, the same under every launcher:

    torchrun --nproc_per_node=2 train.py
    sbatch slurm/fsdp.sbatch
    python train.py --backend ray

`python train.py` alone is one process on the same code path. --config FILE.toml gives a recipe, flags go over it; --dry-run
prints what follows from them and stops. A run that is stopped goes on from the same command with --run.dir RUN.
"""

from __future__ import annotations

import sys
import traceback

from fsdp import collector
from fsdp import config as configuration
from fsdp.config import Config
from fsdp.console import flush_output
from fsdp.env import speaks_for_all
from fsdp.errors import ShardrunError
from fsdp.watch.farewell import Farewell


def main(argv: list[str]) -> int:
    flags = [word for word in argv if word not in ("--help", "-h", "--dry-run")]
    if len(flags) < len(argv) and "--dry-run" not in argv:
        print(configuration.help_text(__doc__ or ""))
        return 0
    try:
        config = configuration.load(flags)
        if "--dry-run" in argv:
            return dry_run(config)
        if config.backend == "ray":
            return under_ray(config)
        return run_here(config)
    except ShardrunError as error:
        return _refuse(error)


def under_ray(config: Config) -> int:
    """This process is the driver. Its own Ray comes up while it imports torch."""
    from launch.ray_own import own_ray

    with own_ray(config.ray) as own:
        try:
            from launch.ray_trainer import run_on_ray

            return run_on_ray(config, own)
        except ShardrunError as error:
            return _refuse(error)  # said before Ray is taken down again, which takes a while


def run_here(config: Config) -> int:
    """This process is one rank, or the only one."""
    with collector.importing():
        from fsdp.agree import Elsewhere, lost_a_neighbour
        from fsdp.console import print_last
        from fsdp.env import from_environment
        from fsdp.loop import train
        from fsdp.stop import Stopper
        from fsdp.summary import summary
        from fsdp.watch.rank import told

    env = from_environment(device=config.run.device)
    Stopper.process_ends = True
    try:
        outcome = train(config, env)
    except Elsewhere as error:
        return error.exit_code
    except ShardrunError as error:
        if told(error):
            return error.exit_code
        if env.is_main or error.scope == "rank" or (error.scope == "node" and env.local_rank == 0):
            print(f"train.py{'' if env.is_main else f' (rank {env.rank})'}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if told(error):
            return 1
        if lost_a_neighbour(error):
            print(f"[rank {env.rank}] ended because another rank did: {str(error).splitlines()[0][:160]}", file=sys.stderr)
            return 1
        print(f"[rank {env.rank}] failed on {env.device}:\n{traceback.format_exc()}", file=sys.stderr)
        return 1
    if env.is_main:
        print_last(summary(outcome, config))
    return 0


def dry_run(config: Config) -> int:
    from fsdp.env import from_environment
    from fsdp.job import dry_run as facts

    env = from_environment(device=config.run.device)
    text = facts(config, env)
    if env.is_main:
        print(text)
    return 0


def _refuse(error: ShardrunError) -> int:
    """Flags are the same on all ranks: said once. Without torch, which a wrong flag need not wait for."""
    if speaks_for_all() or error.scope != "all":
        print(f"train.py: {error}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    FAREWELL = Farewell()
    code = FAREWELL.leave(main(sys.argv[1:]))
    flush_output()
    sys.exit(code)
