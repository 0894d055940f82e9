"""Submit a run to Slurm from Python, through submitit; or run it on this machine the same way.

    python -m launch.submit --nodes 4 --gpus-per-node 8 --time 4:00:00 -- --config recipes/digits.toml
    python -m launch.submit --array recipes/a.toml recipes/b.toml --time 30 -- --train.steps 1000
    python -m launch.submit --cluster local --tasks-per-node 2 --follow -- --train.steps 50
    python -m launch.submit --nodes 2 --dry-run -- --config recipes/digits.toml      prints the sbatch file, submits nothing

Behind `--` stand train.py's own flags. The code is copied into the run directory, so that a job that waits in the queue
runs what was submitted. What runs in the job is launch/submitted.py; its requeue is slurm/lib.sh's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError

from fsdp import config as configuration
from fsdp import rundir
from fsdp.config import Config
from fsdp.errors import ConfigError, LaunchError, ShardrunError
from fsdp.rundir import RunDir
from launch import rendezvous
from launch.submitted import Training

HOME = Path(__file__).resolve().parent.parent
CODE = ("train.py", "fsdp", "launch", "slurm")
LOOK_S = 0.5


def ask(default: int | str, help: str) -> Any:
    """A field with its help: --help shows it."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of the cluster; nothing about the run. Zero and empty leave a thing to the cluster's own default."""

    nodes: int = ask(1, "nodes")
    gpus_per_node: int = ask(0, "GPUs that each node gives")
    tasks_per_node: int = ask(0, "ranks a node; 0 is one a GPU, or one")
    cpus_per_task: int = ask(0, "CPUs a rank")
    time: str = ask("1:00:00", "time limit as Slurm writes it; the job is requeued until the run is done")
    mem: str = ask("", "memory a node, e.g. 64G")
    partition: str = ask("", "where to run")
    account: str = ask("", "who pays")
    qos: str = ask("", "quality of service")
    constraint: str = ask("", "features that the nodes must have")
    exclude: str = ask("", "nodes to leave out")
    name: str = ask("shardrun", "the job's name")
    signal_s: int = ask(120, "seconds before the limit at which the ranks are told; more than a step and a save take")
    cluster: str = ask("slurm", "slurm, local (this machine, the same way), or debug (this process)")

    @property
    def ranks_per_node(self) -> int:
        return self.tasks_per_node or self.gpus_per_node or 1

    def parameters(self) -> dict[str, Any]:
        """As submitit's AutoExecutor names them."""
        common = {
            "name": self.name,
            "timeout_min": minutes(self.time),
            "nodes": self.nodes,
            "tasks_per_node": self.ranks_per_node,
            "gpus_per_node": self.gpus_per_node or None,
            "cpus_per_task": self.cpus_per_task or None,
            "mem_gb": gibibytes(self.mem) if self.mem else None,
            "stderr_to_stdout": True,
        }
        names = ("partition", "account", "qos", "constraint", "exclude")
        slurm = {f"slurm_{name}": getattr(self, name) or None for name in names}
        slurm["slurm_signal_delay_s"] = self.signal_s
        return {name: value for name, value in {**common, **slurm}.items() if value is not None}


def minutes(text: str) -> int:
    """Slurm's ways to write a time: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        raise ConfigError(f"--time {text} is not a time.", "--time 4:00:00, --time 90 (minutes), or --time 1-12")
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    leading = 0 if dash or len(parts) == 3 else 1  # without days, one or two numbers begin with the minutes
    units = (3600, 60, 1)[leading : leading + len(parts)]
    seconds = int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=True))
    return max(1, -(-seconds // 60))


def gibibytes(text: str) -> float:
    """Slurm's ways to write an amount of memory: 64G, 512M, 1T; a bare number is megabytes."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    if found is None:
        raise ConfigError(f"--mem {text} is not an amount of memory.", "--mem 64G")
    return int(found[1]) * {"K": 2.0**-20, "M": 2.0**-10, "": 2.0**-10, "G": 1.0, "T": 1024.0}[found[2]]


# ---------------------------------------------------------------- what is submitted


@dataclass(frozen=True)
class Batch:
    """One job, or an array of them: a folder with the code and the logs, and a run directory each."""

    folder: Path
    configs: tuple[Config, ...]

    @property
    def runs(self) -> list[RunDir]:
        return [RunDir(Path(config.run.dir)) for config in self.configs]


