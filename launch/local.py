"""All ranks of one machine without torchrun, restarted within a second or two when one of them dies.

    python -m launch.local --ranks 4 --config recipes/text.toml
    python -m launch.local --ranks 4 --restarts 10 --run.dir runs/mine

All other flags are train.py's. This process imports torch, checks the flags and opens the data once,
then forks each rank: a start costs one import for all ranks, a restart costs none. When a rank dies, the
others are ended and all are forked again; they resume from the newest checkpoint. launch/policy.py decides
which failures are restarted. Not here: several nodes (slurm/, torchrun).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType

from fsdp import config as configuration
from fsdp.base import proc
from fsdp.base.errors import LaunchError, ShardrunError
from fsdp.base.phases import delayed, follow_parent, stop_signals
from fsdp.base.text import flush_output, print_answer
from fsdp.config import Config
from fsdp.config.command_line import RUN_FLAGS, CommandParser, whole_number
from fsdp.distributed.env import DistEnv, fewer_ranks, job_start, pick_device, set_allocator
from fsdp.rundir import history
from launch import guard, slurm_job
from launch.guard import EXIT_INTERRUPTED, Marker
from launch.policy import Act, Allocation, End, Kind, Past, decide

GRACE_S = 0.5
"""After a rank's death most others end by themselves, on a broken connection; one that waits for a device is
killed after this time.
"""
HAVE_GPUS = 90
"""The exit code of a fork that sees GPUs; no error has it."""


def main(argv: Sequence[str]) -> int:
    try:
        parser = CommandParser("launch.local", __doc__, epilog=RUN_FLAGS)
        parser.add_argument("--ranks", type=whole_number(1), default=1, help="ranks to start (default: 1)")
        told = "restarts after a failure (default: 3)"
        parser.add_argument("--restarts", type=whole_number(), default=3, help=told)
        parser.add_argument("--dry-run", action="store_true", help="print what follows from the flags")
        options, flags = parser.parse_with_run_flags(argv or ["--help"])
        config = configuration.load(flags)
        guard.refuse_ray(config, "launch.local")
        if options.dry_run:
            from fsdp.run.summary import dry_run

            return print_answer(dry_run(config, _rank_env(config, 0, options.ranks)), "launch.local")
        run = history.choose(config)
        config = configuration.replace(config, run__dir=str(run.path))
        # Frozen before the forks: a garbage collection in a fork would copy every shared page.
        with proc.paused_for_imports():
            os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # for imports that ask for GPUs
            import torch  # noqa: F401  before the fork that asks for devices

            code = _ended(_forked(lambda: _device_code(config, options.ranks)))
            if code not in (0, HAVE_GPUS):
                return code
            warm_up(config, options.ranks, gpus=code == HAVE_GPUS)
        with slurm_job.holding(run, job_start()):
            pass  # a refusal here leaves nothing behind; rank 0 takes the lock itself
        ranks = _RankProcesses(config, options.ranks)
    except ShardrunError as error:
        return guard.refuse(error, "launch.local")
    except KeyboardInterrupt:
        return guard.interrupted("launch.local")
    try:
        return ranks.run(options.restarts)
    except OSError as error:  # of the run directory's records
        return guard.refuse(slurm_job.as_error(run, error), "launch.local")


def _forked(act: Callable[[], int]) -> int:
    """The pid of a fork that ends with this exit code, and never returns into this stack.

    Since 3.12 Python warns of threads at a fork: OpenBLAS, which numpy loads, ends its own before. A Ctrl-C
    meanwhile is delivered afterwards: Python ignores errors of what modules have it call at a fork.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            pid = os.fork()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid:
        return pid
    code = 1
    try:
        code = act()
    except ShardrunError as error:
        code = guard.refuse(error, "launch.local")
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED  # the launcher prints the line
    except BaseException:
        traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)


def _ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _device_code(config: Config, ranks: int) -> int:
    """HAVE_GPUS or 0; LaunchError if there are fewer GPUs than ranks. Asked in a fork: for a slice of a GPU
    (MIG), or without NVML, torch asks CUDA itself, after which no fork can use it.
    """
    import torch

    if config.run.device == "cpu" or pick_device(0, config.run.device, "launch.local").type == "cpu":
        return 0
    visible = torch.cuda.device_count()
    if visible < ranks:
        raise LaunchError(
            f"{ranks} ranks need a GPU each, and {visible} {'is' if visible == 1 else 'are'} visible "
            f"on {socket.gethostname()}.",
            fewer_ranks("launch.local", visible),
        )
    return HAVE_GPUS


def _check_cuda_not_started(ranks: int) -> None:
    """LaunchError if the imports have started CUDA here: the ranks could not use it, or train on the CPU."""
    import torch

    if torch.cuda.is_initialized() or not _ended(_forked(lambda: int(torch.cuda.is_available()))):
        raise LaunchError(
            "CUDA was started by an import (--model.name, --data.name), and the ranks of launch.local are "
            "forks, which cannot use it then.",
            f"torchrun --nproc_per_node={ranks} train.py, with the same flags",
        )


