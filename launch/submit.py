"""Submit a run to Slurm from Python, through submitit; or run it on this machine the same way.

    python -m launch.submit --nodes 4 --gpus-per-node 8 --time 4:00:00 -- --config recipes/digits.toml
    python -m launch.submit --array recipes/a.toml recipes/b.toml --time 30 -- --train.steps 1000
    python -m launch.submit --cluster local --tasks-per-node 2 --follow -- --train.steps 50
    python -m launch.submit --nodes 2 --dependency=afterok:1234 --reservation=mine -- --train.steps 50
    python -m launch.submit --nodes 2 --dry-run -- --config recipes/digits.toml

The flags of train.py follow `--`; any other option of sbatch passes through, by its long name: --partition,
--account, --qos, --cpus-per-task, --mem, --constraint, --exclude … --dry-run prints the sbatch file and
submits nothing. The code is copied into the run directory, so that a job that waits in the queue runs the
code that was submitted. The resources are in launch/slurm_request.py, the task of the job in
launch/submit_task.py, its requeue in slurm/lib.sh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp import config as configuration
from fsdp.base.errors import ConfigError, LaunchError
from fsdp.config import Config
from fsdp.config.command_line import CommandParser, prints_errors, whole_number
from fsdp.rundir import paths
from fsdp.rundir.paths import RunDir, writing
from launch import rendezvous
from launch.guard import refuse_ray
from launch.slurm_request import Request, check, read_options

if TYPE_CHECKING:  # imported where a job is made: --help works without it
    import submitit

HOME = Path(__file__).resolve().parent.parent
LOOK_S = 0.5


@dataclass(frozen=True)
class JobArray:
    """One job or an array: a folder with the code and the logs, and a run directory for each job."""

    folder: Path
    configs: tuple[Config, ...]

    @functools.cached_property
    def code(self) -> Path:
        """The folder of the code's copy, a new one for each submission: jobs of one run that wait in the
        queue may have different code.
        """
        return self.folder / "code" / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"

    @property
    def runs(self) -> list[RunDir]:
        return [paths.open_run(config.run.dir) for config in self.configs]


def plan(flags: Sequence[str], recipes: Sequence[str] = ()) -> JobArray:
    """The jobs of these flags and recipes. Errors in them are raised here, before anything is submitted."""
    words = [["--config", recipe] for recipe in recipes] or [[]]
    configs = [configuration.load([*recipe, *flags]) for recipe in words]
    for config in configs:
        refuse_ray(config, "launch.submit")
    named = next((config.run.dir for config in configs if config.run.dir), "")
    if recipes and named:
        raise ConfigError(f"--run.dir {named} cannot be the runs of an array.", "leave --run.dir out")
    folder = paths.choose(configs[0]).path
    runs = [folder / f"{index}-{Path(recipe).stem}" for index, recipe in enumerate(recipes)] or [folder]
    placed = zip(configs, runs, strict=True)
    return JobArray(folder, tuple(configuration.replace(config, run__dir=str(run)) for config, run in placed))


def snapshot(batch: JobArray) -> Path:
    """Copy the code: later edits do not change the job, nor does another submission of the same run."""
    with writing(batch.code):
        batch.code.mkdir(parents=True)
        shutil.copy2(HOME / "train.py", batch.code)
        for folder in ("fsdp", "launch", "slurm"):
            shutil.copytree(
                HOME / folder, batch.code / folder, ignore=shutil.ignore_patterns("__pycache__", ".*")
            )
    return batch.code


def executor(request: Request, batch: JobArray) -> submitit.AutoExecutor:
    """submitit's executor, with lines of slurm/lib.sh before and after its srun."""
    import submitit

    code = batch.code
    # submitit's limit on interruptions is lifted: launch/policy.py limits restarts by progress
    words: dict[str, Any] = {f"{request.cluster}_max_num_timeout": 1_000_000}
    if request.cluster == "slurm":
        # after srun's options in the sbatch file, where bash has the variables of cluster.env
        node = f'"${{SRUN_ARGS[@]}}" "${{CONTAINER[@]}}" bash {shlex.quote(str(code / "slurm" / "node.sh"))}'
        words["slurm_python"] = f"{node} rank {shlex.quote(sys.executable)}"
    made = submitit.AutoExecutor(
        folder=batch.folder / "logs", cluster=request.cluster, **({} if request.cluster == "debug" else words)
    )
    made.update_parameters(**request.parameters())
    if request.cluster == "slurm":
        made.update_parameters(
            slurm_setup=_before(code, batch), slurm_teardown=["rc=$?", "set -e", "judge_and_act --no-again"]
        )
    return made


def _before(code: Path, batch: JobArray) -> list[str]:
    """Lines of the batch script before srun: cluster.env, the run directory of this array element, the
    rendezvous.
    """
    folders = " ".join(shlex.quote(str(run.path)) for run in batch.runs)
    devices = " ".join(config.run.device for config in batch.configs)
    return [
        "set -euo pipefail",
        f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
        f"source {shlex.quote(str(code))}/slurm/lib.sh",
        f"runs=({folders}) devices=({devices}) task=${{SLURM_ARRAY_TASK_ID:-0}}",
        'job_begin --run.dir "${runs[$task]}" --run.device "${devices[$task]}"',
        "meet_or_leave 0",
        "set +e",
        'srun() { submitit_srun "$@"; }',
    ]


