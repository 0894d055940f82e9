"""The commands of a Slurm job before its ranks start and after they end; the task of one of launch.submit.

    python -m launch.slurm_job begin -- WORDS       words of `sbatch slurm/fsdp.sbatch WORDS`
    python -m launch.slurm_job judge RUN --job 12 --code 1

`begin` checks the flags and what Slurm has allocated, and prints variables of slurm/lib.sh as bash reads
them: the run directory, the program of the ranks, the ranks and GPUs of a node, the command of a new job.
`judge` runs after the ranks have ended: launch/policy.py decides, and the exit status is the decision,
because a status leaves a container; it prints the variables of the next start in this allocation, or the
nodes that the requeued job leaves out. slurm/lib.sh calls Slurm's commands, and passes what they print in
variables. Both hold the run directory's lock while they write, and write nothing if another job holds it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import signal
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from fsdp import config as configuration
from fsdp.base.errors import CheckpointError, ConfigError, RefusedError, ShardrunError, without_hint
from fsdp.base.phases import Ending
from fsdp.base.text import print_line
from fsdp.config import Config
from fsdp.distributed.env import from_environment, job_start
from fsdp.rundir import history
from fsdp.rundir.history import RunDir, open_run, write_atomically
from fsdp.rundir.lock import Folder, hold
from fsdp.watch import records
from launch.guard import TOKEN, Marker, run_rank
from launch.node import free_port
from launch.policy import (
    DONE,
    EXIT_DIED,
    EXIT_HUNG,
    EXIT_REFUSED,
    Act,
    Allocation,
    Decision,
    End,
    Kind,
    Past,
    decide,
    kind_of_stop,
)

HOME = Path(__file__).resolve().parent.parent
REQUEUE, AGAIN = 85, 86
"""The exit statuses of these decisions; any other is the job's own exit code."""
SAVED = End(Kind.PREEMPTED, why="its ranks have ended with 0")
"""Where no marker says why."""
_SEE_ABOVE = "see the error above"
LONGEST_REASON = 4096
"""Characters read of RUN/STOPPED."""
Event = dict[str, Any]


@contextmanager
def holding(run: RunDir, start: str) -> Iterator[None]:
    """Hold the run directory's lock, or raise RefusedError with its holder. A later start of a Slurm job
    takes it from an earlier one.
    """
    lock = hold(Folder(run.path), None, "launch.slurm_job", start)
    try:
        yield
    finally:
        lock.release()


def judge(
    run: RunDir, *, job: str, restart: int, code: int, allocation: Allocation, unmet: str = ""
) -> Decision:
    """Decide what follows the last start, or `unmet`, the failure before it. Both are in the history.

    A start that was refused wrote nothing: the records are those of the job that refused it, which may have
    finished or stopped since. Where the run directory cannot be read, ranks that end with 0 have saved and
    the job is requeued: a run that is done ends again at once, and `scancel` is final in Slurm itself.
    """
    marker = Marker(run, os.environ.get(TOKEN, ""))
    if code == EXIT_REFUSED and marker.read() is None:
        return decide(End(Kind.REFUSED, why=_SEE_ABOVE), Past(), allocation)
    next_try = {"SHARDRUN_TRY": str(int(os.environ.get("SHARDRUN_TRY", "0")) + 1)}
    decision = None
    try:
        with holding(run, job_start({**os.environ, **next_try})):
            end, past = _end(run, marker, job, restart, code, unmet)
            decision = decide(end, past, allocation)
    except RefusedError as error:
        return decide(End(Kind.REFUSED, why=str(error)), Past(), allocation)
    except (ShardrunError, OSError) as error:
        if decision is None and (code or unmet):
            raise as_error(run, error) from None
        print_line(f"{without_hint(as_error(run, error))} What follows does not depend on it.")
    return decision or decide(SAVED, Past(), allocation)


def as_error(run: RunDir, error: Exception) -> ShardrunError:
    if isinstance(error, ShardrunError):
        return error
    hint = f"ls {shlex.quote(str(run.path))}, then start the same command"
    return CheckpointError(f"{run.path} cannot be read or written: {error}.", hint)


def _end(run: RunDir, marker: Marker, job: str, restart: int, code: int, unmet: str) -> tuple[End, Past]:
    events = history.events(run)
    past = past_of(events, job, restart)
    if unmet:
        history.record(run, "unmet", job=job)
        return End(Kind.UNMET, why=unmet), past
    end = _requested_end(run) or (SAVED if code == 0 else None)
    if end is None:
        end = end_of(run, marker, code, starting=_failed_while_starting(events))
        about = {"code": end.code, "kind": end.kind.name, "starting": end.starting}
        about |= {"node": records.failed_node(run.path / "watch", history.newest_start(events))}
        history.record(run, "crash", job=job, restart=restart, step=end.step, **about)
    return end, past