def plan(flags: Sequence[str], recipes: Sequence[str] = ()) -> Batch:
    """Everything that a person could have typed wrongly is found here, before anything is submitted."""
    if not recipes:
        config = configuration.load(flags)
        folder = rundir.choose(config)
        return Batch(folder, (configuration.replace(config, run__dir=str(folder)),))
    configs = [configuration.load(["--config", recipe, *flags]) for recipe in recipes]
    if configs[0].run.dir and len(configs) > 1 and len({config.run.dir for config in configs}) == 1:
        raise ConfigError(f"--run.dir {configs[0].run.dir} cannot be {len(configs)} runs at once.", "leave --run.dir out")
    folder = rundir.choose(configuration.replace(configs[0], run__dir=""))
    names = [f"{index}-{Path(recipe).stem}" for index, recipe in enumerate(recipes)]
    placed = [
        configuration.replace(config, run__dir=str(Path(config.run.dir).absolute() if config.run.dir else folder / name))
        for config, name in zip(configs, names, strict=True)
    ]
    return Batch(folder, tuple(placed))


def snapshot(folder: Path) -> Path:
    """The code as it is now, where the job will find it however long it waits."""
    code = folder / "code"
    for name in CODE:
        source = HOME / name
        if source.is_dir():
            shutil.copytree(source, code / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            code.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, code / name)
    return code


def executor(request: Request, batch: Batch) -> submitit.AutoExecutor:
    """submitit's executor with our lines before and after its srun."""
    code = batch.folder / "code"
    made = submitit.AutoExecutor(folder=batch.folder / "logs", cluster=request.cluster, **_for_cluster(request.cluster, code))
    made.update_parameters(**request.parameters())
    if request.cluster == "slurm":
        made.update_parameters(
            slurm_additional_parameters={"requeue": True},
            slurm_srun_args=["--kill-on-bad-exit=1", "--cpu-bind=none"],
            slurm_setup=_before(code, batch.runs),
            slurm_teardown=["rc=$?", "set -e", "judge_and_act", "requeue"],
        )
    return made


def _for_cluster(cluster: str, code: Path) -> dict[str, Any]:
    """The bound on restarts is ours and counts progress (launch/progress.py); submitit's counts interruptions."""
    bound = {f"{cluster}_max_num_timeout": 1_000_000} if cluster in ("slurm", "local") else {}
    if cluster != "slurm":
        return bound
    # behind srun's options in the sbatch file, where bash knows what cluster.env says
    node = f'"${{SRUN_ARGS[@]}}" "${{CONTAINER[@]}}" bash {shlex.quote(str(code / "slurm" / "node.sh"))}'
    return {**bound, "slurm_python": f"{node} rank {shlex.quote(sys.executable)}"}


def _before(code: Path, runs: Sequence[RunDir]) -> list[str]:
    """In the batch shell: the cluster's facts, the run directory of this element of the array, and the nodes' meeting."""
    paths = " ".join(shlex.quote(str(run.path)) for run in runs)
    return [
        "set -euo pipefail",
        f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
        f"source {shlex.quote(str(code))}/slurm/lib.sh",
        f"runs=({paths})",
        'job_begin --run.dir "${runs[${SLURM_ARRAY_TASK_ID:-0}]}"',
        "meet_or_leave 0",
        "set +e",
    ]


@contextlib.contextmanager
def job_variables(code: Path, cluster: str) -> Iterator[None]:
    """What the job inherits: the snapshot's code before any other; on this machine the ranks' meeting place too."""
    added = {"PYTHONPATH": os.pathsep.join([str(code), *filter(None, [os.environ.get("PYTHONPATH")])]), "PYTHONSAFEPATH": "1"}
    if cluster == "local":
        added |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous.free_port(os.getpid()))}
    with submitit.helpers.environment_variables(**added):
        yield


def submit(request: Request, batch: Batch) -> list[submitit.Job[Any]]:
    """One job, or one array."""
    code = snapshot(batch.folder)
    jobs = [Training(config) for config in batch.configs]
    with job_variables(code, request.cluster):
        made = executor(request, batch)
        try:
            if len(jobs) == 1:
                return [made.submit(jobs[0])]
            with made.batch():
                return [made.submit(job) for job in jobs]
        except FailedJobError as error:
            said = " ".join(str(error).split())
            raise LaunchError(f"nothing was submitted: {said}.", "docs/slurm.md lists the usual errors") from None


