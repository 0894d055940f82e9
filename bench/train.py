"""Training throughput, host time a step and peak memory: shardrun beside every contender that runs here.

    python -m bench.train                            all works at 2 and 4 ranks; about half an hour
    python -m bench.train --work decoder --ranks 2   one piece; the other rows of bench/results/train.* stay
    python -m bench.train --short                    two works, few rounds, few contenders

All contenders of a piece are started once and take turns of some steps, in an order that rotates with each
round: the same weights, samples, global batch, dtype, optimizer and threads. shardrun runs its own loop with
everything it writes; the others are loops that write nothing, with batches made beforehand. Ratios are taken
within a round. Memory is measured in separate processes, set to return freed blocks, above what each holds
when its packages are imported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import tables
from bench.peers.roster import ROSTER, absent, ready, settings
from bench.peers.team import Team, TeamError
from bench.peers.work import WORKS, Place
from fsdp.base import devices
from fsdp.run.job import flops_per_sample, meta_model

PIECES = (("tiny", 2), ("tiny", 4), ("vit", 2), ("vit", 4), ("decoder", 2), ("decoder", 4), ("100m", 2))
ON_CUDA = (("124m-cuda", 1), ("1b-cuda", 1), ("1b8-cuda", 1), ("hf-cuda", 1))
NEEDED = ("ours",)
TURN = {"tiny": 20, "hf-tiny": 4, "vit": 4, "decoder": 2, "100m": 1} | {work: 10 for work, _ in ON_CUDA}
"""Steps of a turn."""
SHORT = {"tiny": ("bare", "ours", "accelerate", "fabric"), "decoder": ("bare", "ours")}
UNTIMED = 10
"""Steps before each turn on a device. Ours reports its steps at every tenth, ten at once: as many are ten
steps for it too.
"""
WARM = 3
SAME, BF16_SAME = 2e-4, 2e-3
"""Largest relative difference of the first losses. In bf16 updates round the gradients of other kernels."""
WEIGHINGS = {"100m": 6}
"""How often memory is weighed, where not once: a percent is asked for there, and one start differs from the
next by as much.
"""


@dataclass
class Seen:
    """One contender's rounds."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peaks_mib: list[float] = field(default_factory=list)


def measure(
    work: str, ranks: int, names: Sequence[str], rounds: int, threads: int, left_out: list[str] | None = None
) -> dict[str, Seen]:
    """No round starts unless the first steps of all are the same work. With `left_out` a contender that
    cannot start, or does other work, is named there and the others go on; the first and ours never are.
    """
    teams: dict[str, Team] = {}
    try:
        for name in names:
            teams[name] = Team(name, work, ranks, threads=threads)
        seen = started(teams, BF16_SAME if WORKS[work].cuda else SAME, left_out)
        for nth in range(rounds):
            for name in tables.turned(list(seen), nth):
                turn = teams[name].steps(TURN[work], UNTIMED if WORKS[work].cuda else 0)
                seen[name].wall_s.append(turn["wall_s"])
                seen[name].cpu_s.append(turn["cpu_s"])
    finally:
        for team in teams.values():
            team.close()
    return seen


def started(teams: dict[str, Team], bound: float, left_out: list[str] | None) -> dict[str, Seen]:
    """Each contender after its first steps, before ours the first of the others, which is bare where that
    takes part: its losses are those that all must have, or the figures mean nothing.
    """
    seen: dict[str, Seen] = {}
    base = next(name for name in ("bare", *teams) if name in teams and name not in NEEDED)
    for name in sorted(teams, key=lambda name: name != base):
        try:
            losses = teams[name].steps(WARM)["losses"]
            most = ROSTER[name].bound or bound
            check_same(name, losses, seen[base].losses if seen else losses, most, base)
        except (TeamError, OtherWork) as error:
            if left_out is None or name in (base, *NEEDED):
                raise
            first, *more = str(error).splitlines()
            why = " ".join([first.partition(" HINT")[0], *more[-1:]])
            left_out.append(f"{ROSTER[name].label}: left out, {why}")
            teams.pop(name).close()
        else:
            seen[name] = Seen(losses=losses)
    return {name: seen[name] for name in teams}


def weigh(work: str, ranks: int, seen: dict[str, Seen], threads: int) -> None:
    """Each contender's peak memory, in separate processes."""
    for nth in range(WEIGHINGS.get(work, 1)):
        for name in tables.turned(list(seen), nth):
            with Team(name, work, ranks, threads=threads, honest_memory=True) as team:
                team.steps(WARM)
                seen[name].peaks_mib.append(team.memory(WARM)["peak_mib"])


class OtherWork(SystemExit):
    """A contender does not train as the others do."""


def check_same(name: str, losses: Sequence[float], wanted: Sequence[float], bound: float, base: str) -> None:
    for step, (theirs, own) in enumerate(zip(wanted, losses, strict=True), start=1):
        if not abs(theirs - own) <= bound * abs(theirs):
            hint = "python -m fsdp.parity" if name == "ours" else f"--only {base},ours leaves it out"
            raise OtherWork(
                f"{name} has loss {own} at step {step}, {base} {theirs}: not the same work. HINT: {hint}"
            )