def _requested_end(run: RunDir) -> End | None:
    """The end of a start that is done or was stopped; None for one that failed."""
    if run.done.exists():
        return End(Kind.DONE)
    if not run.stopped.is_file():
        return None
    with run.stopped.open(encoding="utf-8", errors="replace") as file:
        text = file.read(LONGEST_REASON)
    reason = text.partition(" at step ")[0].strip()
    return End(kind_of_stop(reason), why=reason)


def end_of(run: RunDir, marker: Marker, code: int, *, starting: bool) -> End:
    """The end of a start that failed, from RUN/FAILED or else from its exit code."""
    failure = marker.read()
    if failure is not None:
        return End(failure.kind, history.last_step(run.metrics), starting, failure.code, failure.message)
    # no marker: a refusal, or an error that is found before there is a run directory
    kind = {EXIT_REFUSED: Kind.REFUSED, ConfigError.exit_code: Kind.FINAL}.get(code, Kind.DIED)
    if kind is Kind.DIED and hang_ended_newest_start(run):
        code = EXIT_HUNG  # srun ends with the code of a rank that was killed after it
    return End(kind, history.last_step(run.metrics), starting, code, "" if kind is Kind.DIED else _SEE_ABOVE)


def failed_nodes(run: RunDir, job: str, restart: int) -> list[str]:
    """The node that all crashes of this allocation have in common, if there is one."""
    events = [event for event in history.events(run) if event["event"] == "crash"]
    nodes = {event.get("node", "") for event in events if (event["job"], event["restart"]) == (job, restart)}
    return sorted(nodes) if len(nodes) == 1 and "" not in nodes else []


def hang_ended_newest_start(run: RunDir) -> bool:
    """Whether the watch has ended the newest start because a rank stood still."""
    return records.hang_ended(run.path / "watch", history.newest_start(history.events(run)))


def past_of(events: Sequence[Event], job: str, restart: int) -> Past:
    """The past of this job alone: the same command submitted again has new restarts."""
    crashes = [event for event in events if event["event"] == "crash" and event["job"] == job]
    kinds = [Kind.__members__.get(str(event.get("kind")), Kind.DIED) for event in crashes]
    ends = [
        End(kind, event["step"], bool(event.get("starting")), event["code"])
        for kind, event in zip(kinds, crashes, strict=True)
    ]
    unmet = 1
    while unmet <= len(events) and events[-unmet]["event"] == "unmet":
        unmet += 1
    here = sum(event["restart"] == restart for event in crashes)
    return Past(ends, here, _stops_without_a_step(events), unmet)


def _failed_while_starting(events: Sequence[Event]) -> bool:
    """Whether the newest try has not recorded a start: the last one has its end, and that is no failure."""
    ends = ("start", "crash", "lost", "unmet")
    for event in reversed(events):
        if event["event"] in ends or (event["event"] == "end" and event.get("how") != Ending.FAILED):
            return bool(event["event"] != "start")
    return True


def _stops_without_a_step(events: Sequence[Event]) -> int:
    """Consecutive starts at the history's end that stopped at the step that they started from."""
    count, end_step = 0, None
    for event in reversed(events):
        if event["event"] == "end":
            end_step = event["step"]
        elif event["event"] == "start" and end_step is not None and end_step <= event["from_step"]:
            count, end_step = count + 1, None
        elif event["event"] in ("start", "crash"):
            break
    return count


# ---------------------------------------------------------------- before the ranks


MODES = ("--dry-run", "--preflight")
STRATEGIES = ("ddp", "fsdp", "hsdp")
REPEATED = (
    "partition=Partition account=Account qos=QOS time=TimeLimit cpus-per-task=CPUs/Task mem=MinMemoryNode "
    "mem-per-cpu=MinMemoryCPU constraint=Features reservation=Reservation"
)
"""Options of sbatch that a new job in place of this one gets, and their fields of its record."""


def field(record: str, name: str, default: str = "") -> str:
    """A field of what scontrol prints in one line."""
    found = re.search(rf" {name}=(\S+)", record)
    return found[1] if found else default