def check(request: Request) -> None:
    """What can be said before submitit or sbatch are asked."""
    if request.cluster not in ("slurm", "local", "debug"):
        raise ConfigError(f"--cluster {request.cluster} is not slurm, local or debug.", "--cluster slurm")
    for name in ("nodes", "gpus_per_node", "tasks_per_node", "cpus_per_task", "signal_s"):
        if getattr(request, name) < (name == "nodes"):
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(request, name)} is too few.", f"--{name.replace('_', '-')} 1"
            )
    request.parameters()
    if request.cluster == "slurm" and shutil.which("sbatch") is None:
        raise LaunchError("there is no sbatch here.", "--cluster local runs it on this machine")
    if request.cluster != "slurm" and request.nodes > 1:
        raise ConfigError(f"--cluster {request.cluster} is one node, not --nodes {request.nodes}.", "--nodes 1")
    if request.cluster == "debug" and request.ranks_per_node > 1:
        raise ConfigError(f"--cluster debug is one rank, not {request.ranks_per_node}.", "--cluster local")


def sbatch_file(request: Request, batch: Batch) -> str:
    """What would be submitted, or run here."""
    if request.cluster != "slurm":
        runs = ", ".join(str(run.path) for run in batch.runs)
        return f"{request.cluster}: {request.ranks_per_node} ranks on this machine, run {runs}"
    made: Any = executor(request, batch)._executor
    if len(batch.configs) > 1:
        made.parameters["map_count"] = len(batch.configs)
    return str(made._make_submission_file_text(made._submitit_command_str, "dry-run"))


# ---------------------------------------------------------------- after it is submitted


def describe(request: Request, batch: Batch, jobs: Sequence[submitit.Job[Any]]) -> str:
    """The job, where it writes, and how to end it."""
    ids = ", ".join(job.job_id for job in jobs)
    lines = [f"job     {ids} on {request.cluster}: {request.nodes} nodes × {request.ranks_per_node} ranks, {request.time}"]
    lines += [f"run     {run.path}" for run in batch.runs]
    lines += [f"log     {job.paths.stdout}" for job in jobs]
    # TERM is a request to stop, so that both ways of ending leave a checkpoint
    ending = "scancel" if request.cluster == "slurm" else "kill"
    return "\n".join([*lines, f"cancel  {ending} {' '.join(job.job_id for job in jobs)}"])


def follow(job: submitit.Job[Any], cluster: str) -> None:
    """Print the job's log as it grows, through every requeue, until the job has left the queue. Ctrl-C ends the watching."""
    place = 0
    while True:
        living = _is_alive(job, cluster)
        place = _print_from(job.paths.stdout, place)
        if not living:
            return
        time.sleep(LOOK_S)


def _print_from(path: Path, place: int) -> int:
    if not path.exists():
        return place
    with path.open("rb") as file:
        file.seek(place)
        sys.stdout.write(file.read().decode(errors="replace"))
        sys.stdout.flush()
        return file.tell()


def _is_alive(job: submitit.Job[Any], cluster: str) -> bool:
    """squeue, not submitit's own watcher: that asks sacct, which not every cluster has."""
    if cluster != "slurm":
        return not job.done()
    queue = subprocess.run(["squeue", "-h", "-j", job.job_id, "-o", "%T"], capture_output=True, text=True)
    return bool(queue.stdout.strip())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m launch.submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for field in dataclasses.fields(Request):
        kind = int if isinstance(field.default, int) else str
        shown = f"{field.metadata['help']} (default: {field.default or 'left to the cluster'})"
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default, metavar="VALUE", help=shown)
    parser.add_argument("--array", nargs="+", default=[], metavar="RECIPE", help="one job of an array for each recipe")
    parser.add_argument("--follow", action="store_true", help="print the log until the job has ended")
    parser.add_argument("--dry-run", action="store_true", help="print the sbatch file and submit nothing")
    return parser


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Ours before `--`, train.py's behind it."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def main(argv: Sequence[str] | None = None) -> int:
    ours, flags = split(sys.argv[1:] if argv is None else argv)
    known, unknown = _parser().parse_known_args(ours)
    options = vars(known)
    recipes, watch, dry_run = options.pop("array"), options.pop("follow"), options.pop("dry_run")
    request = Request(**options)
    try:
        if unknown:
            raise ConfigError(
                f"{unknown[0]} is not a flag of launch.submit.", f"train.py's stand behind `--`: -- {unknown[0]} …"
            )
        check(request)
        batch = plan(flags, recipes)
        if dry_run:
            print(sbatch_file(request, batch))
            return 0
        jobs = submit(request, batch)
    except ShardrunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(describe(request, batch, jobs), flush=True)
    if request.cluster == "debug":
        jobs[0].results()
    elif watch:
        with contextlib.suppress(KeyboardInterrupt):  # ends the looking, not the jobs
            follow(jobs[0], request.cluster)
        return 0 if all(run.done.exists() or run.stopped.exists() for run in batch.runs) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
