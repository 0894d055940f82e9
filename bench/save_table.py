"""Report and table from what the ranks of `python -m bench.save` measured. Pure, except for machine()."""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.save_rank import SIZES
from fsdp.base import proc


def summarise(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """A step's time is its slowest rank's, and so is a stall's."""
    rows = {
        way: _row([result["ways"][way] for result in results], [r["ways"]["none"] for r in results])
        for way in options.ways
    }
    memory = [max(values) for values in zip(*(result["memory_mib"] for result in results), strict=True)]
    load = {
        key: max(result["load"][key] for result in results)
        for key in ("ours_s", "dcp_s", "unique_bytes", "state_mib")
    }
    load |= {key: sum(result["load"][key] for result in results) for key in ("ours_bytes", "dcp_bytes")}
    return {
        "machine": machine(), "torch": torch.__version__, "ranks": len(results),
        "parameters": results[0]["parameters"],
        "rounds": options.rounds, "save_every": SIZES[options.size].every, "ways": rows, "memory_mib": memory,
        "load": load,
    }  # fmt: skip


def _row(ranks: Sequence[dict[str, Any]], none: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Compares round by round with the steps of the same round without a save."""
    steps = [max(times) for times in zip(*(rank["steps_s"] for rank in ranks), strict=True)]
    cuts = statistics.quantiles(steps, n=100)

    def against_none(key: str, compare: Callable[[float, float], float]) -> float:
        pairs = [zip(rank[key], base[key], strict=True) for rank, base in zip(ranks, none, strict=True)]
        return max(statistics.median(compare(a, b) for a, b in pair) for pair in pairs)

    return {
        "stall_s": max(sum(rank["stalls_s"]) for rank in ranks) / max(1, len(ranks[0]["rounds_s"])),
        "p50_s": cuts[49],
        "p99_s": cuts[98],
        "mean_s": statistics.fmean(steps),
        "inflation": against_none("rounds_s", lambda a, b: a / b - 1),
        **_interval(ranks, none),
        "cpu_s": against_none("cpu_s", lambda a, b: a - b),
    }


def _interval(ranks: Sequence[dict[str, Any]], none: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The mean step over that of the rounds without a save, minus one: 95% of resampled rounds are between
    low and high.
    """

    def slowest(of: Sequence[dict[str, Any]]) -> list[float]:
        return [max(times) for times in zip(*(rank["rounds_s"] for rank in of), strict=True)]

    ours, base, dice = slowest(ranks), slowest(none), random.Random(0)
    ratios = []
    for _ in range(2000):
        drawn = dice.choices(range(len(ours)), k=len(ours))
        ratios.append(sum(ours[i] for i in drawn) / sum(base[i] for i in drawn) - 1)
    cuts = statistics.quantiles(ratios, n=40)
    return {"low": cuts[0], "high": cuts[-1]}


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": proc.processor_name() or platform.processor(), "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "load_average": os.getloadavg()[0], "when": time.strftime("%Y-%m-%d %H:%M"),
    }  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    about, rows, load = report["machine"], report["ways"], report["load"]
    reference = rows["dcp.save"]["stall_s"] if "dcp.save" in rows else 0.0
    lines = [
        f"# Saving and loading {report['parameters'] / 1e6:.0f}M parameters with Adam on {report['ranks']} "
        f"ranks",
        "",
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, torch {report['torch']}, "
        f"{about['when']}, "
        f"load average {about['load_average']:.1f} at the end; {report['rounds']} rounds, "
        f"a save every {report['save_every']} steps.",
        "",
        "| way | step held up, s a save | of dcp.save's | step p50, s | p99, s | mean, s | inflation, "
        "median of rounds | "
        "of the mean, 95% | processor, s a save and rank |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for way, row in rows.items():
        share = (
            f"1/{reference / row['stall_s']:.0f}" if way != "none" and 0 < row["stall_s"] < reference else "—"
        )
        lines.append(
            f"| {way} | {row['stall_s']:.4f} | {share} | {row['p50_s']:.3f} | {row['p99_s']:.3f} | "
            f"{row['mean_s']:.3f} | "
            f"{row['inflation']:+.1%} | {row['low']:+.1%} to {row['high']:+.1%} | {row['cpu_s']:+.2f} |"
        )
    memory = report["memory_mib"]
    if "dcp.async_save process" in rows:
        lines += ["", "The process of dcp.async_save's process mode is not in the last column."]
    lines += [
        "",
        f"Load: ours {load['ours_s']:.2f} s, every byte verified; dcp.load {load['dcp_s']:.2f} s. Bytes "
        f"read over bytes there: "
        f"ours {load['ours_bytes'] / load['unique_bytes']:.3f}, dcp.load "
        f"{load['dcp_bytes'] / load['unique_bytes']:.3f}.",
        "",
        f"Memory of a save, at most over {len(memory)} of them: {max(memory):.0f} MiB above none, where a "
        f"rank's own state is "
        f"{load['state_mib']:.0f} MiB; after the first {memory[0]:.0f}, after the last {memory[-1]:.0f}.",
        "",
    ]
    return "\n".join(lines)