def flags_of(words: Sequence[str]) -> list[str]:
    """The flags of train.py: a word in front is a strategy or a recipe."""
    rest = list(words)
    flags: list[str] = []
    while rest and not rest[0].startswith("-"):
        word = rest.pop(0)
        recipe = word if word.endswith(".toml") else f"{HOME}/recipes/{word}.toml"
        if word in STRATEGIES:
            flags += ["--mesh.strategy", word]
        elif recipe == word or Path(recipe).exists():
            flags += ["--config", recipe]
        else:
            names = ", ".join(sorted(path.stem for path in HOME.glob("recipes/*.toml")))
            problem = f"{word} is not a strategy ({', '.join(STRATEGIES)}) or a recipe ({names})."
            raise ConfigError(problem, "sbatch slurm/fsdp.sbatch ddp")
    return [*flags, *(word for word in rest if word not in MODES)]


def gpus_of(record: str) -> list[tuple[str, int]]:
    """The GPUs of the job on each group of equal nodes; of a node's own record, all that it has."""
    groups = re.findall(r" Nodes=(\S+) CPU_IDs=\S+ Mem=\S+ GRES=(\S*)", record)
    groups = groups or re.findall(r"NodeName=(\S+) .*? Gres=(\S*)", record)
    counts = ((node, re.search(r"\bgpu:(?:[^\s:,(]+:)?(\d+)", gres)) for node, gres in groups)
    return sorted(((node, int(count[1]) if count else 0) for node, count in counts), key=itemgetter(1))


def ranks_and_gpus(environ: Mapping[str, str], on_cpu: bool) -> tuple[int, int]:
    """Ranks of a node, and the GPUs that Slurm has allocated there for them; 0 without GPUs."""
    record, node = environ.get("SHARDRUN_RECORD", ""), environ.get("SHARDRUN_NODE_RECORD", "")
    first = field(f" {node}", "NodeName", "the first node")
    groups = gpus_of(record) or [(first, int(environ.get("SHARDRUN_GPUS", 0)))]
    (few, fewest), most = groups[0], groups[-1][1]
    asked = str(environ.get("NPROC_PER_NODE") or most or environ.get("SHARDRUN_TASKS", 1))
    if not asked.isdecimal() or not (ranks := int(asked)):
        raise ConfigError(f"NPROC_PER_NODE={asked} is not a number of ranks.", "NPROC_PER_NODE=8 sbatch …")
    if most and fewest < ranks:
        nodes = environ.get("SLURM_JOB_NUM_NODES", 1)
        raise ConfigError(
            f"{nodes} nodes × {ranks} ranks need {ranks} GPUs a node, but {few} has {fewest}.",
            f"NPROC_PER_NODE={fewest or 1} sbatch …, or --gpus-per-node={ranks}",
        )
    idle = 0 if most or on_cpu else max((count for _, count in gpus_of(node)), default=0)
    if idle:
        raise ConfigError(
            f"the job has no GPU, and its first node has {idle}.",
            f"--gpus-per-node={idle} for sbatch or launch.submit; or --run.device cpu for train.py",
        )
    return ranks, ranks if most else 0