def rows(seen: dict[str, Seen], samples: int) -> list[dict[str, Any]]:
    found = []
    for name, one in seen.items():
        own = "ours" if ROSTER[name].shards or "ours-ddp" not in seen else "ours-ddp"
        row: dict[str, Any] = {
            "name": name, "per_s": [samples / wall for wall in one.wall_s],
            "step_ms": [1e3 * wall for wall in one.wall_s],
            "cpu_ms": [1e3 * cpu for cpu in one.cpu_s], "peaks_mib": one.peaks_mib,
        }  # fmt: skip
        if name not in ("ours", "ours-ddp"):
            row["ours_over_it"] = tables.ratio(one.wall_s, seen[own].wall_s)
            row["cpu_over_it"] = tables.ratio(seen[own].cpu_s, one.cpu_s)
            if one.peaks_mib:
                row["memory_over_it"] = tables.ratio(seen[own].peaks_mib, one.peaks_mib)
        found.append(row)
    return found


def shown(found: list[dict[str, Any]], work: str) -> str:
    lines, unit = [], WORKS[work].unit
    for row in found:
        over, cpu = row.get("ours_over_it"), row.get("cpu_over_it")
        cells = [ROSTER[row["name"]].label, tables.spread(row["per_s"]) + _share(work, row["per_s"])]
        cells += [f"{statistics.median(row[times]):.1f}" for times in ("step_ms", "cpu_ms")]
        cells += [over.judged() if over else "", cpu.judged(more_is_better=False) if cpu else ""]
        lines.append([*cells, _peak(row)])
    columns = f",{unit}/s,step ms,processor ms a rank,ours/its throughput,ours/its processor,peak MiB a rank"
    return tables.table(columns.split(","), lines)


def _peak(row: dict[str, Any]) -> str:
    peaks, over = row["peaks_mib"], row.get("memory_over_it")
    if len(peaks) < 2:
        return "".join(f"{one:.0f}" for one in peaks)
    return tables.spread(peaks, 4) + (f"; ours/its {over.judged(more_is_better=False)}" if over else "")


def _share(work: str, per_s: Sequence[float]) -> str:
    of_peak = mfu(work, statistics.median(per_s))
    return "" if of_peak is None else f", MFU {of_peak:.1%}"


def piece(work: str, ranks: int, names: list[str], options: argparse.Namespace) -> None:
    """Timings are written before memory is measured, which starts every contender again."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    print(f"\n{WORKS[work].what}; {ranks} ranks", flush=True)
    about = tables.machine()
    left_out: list[str] = []
    seen = measure(work, ranks, names, options.rounds, threads, left_out=left_out)
    for line in left_out:
        print(line, flush=True)
    write(work, ranks, threads, seen, about, options, left_out)
    if not options.no_memory and work != "tiny":
        weigh(work, ranks, seen, threads)
        write(work, ranks, threads, seen, about, options, left_out)
    print(f"{about}\n\n{shown(rows(seen, Place(WORKS[work], 0, ranks).samples_a_step), work)}", flush=True)


def _key(work: str, ranks: int, options: argparse.Namespace) -> str:
    return f"{work}@{ranks} {options.only}".strip()


def write(
    work: str,
    ranks: int,
    threads: int,
    seen: dict[str, Seen],
    about: str,
    options: argparse.Namespace,
    left_out: Sequence[str],
) -> None:
    found, rounds = rows(seen, Place(WORKS[work], 0, ranks).samples_a_step), len(seen["ours"].wall_s)
    title = (
        f"{WORKS[work].what}; {ranks} ranks, {threads} threads each, {rounds} rounds of {TURN[work]} steps"
    )
    command = f"python -m bench.train --work {work} --ranks {ranks} --rounds {rounds}"
    command += f" --only {options.only}" * bool(options.only) + " --no-memory" * options.no_memory
    tables.write_piece(
        "train",
        _key(work, ranks, options),
        short=options.short,
        title="Training side by side",
        piece_title=title,
        command=command,
        about=about,
        text=shown(found, work),
        numbers={"rows": found},
        notes="\n".join(f"- {line}" for line in [*settings(list(ROSTER)), *absent(list(ROSTER)), *left_out]),
    )


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def mfu(work: str, per_s: float) -> float | None:
    """Over the device's dense bf16 rate, as a run counts it."""
    import torch

    if not WORKS[work].cuda:
        return None
    device = devices.find(torch.cuda.get_device_name())
    job = Place(WORKS[work], 0, 1).job
    operations = flops_per_sample(meta_model(job.spec), job.data) / job.data.info.tokens_per_sample
    return per_s * operations / (1e12 * device.bf16_tflops) if device is not None else None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", choices=list(WORKS), help="one work alone, with --ranks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=0, help="0 is 20, or 4 with --short")
    parser.add_argument("--only", default="", help="these contenders: bare,ours,fabric")
    parser.add_argument("--no-memory", action="store_true", help="without the second start of each")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args(argv)
    if options.work:
        pieces = [(options.work, options.ranks)]
    else:
        pieces = [(work, 2) for work in SHORT] if options.short else [*PIECES, *(ON_CUDA if _cuda() else ())]
    options.rounds = options.rounds or (4 if options.short else 20)
    for work, ranks in pieces:
        few = SHORT.get(work, SHORT["tiny"]) if options.short else ROSTER
        names = tables.chosen(parser, options.only, list(ROSTER), list(few), needs=NEEDED)
        names = [name for name in names if ranks == 1 or not ROSTER[name].one_rank]
        if names == ["ours"]:
            parser.error("--only ours: the ratios need another. HINT: --only bare,ours")
        there = ready(names)
        for line in absent([name for name in names if name not in there]):
            print(line, flush=True)
        piece(work, ranks, there, options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
