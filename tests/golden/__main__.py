"""The pinned configurations (tests/golden/configurations.py), trained and compared:

    python -m tests.golden                                 all under launch.local
    python -m tests.golden --launcher ray --part 2/5       four of them, as each CI run does
    python -m tests.golden --against REV                   with the sources of a commit, on this machine
    python -m tests.golden --against REV --rows            the commands of docs/tutorials.md too
    python -m tests.golden --record                        writes tests/golden/values.json
    python -m tests.golden --record-runs                   adds stopped runs to tests/golden/stopped

Without --against each configuration is trained under the launcher, and again on forked ranks with two stops:
losses, norms, evaluations and exported weights are equal, bit for bit, and those in fp64 are within 1e-9 of
values.json. With --against both trees train under launch.local, and all is equal, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.golden.configurations import (
    CONFIGURATIONS,
    FP64,
    INPUTS,
    MIXTURE,
    STREAM,
    Configuration,
    write_data,
)
from tests.golden.rank import on_a_rank
from tests.golden.starts import LAUNCHERS, LOCAL, ROOT, Launched, Launchers, launchers, words_of
from tests.golden.values import Values, difference, values_of
from tests.support.world import run_world

HERE = Path(__file__).parent
COMMITTED = HERE / "values.json"
STOPS = (3, 5, 0)
"""Values of --train.stop_after, of which 0 is the end."""
ALWAYS = ("--train.steps", "8", "--train.global_batch", "12", "--checkpoint.every_steps", "1000")
ROW = re.compile(r"`torchrun --nproc_per_node=(\d) train\.py ((?:(?!RUN|FOLDER|s3:|--dry-run)[^`])*)`")
TOO_LONG_S = 600.0
SMALL = "--model.args.width 8 --model.args.heads 2 --model.args.layers 1"
RECORDED_RUNS = {
    "mixture": (2, f"{MIXTURE} {FP64} {SMALL} --model.args.dropout 0 --optim.ema 0.9"),
    "stream": (3, f"{STREAM} {FP64} {SMALL} --optim.schedule wsd --optim.warmup_steps 2"),
}
"""Ranks and flags."""


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    os.environ.update({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(INPUTS)})
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        folder = Path(name).resolve()
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        write_data(folder / "data")
        if options.record or options.record_runs:
            (record if options.record else record_runs)(folder)
            return 0
        nth, count = options.part
        chosen = CONFIGURATIONS[nth - 1 :: count]
        compare = against(chosen, folder, options) if options.against else check(chosen, folder, options)
        failed = 0
        for title, text in compare:
            print(f"{'DIFFERS' if text else 'same':8}{title}{text and ': '}{text}", flush=True)
            failed += bool(text)
    return 1 if failed else 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--launcher", choices=LAUNCHERS, default=LOCAL)
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="each N-th from the K-th")
    parser.add_argument("--against", default="", metavar="REV", help="a commit to compare with")
    parser.add_argument("--rows", action="store_true", help="with --against: the tutorials' commands too")
    parser.add_argument("--record", action="store_true", help="write the values in fp64")
    parser.add_argument("--record-runs", action="store_true", help="add run directories of this commit")
    return parser.parse_args(argv)


def _part(text: str) -> tuple[int, int]:
    nth, _, count = text.partition("/")
    if not 1 <= int(nth) <= int(count):
        raise ValueError(text)
    return int(nth), int(count)


def forked(words: Sequence[str], ranks: int, folder: Path, run: str, stops: Sequence[int]) -> Values:
    """The values of a run on forked ranks in this folder that is stopped at these steps and resumed."""
    for stop in stops:
        flags = [*words, "--run.dir", f"{run}/run", "--train.stop_after", str(stop)]
        errors = run_world(ranks, on_a_rank, [*flags, "--watch.enabled", "false"], str(folder))
        if any(errors):
            raise RuntimeError(f"{run}: {errors}")
    return values_of(folder / run / "run")


def flags_of(configuration: Configuration, run: Path, data: Path) -> list[str]:
    return [*configuration.words(run, data), *ALWAYS]


def launched(launcher: Launchers | Path, name: str, ranks: int, flags: Sequence[str], run: Path) -> Values:
    """The values of a run under the launcher `name`, or under launch.local in a tree of sources."""
    run.mkdir(parents=True)
    run_dir, log = run / "run", run / "log"
    words = ["--run.dir", str(run_dir), *flags]
    if isinstance(launcher, Path):
        start = Launched([sys.executable, *words_of(name, ranks), *words], run_dir, log, tree=launcher)
    else:
        start = launcher.start(name, ranks, words, run_dir, log)
    codes = start.codes(TOO_LONG_S)
    start.kill_all()
    if codes != [0]:
        raise RuntimeError(f"exit codes {codes}: {log.read_text(errors='replace')[-2000:]}")
    return values_of(run_dir)


def check(
    chosen: Sequence[Configuration], folder: Path, options: argparse.Namespace
) -> Iterator[tuple[str, str]]:
    committed = json.loads(COMMITTED.read_text())
    with launchers([options.launcher]) as usable:
        if reason := usable.left_out.get(options.launcher):
            raise SystemExit(f"{options.launcher}: {reason}")
        for configuration in chosen:
            began, run = time.monotonic(), folder / configuration.name
            flags = flags_of(configuration, run, folder / "data")
            try:
                whole = launched(usable, options.launcher, configuration.ranks, flags, run)
                parts = forked(flags, configuration.ranks, folder, f"{configuration.name}-stopped", STOPS)
                text = difference(whole, parts, 0)
                if configuration.anywhere:
                    text = text or difference(whole, committed[configuration.name])
            except RuntimeError as error:
                text = str(error)
            yield f"{configuration.name} under {options.launcher}, {time.monotonic() - began:.0f} s", text


def against(
    configurations: Sequence[Configuration], folder: Path, options: argparse.Namespace
) -> Iterator[tuple[str, str]]:
    tree = folder / "tree"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", options.against], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    jobs = [
        (chosen.name, chosen.ranks, flags_of(chosen, Path("{run}"), folder / "data"))
        for chosen in configurations
    ]
    if options.rows:
        nth, count = options.part
        jobs += rows(nth, count, folder / "data")
    for number, (title, ranks, flags) in enumerate(jobs):
        values = []
        try:
            for root, run in ((ROOT, folder / f"here-{number}"), (tree, folder / f"there-{number}")):
                words = [flag.replace("{run}", str(run)) for flag in flags]
                values.append(launched(root, LOCAL, ranks, words, run))
            yield title, difference(values[0], values[1], 0)
        except RuntimeError as error:
            yield title, str(error)


def rows(nth: int, count: int, data: Path) -> list[tuple[str, int, list[str]]]:
    """The training commands of docs/tutorials.md: title, ranks, flags."""
    jobs = []
    page = (ROOT / "docs/tutorials.md").read_text(encoding="utf-8")
    for ranks, command in [*dict.fromkeys(ROW.findall(page))][nth - 1 :: count]:
        text = command.replace("scratch", "{run}/scratch").replace("stories.jsonl", f"{data}/stories.jsonl")
        short = "" if re.search(r"--train\.(steps|epochs)", text) else " --train.steps 4"
        jobs.append((command, int(ranks), shlex.split(f"{text}{short} --train.eval_samples 8")))
    return jobs


def record(folder: Path) -> None:
    values = {}
    for configuration in CONFIGURATIONS:
        if configuration.anywhere:
            flags = flags_of(configuration, Path(configuration.name), folder / "data")
            values[configuration.name] = forked(flags, configuration.ranks, folder, configuration.name, [0])
            del values[configuration.name]["digest"]
    COMMITTED.write_text(_lines(values), encoding="utf-8")


def _lines(values: dict[str, Values]) -> str:
    """JSON with a line for each."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
    return f"{{\n{lines}\n}}\n"


def record_runs(folder: Path) -> None:
    """Two small runs that stop after step 5, with the values of the unbroken ones. All paths are relative."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    os.chdir(folder)
    shutil.rmtree("data")
    write_data(Path("data"))
    values = {}
    for name, (ranks, flags) in RECORDED_RUNS.items():
        words = [*flags.format(data="data").split(), *ALWAYS]
        values[name] = {"ranks": ranks, **forked(words, ranks, folder, f"{name}-whole", [0])}
        forked(words, ranks, folder, name, [5])
    Path("values.json").write_text(_lines(values))
    file = HERE / "stopped" / f"{commit.stdout.strip()}.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        for name in ("values.json", *RECORDED_RUNS):
            archive.add(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
