"""Submit a run to Slurm from Python, through submitit.

    python -m launch.submit --nodes 4 --gpus-per-node 8 --time 4:00:00 -- --config recipes/digits.toml
    python -m launch.submit --nodes 2 --dependency=afterok:1234 --reservation=mine -- --train.steps 50
    python -m launch.submit --nodes 2 --dry-run -- --config recipes/digits.toml

The flags of train.py follow `--`; any other option of sbatch passes through, by its long name: --partition,
--account, --qos, --cpus-per-task, --mem, --constraint, --exclude … --dry-run prints the sbatch file and
submits nothing. The code is copied into the run directory, so that a job that waits in the queue runs the
code that was submitted. The task of the job is in launch/slurm_job.py, its requeue in slurm/lib.sh.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp import config as configuration
from fsdp.base.errors import ConfigError, LaunchError
from fsdp.config.command_line import CommandParser, prints_errors, whole_number
from fsdp.rundir import history
from fsdp.rundir.history import writing
from launch.guard import refuse_ray
from launch.slurm_job import SubmittedRun

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
        for folder in ("fsdp", "launch", "slurm"):
            shutil.copytree(HOME / folder, code / folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return code


def executor(
    options: argparse.Namespace, sbatch: Mapping[str, str | bool], run: Path, code: Path, device: str
) -> submitit.SlurmExecutor:
    """submitit's executor, with lines of slurm/lib.sh before and after its srun."""
    import submitit

    # in the sbatch file after srun's options, where bash has the variables of cluster.env
    node = f'"${{SRUN_ARGS[@]}}" "${{CONTAINER[@]}}" bash {shlex.quote(str(code / "slurm" / "node.sh"))}'
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
            "meet_or_leave 0",
            "set +e",
            'srun() { submitit_srun "$@"; }',
        ],
        teardown=["rc=$?", "set -e", "judge_and_act --no-again"],
    )
    return made


@prints_errors("launch.submit")
def main(argv: Sequence[str]) -> int:
    end = list(argv).index("--") if "--" in argv else len(argv)
    options, others = _parser().parse_known_intermixed_args(list(argv[:end]))
    sbatch = read_options(others, options.tasks_per_node)
    config = configuration.load(argv[end + 1 :])
    refuse_ray(config, "launch.submit")
    if importlib.util.find_spec("submitit") is None:
        raise LaunchError("launch.submit needs submitit, which is not installed.", "pip install submitit")
    if shutil.which("sbatch") is None:
        raise LaunchError("there is no sbatch here.", "python -m launch.local runs it on this machine")
    run = history.choose(config).path
    config = configuration.replace(config, run__dir=str(run))
    if options.dry_run:
        made = executor(options, sbatch, run, run / "code", config.run.device)
        print(made._make_submission_file_text(made._submitit_command_str, "dry-run"))
        return 0
    from submitit.core.utils import FailedJobError

    code = snapshot(run)
    try:
        job = executor(options, sbatch, run, code, config.run.device).submit(SubmittedRun(config))
    except FailedJobError as error:
        reason = f"nothing was submitted: {' '.join(str(error).split())}."
        raise LaunchError(reason, "docs/slurm.md lists the usual errors") from None
    # SIGTERM is a stop request: scancel leaves a checkpoint
    print(f"job     {job.job_id}\nrun     {run}\nlog     {job.paths.stdout}\ncancel  scancel {job.job_id}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
