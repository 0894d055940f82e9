"""Report and table from what the ranks of `python -m bench.save` measured. Pure, except for machine()."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench import processes, tables
from bench.save_rank import SIZES


def summarise(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """A step's time is its slowest rank's, and so is a stall's."""
    rows = {
        way: _row([result["ways"][way] for result in results], [r["ways"]["none"] for r in results])
        for way in options.ways
    }
    memory = [max(values) for values in zip(*(result["memory_mib"] for result in results), strict=True)]
    load: dict[str, Any] = {
        key: max(result["load"][key] for result in results) for key in ("unique_bytes", "state_mib")
    }
    for key in ("ours_s", "dcp_s"):
        load[key] = [max(times) for times in zip(*(result["load"][key] for result in results), strict=True)]
    load |= {key: sum(result["load"][key] for result in results) for key in ("ours_bytes", "dcp_bytes")}
    command = (
        f"python -m bench.save --size {options.size} --rounds {options.rounds} --saves {options.saves} "
        f"--ways '{','.join(options.ways)}' --run.device {options.device}"
    )
    return {
        "command": command, "machine": machine(), "torch": torch.__version__, "ranks": len(results),
        "parameters": results[0]["parameters"],
        "rounds": options.rounds, "save_every": SIZES[options.size].every, "ways": rows, "memory_mib": memory,
        "load": load, "alone": {k: min(r["alone"][k] for r in results) for k in results[0]["alone"]},
    }  # fmt: skip


def _row(ranks: Sequence[dict[str, Any]], none: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Processor time is compared round by round with the same round without a save."""
    steps = [max(times) for times in zip(*(rank["steps_s"] for rank in ranks), strict=True)]
    rounds = [max(means) for means in zip(*(rank["rounds_s"] for rank in ranks), strict=True)]
    cuts = statistics.quantiles(steps, n=100)

    def against_none(key: str, compare: Callable[[float, float], float]) -> float:
        pairs = [zip(rank[key], base[key], strict=True) for rank, base in zip(ranks, none, strict=True)]
        return max(statistics.median(compare(a, b) for a, b in pair) for pair in pairs)

    return {
        "stall_s": max(sum(rank["stalls_s"]) for rank in ranks) / max(1, len(ranks[0]["rounds_s"])),
        "p50_s": cuts[49],
        "p99_s": cuts[98],
        "mean_s": statistics.fmean(rounds),
        "rounds_s": rounds,
        "cpu_s": against_none("cpu_s", lambda a, b: a - b),
    }


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": processes.processor_name() or platform.processor(), "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1), "commit": tables.checked_out(),
        "load_average": os.getloadavg()[0], "when": time.strftime("%Y-%m-%d %H:%M"),
    }  # fmt: skip


ALLOCATOR = (
    "All ways return freed memory at once (`MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` 131072), so "
    "that it can be measured; large allocations of steps and saves take longer with it."
)
COLUMNS = (
    "way|mean step, s|over that without saves|the steps together longer by, s a save, median, 95%|"
    "round over round, median, 95%|a step held up, s|step p50, s|p99, s|processor, s a save and rank"
)


def markdown(report: dict[str, Any]) -> str:
    """The whole cost of a save first, which is what the steps take longer with saves; the stall within it
    second.
    """
    about, rows = report["machine"], report["ways"]
    commit = f"commit {about['commit']}, " if about.get("commit") else ""
    lines = [
        f"# Saving and loading {report['parameters'] / 1e6:.0f}M parameters with Adam on {report['ranks']} "
        f"ranks",
        "",
        f"`{report['command']}`",
        "",
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, torch {report['torch']}, "
        f"{commit}{about['when']}, load average {about['load_average']:.1f} at the end; "
        f"{report['rounds']} rounds, a save every {report['save_every']} steps.",
        "",
        tables.table(COLUMNS.split("|"), [_cells(way, report) for way in rows]),
    ]
    rates = ", ".join(f"{way} {rate:.2f}" for way, rate in report["alone"].items())
    lines += [*_against_others(rows), "", f"One save without steps, GiB a second of a rank: {rates}."]
    lines += ["", ALLOCATOR]
    lines += ["", _load_text(report["load"]), "", _memory_text(report["memory_mib"], report["load"])]
    return "\n".join([*lines, ""])


def _cells(way: str, report: dict[str, Any]) -> list[str]:
    row, none = report["ways"][way], report["ways"]["none"]
    first = [way, f"{row['mean_s']:.3f}"]
    last = [f"{row[key]:.3f}" for key in ("p50_s", "p99_s")]
    if way == "none":
        return [*first, "", "", "", "", *last, ""]
    return [
        *first,
        f"{row['mean_s'] / none['mean_s']:.3f}",
        added_a_save(row, none, report["save_every"]).text("+.2f"),
        _round_over_round(row, none),
        f"{row['stall_s']:.4f}",
        *last,
        f"{row['cpu_s']:+.2f}",
    ]


def _round_over_round(row: dict[str, Any], none: dict[str, Any]) -> str:
    """The mean step of a round over that of the same round without a save."""
    return against_none(row, none).judged(more_is_better=False)


def against_none(row: dict[str, Any], none: dict[str, Any]) -> tables.Interval:
    return tables.ratio(row["rounds_s"], none["rounds_s"])


def added_a_save(row: dict[str, Any], none: dict[str, Any], every: int) -> tables.Interval:
    """Seconds, round by round."""
    return tables.difference([every * s for s in row["rounds_s"]], [every * s for s in none["rounds_s"]])


def _against_others(rows: dict[str, Any]) -> list[str]:
    others = [way for way in rows if way.startswith("dcp")]
    if not others or "ours" not in rows:
        return []
    over = {way: tables.ratio(rows["ours"]["rounds_s"], rows[way]["rounds_s"]) for way in others}
    said = [f"{ratio.judged(more_is_better=False)} over {way}" for way, ratio in over.items()]
    return ["", f"Mean steps with ours, round over round: {'; '.join(said)}."]


def _load_text(load: dict[str, Any]) -> str:
    over = tables.ratio(load["ours_s"], load["dcp_s"]).judged(more_is_better=False)
    read = {key: load[f"{key}_bytes"] / load["unique_bytes"] for key in ("ours", "dcp")}
    return (
        f"Load, s: ours {tables.spread(load['ours_s'])}, every byte verified; dcp.load "
        f"{tables.spread(load['dcp_s'])}; ours over it {over}. "
        f"Bytes read over bytes there: ours {read['ours']:.3f}, dcp.load {read['dcp']:.3f}."
    )


def _memory_text(memory: Sequence[float], load: dict[str, Any]) -> str:
    return (
        f"Memory of a save, at most over {len(memory)} of them: {max(memory):.0f} MiB above none, where a "
        f"rank's own state is {load['state_mib']:.0f} MiB; after the first {memory[0]:.0f}, after the last "
        f"{memory[-1]:.0f}."
    )
