"""Statistics and files shared by every bench: medians and spread, ratios with their interval, tables,
bench/results.

Rounds are interleaved, so a ratio is taken round by round; reported is its median, with a 95% interval from
order statistics: it makes no assumption about the noise, and its coverage is tested by simulation
(tests/bench/test_tables.py). Fewer than six rounds have no such interval. Two contenders whose interval
contains 1 are called equal. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench import processes

T = TypeVar("T")
RESULTS = Path(__file__).with_name("results")
CONFIDENCE = 0.95
LEAST_ROUNDS = 6
"""With five rounds the median is outside of all of them in 1 of 16 cases: no 95% interval exists."""
TOO_FEW = f"no interval below {LEAST_ROUNDS} rounds"


@dataclass(frozen=True)
class Interval:
    """A median over rounds and its 95% interval; without low and high where the rounds are too few."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return self.text(".3f")

    def text(self, form: str) -> str:
        if self.low is None or self.high is None:
            return format(self.value, form)
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"

    def verdict(self, more_is_better: bool = True, same: float = 1.0) -> str:
        """The first of two, in a word: better, worse, or equal where the interval contains `same`."""
        if self.low is None or self.high is None:
            return f"({TOO_FEW})"
        if self.low <= same <= self.high:
            return "equal"
        return "better" if (self.low > same) == more_is_better else "worse"

    def judged(self, form: str = ".3f", *, more_is_better: bool = True, same: float = 1.0) -> str:
        return f"{self.text(form)} {self.verdict(more_is_better, same)}"


def median_interval(values: Sequence[float]) -> Interval:
    """The median and its 95% interval, interpolated between order statistics (Hettmansperger and Sheather,
    1986).

    From the k-th smallest to the k-th largest value the median is covered with a probability that follows
    from the binomial distribution alone, whatever the noise is. The interval is between the two neighbouring
    k of which one covers more than 95% and one less.
    """
    rounds, middle = len(values), statistics.median(values)
    if rounds < LEAST_ROUNDS:
        return Interval(middle)
    k = 1
    while _coverage(rounds, k + 1) >= CONFIDENCE:
        k += 1
    wide, narrow, ordered = _coverage(rounds, k), _coverage(rounds, k + 1), sorted(values)
    part = (wide - CONFIDENCE) / (wide - narrow)
    inward = (rounds - k) * part / (k + (rounds - 2 * k) * part)
    low = (1 - inward) * ordered[k - 1] + inward * ordered[k]
    high = (1 - inward) * ordered[-k] + inward * ordered[-k - 1]
    return Interval(middle, low, high)


@functools.cache
def _coverage(rounds: int, k: int) -> float:
    """The probability that the median is between the k-th smallest and the k-th largest of so many rounds."""
    return 1 - 2 * sum(math.comb(rounds, below) for below in range(k)) / 2**rounds


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """ours over theirs, round by round."""
    return median_interval([a / b for a, b in zip(ours, theirs, strict=True)])


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """ours less theirs, round by round. Equal is an interval over 0."""
    return median_interval([a - b for a, b in zip(ours, theirs, strict=True)])


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


def turned(names: Sequence[T], nth: int) -> list[T]:
    """The order of a round: each contender is first, second … equally often."""
    return [*names[nth % len(names) :], *names[: nth % len(names)]]


def machine() -> str:
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = ", ".join(f"{part:.1f}" for part in os.getloadavg())
    today = datetime.datetime.now(datetime.UTC).date()
    commit = checked_out()
    cores = f"{len(os.sched_getaffinity(0))} cores ({processes.processor_name() or platform.machine()})"
    return (
        f"{today}: {cores}, {memory:.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}{commit and f', commit {commit}'}; "
        f"load before {load}"
    )


def checked_out() -> str:
    """The commit of this tree, with + where files differ from it; empty outside of a git checkout."""
    here = RESULTS.parent
    try:
        name, changed = (
            subprocess.run(
                ["git", "-C", str(here), *words], capture_output=True, text=True, check=True
            ).stdout
            for words in (
                ("rev-parse", "--short", "HEAD"),
                ("status", "--porcelain", "--", ".", ":!results", "../fsdp"),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return name.strip() + "+" * bool(changed.strip())


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
    """Replaces one section of a bench that runs in parts; the others stay as they were measured. A piece's
    `remark`, of what to keep in mind with older figures, ends its section.
    """
    path = RESULTS / f"{stem}{'-short' if short else ''}.json"
    kept = json.loads(path.read_text())["pieces"] if path.exists() else {}
    kept[key] = {"title": piece_title, "command": command, "about": about, "text": text, **numbers}
    sections = [
        "\n\n".join(
            [f"## {one['title']}", f"`{one['command']}`", one["about"], one["text"]]
            + ([one["remark"]] if one.get("remark") else [])
        )
        for _, one in sorted(kept.items())
    ]
    RESULTS.mkdir(exist_ok=True)
    page = "\n\n".join([f"# {title}", *sections, *([notes] if notes else [])]) + "\n"
    path.with_suffix(".md").write_text(page, encoding="utf-8")
    path.write_text(json.dumps({"pieces": kept}, indent=1, default=vars) + "\n", encoding="utf-8")
