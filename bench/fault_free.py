"""Runs of bench.faults without a fault: a rank slowed by a tenth, and ordinary training in which no verdict
is expected.

`--late N` and `--ordinary MINUTES` of python -m bench.faults. With --keep the results are added to
bench/results/watch_late and watch_ordinary, so that an hour can be collected in several calls.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.fault_kinds import SLOWED, Where
from bench.fault_runs import end_all, fork_rank, import_once, steps_of, verdict_of, wait_for
from bench.ports import free_port
from bench.tables import RESULTS, machine, write

SMALL_STEPS = (
    "--model.name", "vit", "--data.name", "digits", "--train.steps", "100000", "--train.global_batch", "16",
    "--checkpoint.every_steps", "0", "--checkpoint.export", "false", "--train.eval_every_steps", "0",
)  # fmt: skip
ORDINARY = (
    "--model.name", "vit", "--data.name", "digits", "--train.steps", "1000000", "--train.global_batch", "32",
    "--train.eval_every_steps", "50", "--checkpoint.every_steps", "25", "--checkpoint.export", "false",
    "--speed.compile", "true",
)  # fmt: skip
SLOW_FROM, WITHIN = 100, 30

Row = dict[str, Any]


def kept(name: str, options: argparse.Namespace) -> list[Row]:
    file = RESULTS / f"{name}.json"
    rows: list[Row] = (
        json.loads(file.read_text())["rows"] if options.keep and not options.anew and file.exists() else []
    )
    return rows


def keep(
    name: str, rows: Sequence[Row], options: argparse.Namespace, title: str, command: str, text: str
) -> None:
    print(text)
    if options.keep:
        about = f"gloo, one machine with other work on it. {machine()}."
        write(name, title=title, command=command, about=about, text=text, numbers={"rows": list(rows)})


# ---------------------------------------------------------------- a rank that is a tenth slower


def named_late(rank: int, ranks: int, folder: Path) -> Row:
    """The ranks named late, by how much, and the number of slow steps until then."""
    run, where = folder / "run", Where(rank, SLOW_FROM, folder / "fault-at")
    address = ("127.0.0.1", free_port())
    flags = ["--run.dir", str(run), *SMALL_STEPS]
    pids = [fork_rank(r, address, flags, folder / "log", SLOWED, where, ranks=ranks) for r in range(ranks)]
    file = run / "watch" / "late.jsonl"
    try:
        wait_for(
            lambda: steps_of(run) >= SLOW_FROM + 120 or (file.exists() and steps_of(run) > SLOW_FROM),
            "a late rank",
        )
        said, at = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [],
            steps_of(run),
        )
    finally:
        end_all(pids)
    named = [one for one in said if "rank" in one]
    after = at - SLOW_FROM if named and named[0]["step"] >= SLOW_FROM else -1
    percent = named[0]["percent"] if named else 0.0
    return {
        "ranks": ranks,
        "rank": rank,
        "named": [one["rank"] for one in named],
        "percent": percent,
        "after_steps": after,
    }


def late(options: argparse.Namespace) -> int:
    import_once()
    rows, dice = kept("watch_late", options), random.Random(options.seed)
    for _ in range(options.late):
        folder = Path(tempfile.mkdtemp(prefix="late-"))
        row = named_late(dice.randrange(options.ranks), options.ranks, folder)
        shutil.rmtree(folder, ignore_errors=True)
        rows.append({**row, "load": round(os.getloadavg()[0], 1)})
        title = f"One rank computes a tenth longer from step {SLOW_FROM} on"
        keep(
            "watch_late",
            rows,
            options,
            title,
            "python -m bench.faults --late N --ranks R --keep",
            named_soon(rows),
        )
    return 0 if all(soon(row) for row in rows) else 1


def soon(row: Row) -> bool:
    return row["named"] == [row["rank"]] and 0 <= row["after_steps"] <= WITHIN


def named_soon(rows: Sequence[Row]) -> str:
    lines = ["| ranks | slowed | named | by | after steps | load |", "|---|---|---|---|---|---|"]
    for row in rows:
        named, after = (
            ", ".join(map(str, row["named"])) or "nobody",
            row["after_steps"] if row["named"] else "none in 120",
        )
        lines.append(
            f"| {row['ranks']} | rank {row['rank']} | {named} | {row['percent']:.0f}% | {after} | "
            f"{row['load']} |"
        )
    good = [row["after_steps"] for row in rows if soon(row)]
    lines.append(
        f"\n{len(good)} of {len(rows)} named alone and within {WITHIN} steps, median "
        f"{median(good or [-1]):.0f} steps."
    )
    return "\n".join(lines)


# ---------------------------------------------------------------- ordinary training


def ordinary(options: argparse.Namespace) -> int:
    import_once()
    folder = Path(tempfile.mkdtemp(prefix="ordinary-"))
    address, run = ("127.0.0.1", free_port()), folder / "run"
    flags = ["--run.dir", str(run), *ORDINARY, "--stop.deadline_s", str(60 * options.ordinary)]
    began = time.monotonic()
    pids = [
        fork_rank(rank, address, flags, folder / "log", None, None, ranks=options.ranks)
        for rank in range(options.ranks)
    ]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    minutes = (time.monotonic() - began) / 60  # one that is ended early counts for what it was
    log, said = (folder / "log").read_text(errors="replace"), verdict_of(run)
    late = run / "watch" / "late.jsonl"
    row = {
        "minutes": round(minutes, 1), "ranks": options.ranks, "steps": last_step(run),
        "saves": log.count(" sealed: "),
        "evaluations": log.count("eval_loss"), "verdict": said["what"] if said else "", "codes": codes,
        "late": late.read_text().splitlines() if late.exists() else [], "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    if said or any(codes):
        print(log[-3000:])
    shutil.rmtree(folder, ignore_errors=True)
    rows = [*kept("watch_ordinary", options), row]
    keep(
        "watch_ordinary",
        rows,
        options,
        "Ordinary training, compiled, with evaluation and saves: no verdict expected",
        "python -m bench.faults --ordinary MINUTES --ranks R --keep",
        sittings(rows),
    )
    return 1 if said or any(codes) or row["late"] else 0


def last_step(run: Path) -> int:
    file = run / "metrics.jsonl"
    return (
        max((json.loads(line)["step"] for line in file.read_text().splitlines()), default=0)
        if file.exists()
        else 0
    )


def sittings(rows: Sequence[Row]) -> str:
    lines = [
        "| minutes | ranks | steps | evaluations | saves | verdicts | late | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['minutes']:g} | {row['ranks']} | {row['steps']} | {row['evaluations']} | {row['saves']} | "
        f"{row['verdict'] or 'none'} | {len(row['late']) or 'nobody'} | {row['load']} |"
        for row in rows
    ]
    wrong = sum(bool(row["verdict"]) for row in rows)
    late = sum('"over"' not in line for row in rows for line in row["late"])
    whole = sum(row["minutes"] for row in rows)
    return "\n".join(
        [*lines, f"\n{whole:.1f} minutes: {wrong} false verdicts, a rank named late {late} times."]
    )
