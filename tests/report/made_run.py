"""A run directory as a run leaves it, with every file that the report reads, without having run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsdp.config import load, to_toml
from fsdp.report.__main__ import main

NOON = 1767268800.0
"""2026-01-01 12:00 UTC"""


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def report(*runs: Path, out: Path | None = None) -> str:
    """The page's text."""
    assert main([*map(str, runs), *(["--out", str(out)] if out else [])]) == 0
    return (out or runs[0] / "report.html").read_text()


def made(folder: Path, steps: int = 200, **flags: object) -> Path:
    folder.mkdir(parents=True)
    words = [word for name, value in flags.items() for word in (f"--{name.replace('__', '.')}", str(value))]
    (folder / "config.toml").write_text(to_toml(load(["--optim.lr", "0.004", *words])))
    usual = {"grad_norm": 1.0, "lr": 1e-3, "step_time_s": 0.1, "data_wait_s": 0.004, "per_s": 10.0}
    lines = [{"step": n, "loss": 2 / n, **usual} for n in range(1, steps)]
    write(folder / "metrics.jsonl", [*lines, {"step": steps - 1, "eval_loss": 0.25, "eval_accuracy": 0.9553}])
    first = {
        "event": "start",
        "time": "T1",
        "launcher": "torchrun",
        "nodes": ["a"],
        "ranks": 2,
        "from_step": 0,
    }
    second = first | {"time": "T2", "launcher": "ray", "nodes": ["<b>"], "ranks": 4, "from_step": 50}
    second |= {"changed": ["optim.lr: 1 → <i>2"]}
    end = {"event": "end", "time": "T3", "step": steps - 1, "why": "the last step", "how": "finished"}
    write(folder / "history.jsonl", [first, second, end])
    return folder


def verdict(**more: object) -> dict[str, Any]:
    return {
        "time": NOON + 60, "kind": "stopped", "ranks": [2], "nodes": ["n1"], "step": 412,
        "what": "rank 2 is stopped (SIGSTOP)", "others": "ranks 0, 1, 3 wait in all_gather_single",
        "hint": "kill -CONT 4242 on n1", "folder": "stopped-000412", **more,
    }  # fmt: skip


def watched(run: Path) -> Path:
    """Adds the watch's files and a memory account."""
    watch = run / "watch"
    names, means = ("forward", "backward", "waiting", "optimizer", "data"), (0.02, 0.05, 0.01, 0.004, 0.001)
    times = dict(zip(names, means, strict=True))
    ranks = {"0": times | {"forward": 0.02}, "1": times}
    later = {"0": times, "1": times | {"forward": 0.05, "waiting": 0.0}}
    intervals = [{"from_step": 0, "step": 10, "ranks": ranks}, {"from_step": 10, "step": 30, "ranks": later}]
    write(watch / "timing.jsonl", intervals)
    write(watch / "verdicts.jsonl", [verdict(), {"time": NOON + 61, "kind": "ended", "ranks": [0, 1]}])
    (watch / "stopped-000412").mkdir()
    (watch / "stopped-000412" / "rank-2.txt").write_text('  File "model.py", line 7 in <forward>\n' * 4)
    peak = {"bytes": 3 << 20, "kinds": {"parameters": 1 << 20, "activations": 2 << 20}}
    write(run / "profile" / "rank1_memory.json", [{"format": 1, "rank": 1, "peak": peak}])
    return run
