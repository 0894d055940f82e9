"""Submit a run to Slurm from Python, through submitit.

    python -m launch.submit --nodes 4 --gpus-per-node 8 --time 4:00:00 -- --config recipes/digits.toml
    python -m launch.submit --nodes 2 --dependency=afterok:1234 --reservation=mine -- --train.steps 50
    python -m launch.submit --nodes 2 --dry-run -- --config recipes/digits.toml

    sbatch "$(python -m launch.submit --snapshot)/slurm/fsdp.sbatch" --config recipes/digits.toml

The flags of train.py follow `--`; any other option of sbatch passes through, by its long name: --partition,
--account, --qos, --cpus-per-task, --mem, --constraint, --exclude … --dry-run prints the sbatch file and
submits nothing. The code is copied into the run directory, so that a job that waits in the queue runs the
code that was submitted; --snapshot only makes such a copy, and prints its folder. From Python, `submit`
returns a job whose `result()` waits for the run's outcome, or raises its error. The task of the job is in
launch/slurm_job.py, its requeue in slurm/lib.sh.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp import config as configuration
from fsdp.base.errors import CheckpointError, ConfigError, LaunchError, ShardrunError, TrainingError
from fsdp.config import Config
from fsdp.config.command_line import CommandParser, prints_errors, whole_number
from fsdp.rundir import history
from fsdp.rundir.history import RunDir, writing
from launch.guard import refuse_ray
from launch.slurm_job import SubmittedRun, outcome_file

if TYPE_CHECKING:  # --help works without it
    import submitit

HOME = Path(__file__).resolve().parent.parent
_SETS = "--tasks-per-node 8 sets the ranks; arrays: sbatch --array=0-3 slurm/fsdp.sbatch"
REPLACED = dict.fromkeys(("ntasks", "ntasks-per-node", "output", "error", "array"), _SETS)
"""Options of sbatch that launch.submit sets itself, or cannot have, with the HINT."""
REPLACED |= dict.fromkeys(("cluster", "clusters"), "python -m launch.local, on this machine alone")
GPUS = ("gres", "gpus", "gpus-per-task", "gpus-per-socket")
"""Requests for GPUs that do not determine the number of ranks."""


def gpus(text: str) -> str:
    """A type for add_argument: `8`, or `a100:8`."""
    if not re.fullmatch(r"([\w.-]+:)?\d+|", text):
        raise argparse.ArgumentTypeError(f"{text} is not a number of GPUs, or TYPE:NUMBER")
    return text


def _parser() -> CommandParser:
    parser = CommandParser("launch.submit", __doc__)
    for name, kind, default, text in (
        ("--nodes", whole_number(1), 1, "number of nodes"),
        ("--gpus-per-node", gpus, "", "GPUs per node, as 8, or as TYPE:8 where nodes have several types"),
        ("--tasks-per-node", whole_number(), 0, "ranks per node; 0 means one per GPU, or one"),
        ("--time", str, "1:00:00", "Slurm's time limit; the job is requeued until the run is done"),
        ("--name", str, "shardrun", "job name"),
        ("--signal-s", whole_number(1), 120, "seconds before the limit to stop; more than a step and a save"),
    ):
        shown = f"{text} (default: {default or 'left to the cluster'})"
        parser.add_argument(name, type=kind, default=default, metavar="VALUE", help=shown)
    parser.add_argument("--dry-run", action="store_true", help="print the sbatch file and submit nothing")
    parser.add_argument("--snapshot", action="store_true", help="copy the code to runs/code and print where")
    return parser


def read_options(words: Sequence[str], tasks_per_node: int = 0) -> dict[str, str | bool]:
    """Other options of sbatch, by name without dashes; True for one without a value. Slurm checks them."""
    options: dict[str, str | bool] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name == "config" or "." in name:
            raise ConfigError(f"{word} is no option of sbatch.", f"train.py's flags follow `--`: -- {word} …")
        if name in REPLACED:
            raise ConfigError(f"--{name} is not for launch.submit.", REPLACED[name])
        if not equals and rest and not rest[0].startswith("-"):
            equals, value = "=", rest.pop(0)
        # one rank would train on the first of several GPUs
        if name in GPUS and "gpu" in f"{name}={value}" and not tasks_per_node:
            raise ConfigError(f"--{name}={value} names no number of ranks a node.", "--tasks-per-node 8")
        options[name] = value if equals else True
    return options


def snapshot(run: Path) -> Path:
    """Copy the code to a new folder of the run: later edits do not change the job, nor does another
    submission of the same run.
    """
    code = run / "code" / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    with writing(code):
        code.mkdir(parents=True)
        shutil.copy2(HOME / "train.py", code)
        for folder in ("fsdp", "launch", "slurm", "recipes"):
            if (HOME / folder).is_dir():
                skipped = shutil.ignore_patterns("__pycache__", ".*")
                shutil.copytree(HOME / folder, code / folder, ignore=skipped)
        if (HOME / ".venv").exists():
            (code / ".venv").symlink_to(HOME / ".venv")
    return code


def executor(
    options: argparse.Namespace, sbatch: Mapping[str, str | bool], run: Path, code: Path, device: str
) -> submitit.SlurmExecutor:
    """submitit's executor, with lines of slurm/lib.sh before and after its srun."""
    import submitit

    # in the sbatch file after srun's options, where bash has the variables of cluster.env
    node = f'"${{SRUN_ARGS[@]}}" bash {shlex.quote(str(code / "slurm" / "node.sh"))}'
    python = f"{node} rank {shlex.quote(sys.executable)}"
    # submitit's limit on interruptions is lifted: launch/policy.py limits restarts by progress
    made = submitit.SlurmExecutor(folder=run / "logs", max_num_timeout=1_000_000, python=python)
    tasks = options.tasks_per_node or int(options.gpus_per_node.rpartition(":")[2] or 1)
    requested = {"gpus-per-node": options.gpus_per_node, "requeue": "no-requeue" not in sbatch}
    made.update_parameters(
        job_name=options.name,
        nodes=options.nodes,
        ntasks_per_node=tasks,
        stderr_to_stdout=True,
        signal_delay_s=options.signal_s,
        additional_parameters={"time": options.time, **{n: v for n, v in requested.items() if v}, **sbatch},
        setup=[
            "set -euo pipefail",
            f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
            f"source {shlex.quote(str(code))}/slurm/lib.sh",
            f"job_begin --run.dir {shlex.quote(str(run))} --run.device {device}",
            f"SHARDRUN_RANKS_PER_NODE={tasks}",
            "meet_or_leave",
            "set +e",
            # submitit's srun, whose words name SRUN_ARGS, in the background: signals come through
            f"srun() {{ local rc SRUN_ARGS=(); on_nodes {tasks} --cpu-bind=none --kill-on-bad-exit=1; "
            'command "${by_srun[@]}" "$@" & wait_through_signals $!; return "$rc"; }',
        ],
        teardown=["rc=$?", "set -e", "judge_and_act --no-again"],
    )
    return made


