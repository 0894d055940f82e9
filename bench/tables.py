"""Statistics and files shared by every bench: medians and spread, ratios with their interval, tables,
bench/results.

Rounds are interleaved, so a ratio is taken round by round; reported is its median, with a 95% interval by
bootstrap over rounds. Two contenders whose interval contains 1 are called equal. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp.base import proc

RESULTS = Path(__file__).with_name("results")
RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """An estimate and the 95% interval around it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def verdict(self, more_is_better: bool = True) -> str:
        """The first of two, in a word: better, worse, or equal if the rounds cannot tell."""
        if self.low <= 1 <= self.high:
            return "equal"
        return "better" if (self.low > 1) == more_is_better else "worse"


def bootstrap(
    values: Sequence[float], estimate: Callable[[Sequence[float]], float] = statistics.median
) -> Interval:
    """The estimate over rounds, and its range in 95 of 100 resamplings. The same rounds give the same
    interval.
    """
    draw = random.Random(len(values))
    estimates = sorted(estimate(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    cut = round(0.025 * RESAMPLES)
    return Interval(estimate(values), estimates[cut], estimates[-1 - cut])


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """ours over theirs, round by round."""
    return bootstrap([a / b for a, b in zip(ours, theirs, strict=True)])


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    return bootstrap([a - b for a, b in zip(ours, theirs, strict=True)])


def spread(values: Sequence[float], digits: int = 3) -> str:
    """median (smallest to largest)"""
    if not values:
        return ""
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{short(median, digits)} ({short(least, digits)} to {short(most, digits)})"


def short(value: float, digits: int = 3) -> str:
    """A number with so many digits, without an exponent."""
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if "e+" in text or abs(value) >= 10**digits else text


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def turned(names: Sequence[str], nth: int) -> list[str]:
    """The order of a round: each contender is first, second … equally often."""
    return [*names[nth % len(names) :], *names[: nth % len(names)]]


def machine() -> str:
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = ", ".join(f"{part:.1f}" for part in os.getloadavg())
    today = datetime.datetime.now(datetime.UTC).date()
    cores = f"{len(os.sched_getaffinity(0))} cores ({proc.processor_name() or platform.machine()})"
    return (
        f"{today}: {cores}, {memory:.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}; load before {load}"
    )


def write(
    stem: str,
    *,
    title: str,
    command: str,
    about: str,
    text: str,
    numbers: Mapping[str, Any],
    short: bool = False,
) -> str:
    """Writes Markdown and JSON of one bench; a short form is beside the full one and never replaces it."""
    stem = f"{stem}-short" if short else stem
    page = f"# {title}\n\n`{command}`\n\n{about}\n\n{text}\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{stem}.md").write_text(page, encoding="utf-8")
    record = {"command": command, "about": about, **numbers}
    (RESULTS / f"{stem}.json").write_text(json.dumps(record, indent=1, default=vars) + "\n", encoding="utf-8")
    return page


def standing(stem: str, *, piece: str = "", short: bool = False) -> dict[str, Any]:
    """Earlier results, of one piece or of all; empty without any. --add starts from them."""
    path = RESULTS / f"{stem}{'-short' if short else ''}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found.get("pieces", {}).get(piece, {}) if piece else found


def chosen(
    parser: argparse.ArgumentParser,
    only: str,
    known: Sequence[str],
    otherwise: Sequence[str],
    needs: Sequence[str] = ("bare",),
) -> list[str]:
    """The contenders that --only names, or the defaults; with those that the others are compared with."""
    names = only.split(",") if only else list(otherwise)
    for name in names:
        if name not in known:
            parser.error(
                f"--only: {name!r} is no contender here. HINT: --only {','.join(known)}, or some of them"
            )
    if missing := [name for name in needs if name not in names]:
        parser.error(
            f"--only: the others are compared with {missing[0]}. HINT: --only {','.join([*missing, *names])}"
        )
    return names


def check_add(
    parser: argparse.ArgumentParser, before: Mapping[str, Any] | None, names: Sequence[str]
) -> None:
    """Rounds are added for all contenders alike: otherwise ratios would come from different rounds."""
    if before and set(before) != set(names):
        parser.error(
            f"--add: what stands has {','.join(before)}, these are {','.join(names)}. HINT: --only "
            f"{','.join(before)}"
        )


def joined(before: str, now: str) -> str:
    """Machine and load of rounds taken in several calls."""
    return f"{before}; then {now.rpartition('load ')[1]}{now.rpartition('load ')[2]}" if before else now


def write_piece(
    stem: str,
    key: str,
    *,
    title: str,
    piece_title: str,
    command: str,
    about: str,
    text: str,
    notes: str,
    numbers: Mapping[str, Any],
    short: bool = False,
) -> None:
    """Replaces one section of a bench that runs in parts; the others stay as they were measured."""
    path = RESULTS / f"{stem}{'-short' if short else ''}.json"
    kept = json.loads(path.read_text())["pieces"] if path.exists() else {}
    kept[key] = {"title": piece_title, "command": command, "about": about, "text": text, **numbers}
    kept = dict(sorted(kept.items()))
    sections = [
        f"## {one['title']}\n\n`{one['command']}`\n\n{one['about']}\n\n{one['text']}" for one in kept.values()
    ]
    RESULTS.mkdir(exist_ok=True)
    path.with_suffix(".md").write_text(
        f"# {title}\n\n" + "\n\n".join([*sections, notes]) + "\n", encoding="utf-8"
    )
    path.write_text(json.dumps({"pieces": kept}, indent=1, default=vars) + "\n", encoding="utf-8")