def begin(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, str | list[str]]:
    """Check the flags and the allocation, remove the markers of the last start, and record a start without an
    end as lost. Returns the job's variables.
    """
    job, task = environ.get("SHARDRUN_JOB", "0"), environ.get("SHARDRUN_JOB", "0").partition("_")[2]
    if not task and any("{task}" in word for word in words):
        raise ConfigError("{task} is the number of a task, and the job is no array.", "sbatch --array=0-3 …")
    flags = [word.replace("{task}", task) for word in flags_of(words)]
    config = configuration.load(flags)
    if importlib.util.find_spec("torch") is None:
        problem = f"the Python of the job, {sys.executable}, has no torch."
        raise ConfigError(problem, "VENV, module load or CONTAINER in slurm/cluster.env, or make setup")
    if (launcher := environ.get("SHARDRUN_LAUNCHER", "torchrun")) not in ("torchrun", "srun", "ray"):
        raise ConfigError(f"LAUNCHER={launcher} is no launcher.", "LAUNCHER=torchrun, srun or ray")
    mode = next((word[2:] for word in words if word in MODES), "train")
    if mode == "preflight" and launcher == "ray":
        launcher = "torchrun"
    record = environ.get("SHARDRUN_RECORD", "")
    nodes = environ.get("SHARDRUN_NODES", "").split() or [""]
    ranks, gpus = ranks_and_gpus(environ, on_cpu=config.run.device == "cpu")
    run = open_run(config.run.dir or f"runs/{environ.get('SLURM_JOB_NAME', 'job')}-{job}")
    verdict = run.path / "doctor" / "verdict"
    if mode != "dry-run":
        verdict.unlink(missing_ok=True)
        with holding(run, job_start()):
            history.remove_markers(run)
            events = history.events(run)
            if events and events[-1]["event"] == "start":
                why = "without a message: its node failed, or it was killed before a save"
                history.record(run, "lost", why=why)
    threads = max(1, int(environ.get("SLURM_CPUS_ON_NODE") or 1) // ranks)
    gres = [f"--gres=gpu:{gpus}"] if gpus else []
    repeated = (pair.split("=") for pair in REPEATED.split())
    options = {option: field(record, name, "0") for option, name in repeated}
    script = field(record, "Command")
    on_ray = ["--backend", "ray", "--ray.num_workers", str(len(nodes) * ranks)] if launcher == "ray" else []
    train = [f"{HOME}/train.py", "--run.dir", str(run.path), *on_ray, *flags]
    program = {
        "train": train,
        "dry-run": [*train, "--dry-run"],
        "preflight": ["-m", "fsdp.doctor", "--dir", str(run.path), "--verdict-to", str(verdict)],
    }
    address = field(environ.get("SHARDRUN_NODE_RECORD", ""), "NodeAddr", nodes[0])
    start = f"start {int(environ.get('SLURM_RESTART_COUNT') or 0) + 1}"
    print(
        f"job {job} ({environ.get('SLURM_JOB_NAME', 'job')}), {start}: {len(nodes)} nodes × {ranks} ranks "
        f"on {' '.join(nodes)}; run {run.path}"
    )
    return {
        "SHARDRUN_RUN": str(run.path),
        "SHARDRUN_MODE": mode,
        "SHARDRUN_LAUNCHER": launcher,
        "SHARDRUN_RANKS_PER_NODE": str(ranks),
        "SHARDRUN_STEPS": str(config.train.steps),
        "SHARDRUN_SHARED": str(next(parent for parent in (run.path, *run.path.parents) if parent.is_dir())),
        # for networks without name resolution, the address that Slurm uses for the first node
        "SHARDRUN_HOSTS": environ.get("RDZV_HOST") or f"{nodes[0]},{address}",
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or str(threads),
        **next_try(0, environ),
        "program": program[mode],
        "node_gpus": gres,
        "again": [
            *("sbatch", f"--dependency=afterany:{job}", f"--nodes={environ.get('SLURM_JOB_NUM_NODES', 1)}"),
            f"--ntasks-per-node={environ.get('SHARDRUN_TASKS', 1)}",
            *gres,
            *([] if launcher == "torchrun" else [f"--export=ALL,LAUNCHER={launcher}"]),
            *(f"--{name}={value}" for name, value in options.items() if value not in ("0", "(null)")),
            script if Path(script).is_file() else f"{HOME}/slurm/fsdp.sbatch",
            *("--run.dir", str(run.path), *flags),
        ],
    }


def next_try(number: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of a start of the ranks: its number in this allocation, its token, a free port."""
    start = f"{environ.get('SHARDRUN_JOB', '0')}-{environ.get('SLURM_RESTART_COUNT') or 0}-{number}"
    port = free_port(zlib.crc32(start.encode()))
    return {"SHARDRUN_TRY": str(number), TOKEN: start, "MASTER_PORT": str(port)}


def as_bash(name: str, value: str | list[str]) -> str:
    """An assignment of one line."""
    words = [
        shlex.quote(word).replace("\n", "'$'\\n''") for word in ([value] if isinstance(value, str) else value)
    ]
    return f"export {name}={words[0]}" if isinstance(value, str) else f"{name}=({' '.join(words)})"


# ---------------------------------------------------------------- the commands


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch.slurm_job judge")
    parser.add_argument("run")
    parser.add_argument("--job", required=True)
    parser.add_argument("--restart", type=int, default=0)
    parser.add_argument("--code", type=int, required=True, help="the exit code of the ranks' job step")
    parser.add_argument("--no-again", action="store_true", help="no second start in this allocation")
    parser.add_argument("--unmet", default="", help="what failed before the ranks")
    parser.add_argument("--failed", default="", help="its nodes: the hook failed there, or they did not come")
    return parser


def main(argv: Sequence[str]) -> int:
    command, *words = argv
    try:
        if command == "begin":
            assign(begin([word for word in words if word != "--"]))
            return 0
        options = vars(_parser().parse_args(words))
        run, record = open_run(options.pop("run")), os.environ.get("SHARDRUN_RECORD", "")
        if (mode := os.environ.get("SHARDRUN_MODE", "train")) != "train":
            return end_of_check(run, mode, options["code"], options["failed"])
        # in the shell of salloc there is no batch script to requeue
        requeue = not record or (" Requeue=1" in record and " BatchFlag=1" in record)
        allocation = Allocation(requeue=requeue, again=not options.pop("no_again"))
        failed = [name for name in options.pop("failed").split(",") if name]
        if len(failed) > 1 and len(failed) == len(os.environ.get("SHARDRUN_NODES", "").split()):
            decision = Decision(
                Act.END, EXIT_DIED, f"{options['unmet']}, all nodes", "the lines above say why"
            )
        else:
            decision = judge(run, **options, allocation=allocation)
        if decision.act is Act.AGAIN:
            assign(next_try(int(os.environ.get("SHARDRUN_TRY", "0")) + 1))
        elif decision.act is Act.REQUEUE and not options["unmet"]:
            failed = failed_nodes(run, options["job"], options["restart"])
    except ShardrunError as error:
        print_line(str(error))
        return error.exit_code
    if decision.act is Act.REQUEUE and failed:
        before = field(record, "ExcNodeList").replace("(null)", "")
        assign({"left_out": [",".join(filter(None, [before, *failed]))]})
    print_line(message(run, decision), sys.stdout)
    return {Act.REQUEUE: REQUEUE, Act.AGAIN: AGAIN, Act.END: decision.code}[decision.act]


def assign(variables: Mapping[str, str | list[str]]) -> None:
    """Print assignments, which slurm/lib.sh evaluates."""
    print("\n".join(as_bash(name, value) for name, value in variables.items()))


def end_of_check(run: RunDir, mode: str, code: int, failed: str) -> int:
    """The exit status of a job that has checked its nodes in place of training, with a line for its log. The
    doctor's verdict comes in a file: torchrun has no error then.
    """
    if failed or (mode == "dry-run" and code):
        print(f"not ready: {failed or f'the ranks would end with {code}'}")
        return code or 1
    if mode == "dry-run":
        print("ready: nothing was trained")
        return 0
    doctor = run.path / "doctor"
    with contextlib.suppress(OSError):
        if (doctor / "verdict").read_text().strip() == "0":
            print("fit to train")
            return 0
    print(f"not fit to train: {doctor / 'doctor.txt'}; nodes to exclude: {doctor / 'exclude'}")
    return 1


NEXT = {Act.REQUEUE: "To be requeued.", Act.AGAIN: "Again, in the same allocation."}


def message(run: RunDir, decision: Decision) -> str:
    """One line for the job's log."""
    if decision == DONE:
        return "done: the run has all its steps."
    if decision.act in NEXT:
        return f"{decision.why}. {NEXT[decision.act]}"
    next_start = f"the same command with --run.dir {shlex.quote(str(run.path))} continues"
    why = decision.why.partition(" HINT: ")[0].rstrip(".")  # the rank has printed the HINT
    end = f": no restart. HINT: {decision.hint}; {next_start}" if decision.hint else ""
    return f"{why}{end}" if end else f"{why}. Not requeued; {next_start}."


# ---------------------------------------------------------------- launch.submit


@dataclass(frozen=True)
class SubmittedRun:
    """One rank of a job of launch.submit. submitit pickles it with the resolved configuration: editing a
    recipe while the job waits has no effect. The code is the snapshot in the run directory.
    """

    config: Config

    def __call__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            # until the ranks install their handlers: submitit's would requeue, which slurm/lib.sh does
            signal.signal(number, signal.SIG_IGN)
        env = dataclasses.replace(
            from_environment(device=self.config.run.device), launcher="submitit (slurm)"
        )
        code, outcome = run_rank(self.config, env)
        if code:
            sys.exit(code)  # an exception here would be printed a second time, with submitit's frames
        if env.is_main and outcome is not None:
            from launch.in_process import record_of

            job = os.environ.get("SHARDRUN_JOB", "0")
            write_atomically(outcome_file(outcome.run_dir, job), json.dumps(record_of(outcome)) + "\n")


def outcome_file(run: Path, job: str) -> Path:
    """What `SubmittedJob.result` of launch.submit reads: the outcome of a job's last start."""
    return run / "logs" / f"{job}_outcome.json"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