# ---------------------------------------------------------------- the submitted job


POLL_S = 10.0
ERRORS: dict[int, type[ShardrunError]] = {
    kind.exit_code: kind for kind in (ConfigError, LaunchError, CheckpointError, TrainingError)
}


@dataclass(frozen=True)
class SubmittedJob:
    """A job in Slurm's queue, through all its requeues."""

    id: str
    run: Path
    log: Path

    def state(self) -> str:
        """Slurm's state of it; empty once it has ended."""
        command = ["squeue", "--noheader", f"--jobs={self.id}", "--format=%T"]
        asked = subprocess.run(command, capture_output=True, text=True)
        if asked.returncode and "Invalid job id" not in asked.stderr:
            return "UNKNOWN"  # a controller that does not answer
        return asked.stdout.strip()

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the end, and return `shardrun.record_of` the outcome. Raises the error that ended the run,
        with its exit code, LaunchError for a job that ended in another way, TimeoutError.
        """
        until = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        while state := self.state():
            if time.monotonic() > until:
                raise TimeoutError(f"job {self.id} is {state} after {timeout_s:.0f} s")
            time.sleep(min(POLL_S, max(0.1, until - time.monotonic())))
        with contextlib.suppress(OSError, ValueError, KeyError):
            failed = json.loads(RunDir(self.run).failed.read_text())
            if str(failed["start"]).startswith(f"{self.id}-"):
                error = ERRORS.get(failed["code"], ShardrunError)(failed["message"])
                error.exit_code = failed["code"]
                raise error
        with contextlib.suppress(OSError):
            outcome: dict[str, Any] = json.loads(outcome_file(self.run, self.id).read_text())
            return outcome
        raise LaunchError(f"job {self.id} ended without a result.", f"its log is {self.log}")


def submit(
    flags: Config | Sequence[str],
    *,
    nodes: int = 1,
    gpus_per_node: int | str = "",
    tasks_per_node: int = 0,
    time: str = "1:00:00",
    name: str = "shardrun",
    signal_s: int = 120,
    **sbatch: str | bool,
) -> SubmittedJob:
    """Submit a run with these flags of train.py. Other options of sbatch are keywords, such as partition or
    cpus_per_task; True for one without a value.
    """
    words = [
        *("--nodes", str(nodes), "--gpus-per-node", str(gpus_per_node), "--time", time, "--name", name),
        *("--tasks-per-node", str(tasks_per_node), "--signal-s", str(signal_s)),
        *(
            f"--{option.replace('_', '-')}{'' if value is True else f'={value}'}"
            for option, value in sbatch.items()
        ),
    ]
    options, others = _parser().parse_known_intermixed_args(words)
    config = flags if isinstance(flags, Config) else configuration.load(flags)
    return _submit(options, read_options(others, tasks_per_node), _checked(config))


def _checked(config: Config) -> Config:
    """The configuration with its run directory."""
    refuse_ray(config, "launch.submit")
    if importlib.util.find_spec("submitit") is None:
        raise LaunchError("launch.submit needs submitit, which is not installed.", "pip install submitit")
    if shutil.which("sbatch") is None:
        raise LaunchError("there is no sbatch here.", "python -m launch.local runs it on this machine")
    return configuration.replace(config, run__dir=str(history.choose(config).path.absolute()))


def _submit(options: argparse.Namespace, sbatch: Mapping[str, str | bool], config: Config) -> SubmittedJob:
    from submitit.core.utils import FailedJobError

    run = Path(config.run.dir)
    code = snapshot(run)
    try:
        job = executor(options, sbatch, run, code, config.run.device).submit(SubmittedRun(config))
    except FailedJobError as error:
        reason = f"nothing was submitted: {' '.join(str(error).split())}."
        raise LaunchError(reason, "docs/slurm.md lists the usual errors") from None
    return SubmittedJob(job.job_id, run, job.paths.stdout)


@prints_errors("launch.submit")
def main(argv: Sequence[str]) -> int:
    end = list(argv).index("--") if "--" in argv else len(argv)
    options, others = _parser().parse_known_intermixed_args(list(argv[:end]))
    if options.snapshot:
        print(snapshot(Path("runs").absolute()))
        return 0
    sbatch = read_options(others, options.tasks_per_node)
    config = _checked(configuration.load(argv[end + 1 :]))
    if options.dry_run:
        run = Path(config.run.dir)
        made = executor(options, sbatch, run, run / "code", config.run.device)
        print(made._make_submission_file_text(made._submitit_command_str, "dry-run"))
        return 0
    job = _submit(options, sbatch, config)
    # SIGTERM is a stop request: scancel leaves a checkpoint
    print(f"job     {job.id}\nrun     {job.run}\nlog     {job.log}\ncancel  scancel {job.id}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