@contextlib.contextmanager
def job_variables(code: Path, cluster: str) -> Iterator[None]:
    """Set what the job inherits: the snapshot first on PYTHONPATH, and locally the rendezvous; not the number
    of the array's task that submits it.
    """
    import submitit

    added = {
        "PYTHONPATH": os.pathsep.join([str(code), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONSAFEPATH": "1",
    }
    if cluster == "local":
        added |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous.free_port(os.getpid()))}
    task = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith("SLURM_ARRAY_")}
    try:
        with submitit.helpers.environment_variables(**added):
            yield
    finally:
        os.environ.update(task)


def submit(request: Request, batch: JobArray) -> list[submitit.Job[Any]]:
    """One job, or one array."""
    from submitit.core.utils import FailedJobError

    from launch.submit_task import SubmittedRun

    code = snapshot(batch)
    jobs = [SubmittedRun(config) for config in batch.configs]
    with job_variables(code, request.cluster):
        made = executor(request, batch)
        try:
            if len(jobs) == 1:
                return [made.submit(jobs[0])]
            with made.batch():
                return [made.submit(job) for job in jobs]
        except FailedJobError as error:
            reason = " ".join(str(error).split())
            raise LaunchError(
                f"nothing was submitted: {reason}.", "docs/slurm.md lists the usual errors"
            ) from None


def sbatch_file(request: Request, batch: JobArray) -> str:
    """The sbatch file that would be submitted, or one line about a run on this machine."""
    if request.cluster != "slurm":
        runs = ", ".join(str(run.path) for run in batch.runs)
        return f"{request.cluster}: {request.ranks_per_node} ranks on this machine, run {runs}"
    made: Any = executor(request, batch)._executor
    if len(batch.configs) > 1:
        made.parameters["map_count"] = len(batch.configs)
    return str(made._make_submission_file_text(made._submitit_command_str, "dry-run"))


# ---------------------------------------------------------------- after it is submitted


def describe(request: Request, batch: JobArray, jobs: Sequence[submitit.Job[Any]]) -> str:
    """The job, its files, and the command that ends it."""
    ids = ", ".join(job.job_id for job in jobs)
    size = f"{request.nodes} nodes × {request.ranks_per_node} ranks, {request.time}"
    lines = [f"job     {ids} on {request.cluster}: {size}"]
    lines += [f"run     {run.path}" for run in batch.runs]
    lines += [f"log     {job.paths.stdout}" for job in jobs]
    # SIGTERM is a stop request, so both commands leave a checkpoint
    ending = "scancel" if request.cluster == "slurm" else "kill"
    return "\n".join([*lines, f"cancel  {ending} {' '.join(job.job_id for job in jobs)}"])


def follow(job: submitit.Job[Any], cluster: str) -> None:
    """Print the job's log as it grows, through every requeue, until the job has left the queue."""
    offset = 0
    while True:
        living = _is_alive(job, cluster)
        offset = _print_from(job.paths.stdout, offset)
        if not living:
            return
        time.sleep(LOOK_S)


def _print_from(path: Path, offset: int) -> int:
    if not path.exists():
        return offset
    with path.open("rb") as file:
        file.seek(offset)
        sys.stdout.write(file.read().decode(errors="replace"))
        sys.stdout.flush()
        return file.tell()


def _is_alive(job: submitit.Job[Any], cluster: str) -> bool:
    """Whether squeue lists the job, or does not answer. submitit's own watcher calls sacct, which not every
    cluster has.
    """
    if cluster != "slurm":
        return not job.done()
    queue = subprocess.run(["squeue", "-h", "-j", job.job_id, "-o", "%T"], capture_output=True, text=True)
    unanswered = queue.returncode != 0 and "Invalid job id" not in queue.stderr
    return unanswered or bool(queue.stdout.strip())


def _parser() -> CommandParser:
    parser = CommandParser("launch.submit", __doc__)
    for field in dataclasses.fields(Request):
        if "help" not in field.metadata:
            continue
        kind = whole_number(int(field.name == "nodes")) if isinstance(field.default, int) else str
        shown = f"{field.metadata['help']} (default: {field.default or 'left to the cluster'})"
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, default=field.default, metavar="VALUE", help=shown
        )
    parser.add_argument(
        "--array", nargs="+", default=[], metavar="RECIPE", help="one job of an array for each recipe"
    )
    parser.add_argument("--follow", action="store_true", help="print the log until the job has ended")
    parser.add_argument("--dry-run", action="store_true", help="print the sbatch file and submit nothing")
    return parser


@prints_errors("launch.submit")
def main(argv: Sequence[str]) -> int:
    end = list(argv).index("--") if "--" in argv else len(argv)
    ours, flags = list(argv[:end]), list(argv[end + 1 :])
    typed, unknown = _parser().parse_known_intermixed_args(ours)
    options = {**vars(typed), "sbatch": read_options(unknown)}
    recipes, watch, dry_run = options.pop("array"), options.pop("follow"), options.pop("dry_run")
    request = Request(**options)
    check(request)
    if importlib.util.find_spec("submitit") is None:
        raise LaunchError("launch.submit needs submitit, which is not installed.", "pip install submitit")
    batch = plan(flags, recipes)
    if dry_run:
        print(sbatch_file(request, batch))
        return 0
    jobs = submit(request, batch)
    print(describe(request, batch, jobs), flush=True)
    if request.cluster == "debug":
        jobs[0].results()
    elif watch:
        with contextlib.suppress(KeyboardInterrupt):  # ends the printing, not the jobs
            for job in jobs:
                follow(job, request.cluster)
        return 0 if all(run.done.exists() or run.stopped.exists() for run in batch.runs) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
