"""A page of each kind, from made-up numbers: what the tests of pages open, without a run.

python -m tests.support.pages FOLDER
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from fsdp.checkpoint.run_source import RunSource
from fsdp.config import load
from fsdp.dist.mesh import MeshSizes
from fsdp.doctor.findings import NodeReports, judge
from fsdp.doctor.table import page as doctor_page
from fsdp.memory.oom_advice import Advice, Suggestion
from fsdp.memory.oom_page import html_page as oom_page
from fsdp.memory.profile_page import page as memory_page
from fsdp.plan.estimate import Plan
from fsdp.plan.memory import Memory
from fsdp.plan.page import page as plan_page
from fsdp.plan.rates import rates_for
from fsdp.plan.step_time import Step
from fsdp.report.__main__ import read_runs
from fsdp.report.page import page as report_page
from tests.doctor.test_findings import facts, report
from tests.report.test_browser import LONG, PICTURES, full
from tests.report.test_memory_page import account
from tests.report.test_report import made
from tests.support.oom import oom_facts

GIB = 2**30
PLANNED = ["--model.name transformer", "--plan.gpu h100", "--train.global_batch 64"]
FLAGS = ["--optim.lr 3e-4", "--mesh.reshard_after_forward false", "--memory.activation_checkpointing full"]


def doctor(ranks: int, a_node: int = 8) -> NodeReports:
    """Ranks of which one is slow, one did not start, and a link and a disk are slow."""
    nodes = [list(range(first, first + a_node)) for first in range(0, ranks, a_node)]
    hosts = [f"node-{n:03}" for n in range(len(nodes))]
    by_rank = {}
    for node, members in enumerate(nodes):
        for rank in members:
            seen = report(0)
            seen["facts"] = facts(0, node=node, host=hosts[node]) | {"rank": rank}
            seen["device"]["tflops"] = 700.0 * (1 + 0.03 * math.sin(rank * 7.3))
            link = dict(seen["links"]["within"])
            seen["links"]["between"] = {
                str(n % len(nodes)): {**link, "gather_gb_s": 12.0 if {node, n} == {2, 3} else 40.0 + node % 5}
                for n in (node - 1, node + 1)
            }
            seen["ports"] = {}
            seen["storage"]["write_mb_s"] = 90.0 if node == 5 else 500.0 + node % 7
            by_rank[rank] = seen
    by_rank[ranks // 3]["device"]["tflops"] = 410.0
    del by_rank[ranks - 1]
    return NodeReports(by_rank, nodes, hosts, {})


def oom() -> str:
    kinds = {"parameters": 9, "gradients": 9, "optimizer": 18, "activations": 33, "gathered": 4}
    known = oom_facts(
        rank=3,
        ranks=8,
        host="node-001",
        device="cuda:3",
        step=12,
        error="CUDA out of memory. Tried to allocate 6.00 GiB. GPU 3 has a total capacity of 79.10 GiB.",
        kinds={kind: size * GIB for kind, size in kinds.items()},
        held=73 * GIB,
        requested=6 * GIB,
        allocator={"reserved": 77 * GIB, "allocated": 73 * GIB, "free": GIB, "total": 79 * GIB},
        limits={"the cgroup": 400 * GIB},
        run="text-8b",
        flags=FLAGS,
    )
    advice = Advice(
        {**{kind: size * GIB for kind, size in kinds.items()}, "communication": 8 * GIB},
        8 * GIB,
        Suggestion("--train.micro_batch 1", 20 * GIB, "fewer samples at once: lower throughput"),
        True,
        [Suggestion("--memory.activation_checkpointing full", 27 * GIB, "about a third more computation")],
    )
    return oom_page(known, advice, "Activations were estimated on fake tensors.")


def plans() -> list[Plan]:
    """Twelve plans between small and slow, and large and fast; the largest do not fit."""
    config = load(["--model.name", "transformer", "--plan.gpu", "h100", "--train.global_batch", "64"])
    rates, found = rates_for(config), []
    for nth in range(12):
        size = (18.0 + 7 * nth) * GIB
        parts = {"parameters": 0.2, "optimizer": 0.3, "gradients": 0.1, "activations": 0.35, "buffers": 0.05}
        kinds = {kind: share * size * 0.9 for kind, share in parts.items()}
        memory = Memory(size * 0.9, size, kinds, {}, "backward of block 1 of 2", size / 3, 0.0, size / 2)
        step = Step(seconds=1.9 - 0.1 * nth + 0.15 * (nth % 3), flops=5e14, model_flops=5e14)
        mesh = dataclasses.replace(config.mesh, reshard_after_forward="false" if nth % 2 else "true")
        sizes = MeshSizes("fsdp", 1, 16)
        found.append(
            Plan(
                dataclasses.replace(config, mesh=mesh),
                sizes,
                1 + nth % 4,
                1,
                memory,
                step,
                rates,
                size,
                64,
                4096,
                0.03,
            )
        )
    return sorted(found, key=lambda plan: (not plan.fits, plan.step.seconds))


def reports(folder: Path) -> Callable[[str], str]:
    one, two = full(folder / LONG), made(folder / "other", optim__beta2=0.9)
    three = made(folder / "third", steps=120, optim__lr=0.001)
    runs = {"report": [one], "compare": [one, two], "sweep": [one, two, three]}
    return lambda name: report_page(
        read_runs([RunSource(run) for run in runs[name]]), [PICTURES], folder=folder
    )


def doctor_text(ranks: int) -> str:
    found = doctor(ranks)
    return doctor_page(found, judge(found), 21.0)


def texts(folder: Path) -> Mapping[str, Callable[[], str]]:
    """Name → a function that makes the page."""
    of_runs = reports(folder)
    profile = {**account(), "run": "text-8b", "flags": FLAGS}
    return {
        **{name: partial(of_runs, name) for name in ("report", "compare", "sweep")},
        "memory": lambda: memory_page(profile),
        "oom": oom,
        "plan": lambda: plan_page(plans(), ["16 × h100, 79.1 GiB each, margin 5%"], PLANNED),
        **{f"doctor-{ranks}": partial(doctor_text, ranks) for ranks in (64, 1024)},
    }


NAMES = ("report", "compare", "sweep", "memory", "oom", "plan", "doctor-64", "doctor-1024")


def write(folder: Path) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, made_by in texts(folder).items():
        files[name] = folder / f"{name}.html"
        files[name].write_text(made_by(), encoding="utf-8")
    return files


if __name__ == "__main__":
    for file in write(Path(sys.argv[1])).values():
        print(file)