def warm_up(config: Config, ranks: int, *, gpus: bool) -> None:
    """Do once what every rank would do: imports, and checks of the flags, the data and the number of ranks.

    It must leave no thread behind and not initialise CUDA: neither survives a fork.
    """
    import torch

    from fsdp.run import loop  # noqa: F401
    from fsdp.run.job import meta_model, prepare

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    job = prepare(config, world_size=ranks, num_nodes=1, device=None if gpus else torch.device("cpu"))
    meta_model(job.spec)
    torch.set_num_threads(threads)
    if gpus:
        _check_cuda_not_started(ranks)


class _RankProcesses:
    """Forks the ranks, and forks them again after a failure."""

    def __init__(self, config: Config, ranks: int) -> None:
        self._config, self._ranks = config, ranks
        self._run = history.open_run(config.run.dir)
        self._pids = set[int]()
        self._received: signal.Signals | None = None

    def run(self, restarts: int) -> int:
        """The exit code of the last try."""
        crashes: list[End] = []
        for number in stop_signals():
            signal.signal(number, self._forward)
        while True:
            marker = Marker(self._run, f"launch.local {os.getpid()} try {len(crashes)}")
            starts = history.count_starts(self._run)
            code = self._one_try(marker)
            if code == 0 or self._received is not None:
                return code if code >= 0 else 128 - code
            end = slurm_job.end_of(
                self._run, marker, code, starting=history.count_starts(self._run) == starts
            )
            left = restarts - len(crashes)
            decision = decide(end, Past(crashes=crashes), Allocation(tries_left=left))
            named = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            how = f"a rank ended with {named} {end.where}"
            if decision.act is Act.END:
                if end.kind in (Kind.PROGRAM, Kind.ERROR, Kind.DIED):  # the ranks print the other kinds
                    print(f"launch.local: {how}: {decision.why}: no restart", file=sys.stderr)
                if history.count_starts(self._run) > starts:
                    self._print_last_lines()
                return decision.code
            crashes.append(end)
            print(f"launch.local: {how}: restarting all ranks", file=sys.stderr)

    def _print_last_lines(self) -> None:
        from fsdp.run.summary import last_lines

        command = f"python -m launch.local --ranks {self._ranks}"
        print(last_lines(self._run.path, self._config, command), file=sys.stderr)

    def _one_try(self, marker: Marker) -> int:
        """0 if all ranks succeeded, else the exit code of the first that failed, or of a signal that came
        before they were forked.
        """
        # a container may have no other folder that can be written
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="shardrun-local-", dir=shm) as folder:
            # a signal comes before the check, or is forwarded to all ranks
            with delayed(stop_signals()):
                if self._received is not None:
                    print(f"launch.local: {self._received.name} before the ranks started", file=sys.stderr)
                    return 128 + self._received
                for rank in range(self._ranks):
                    self._pids.add(_forked(partial(self._as_rank, rank, f"{folder}/store", marker)))
            return self._wait()

    def _as_rank(self, rank: int, store: str, marker: Marker) -> int:
        for number in stop_signals():
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())
        follow_parent()
        return _train(self._config, _rank_env(self._config, rank, self._ranks), store, marker)

    def _wait(self) -> int:
        first, deadline = 0, float("inf")
        while self._pids:
            pid, status = os.waitpid(-1, os.WNOHANG if first else 0)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                # of no rank: a container's process 1 inherits orphans, and exec keeps the children of a shell
                if pid in self._pids and code and not first:
                    first, deadline = code, time.monotonic() + GRACE_S
                self._pids.discard(pid)
            elif time.monotonic() > deadline:
                self._send(signal.SIGKILL)
                deadline = float("inf")
            else:
                time.sleep(0.01)
        return first

    def _send(self, number: int) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):  # it has ended, and `_wait` has just reaped it
                os.kill(pid, number)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the ranks, which agree on a step and save."""
        self._received = signal.Signals(number)
        self._send(number)


def _rank_env(config: Config, rank: int, ranks: int) -> DistEnv:
    return DistEnv(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        node_rank=0,
        num_nodes=1,
        device=pick_device(rank, config.run.device, "launch.local"),
        launcher="launch.local",
    )


def _train(config: Config, env: DistEnv, store: str, marker: Marker) -> int:
    import torch.distributed as dist

    from fsdp.distributed.process_group import process_group

    # before the group starts CUDA; train() finds it done
    set_allocator(config.run.allocator, env.device)
    code = 0
    try:
        with process_group(env, config.run.process_group_timeout_s, dist.FileStore(store, env.world_size)):
            code = guard.run_rank(config, env, program="launch.local", marker=marker)[0]
            if code:
                sys.exit(code)  # an exception, which aborts the process group instead of destroying it
    except SystemExit:
        return code
    except Exception as error:  # of the process group: run_rank reports those of train()
        return guard.report(error, env, "launch.local", marker)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
