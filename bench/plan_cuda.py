"""The planner's peaks beside a CUDA device's own counters, one rank a case, each in its own process.

    python -m bench.plan_cuda              24 configurations drawn from a seed
    python -m bench.plan_cuda --cases 4    fewer
    python -m bench.plan_cuda --worlds 8b@8,8b@64,8b@512,70b@64
                                           one rank, --rank, of recipes/llama-8b.toml and of a 70B model in a
                                           fake process group of so many: collectives do nothing, all else is
                                           real

max_memory_allocated is compared with the plan's tensors, max_memory_reserved with the plan's reserved memory.
cuBLAS's workspaces are part of the counters and not of a plan: they are made small, unless the environment
sets them. Results: plan_cuda.json and plan_cuda.md under --results, of --worlds plan_worlds.*. Host seconds:
what train_step takes to return, without the device's; waits: how often the host waits for the device
meanwhile, as torch counts it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from bench.plan_cases import Case
from bench.plan_real import build, plain_step
from fsdp.base.torch_private import init_fake_group
from fsdp.config import load
from fsdp.plan.estimate import ask_for, memory_of
from fsdp.plan.fake_step import trace_step

RESULTS = Path(__file__).parent / "results"
STEPS = 3
SMALL_WORKSPACES = {
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "128",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as runs
}
"""128 KiB a thread and stream. torch's own are 8 MiB and more, as much as activations of a small case."""


@dataclass(frozen=True)
class Peaks:
    """Bytes."""

    allocated: float
    reserved: float


@dataclass(frozen=True)
class Row:
    case: Case
    planned: Peaks
    measured: Peaks
    host_s: float
    waits: int

    @property
    def errors(self) -> tuple[float, float]:
        return (
            self.planned.allocated / self.measured.allocated - 1,
            self.planned.reserved / self.measured.reserved - 1,
        )


def draw(dice: random.Random, number: int) -> list[Case]:
    return [_one(dice) for _ in range(number)]


def _one(dice: random.Random) -> Case:
    micro, times = dice.choice([1, 2, 4]), dice.choice([1, 1, 3])
    width = dice.choice([768, 1024, 2048])
    words = (
        "--model.name transformer --data.name synthetic --data.args.kind tokens --mesh.strategy fsdp "
        "--speed.compile false --model.args.max_seq_len 1024 "
        f"--data.seq_len {dice.choice([512, 1024])} --data.args.vocab_size {dice.choice([8192, 32000])} "
        f"--model.args.width {width} --model.args.heads {width // 64} "
        f"--model.args.layers {dice.choice([4, 8, 13])} --train.global_batch {micro * times} "
        f"--train.micro_batch {micro} "
    )
    checkpointing, reshard = "--memory.activation_checkpointing", "--mesh.reshard_after_forward"
    words += dice.choice(["", "", f"{checkpointing} full ", f"{checkpointing} ops "])
    words += dice.choice(["", "", "--precision.param fp32 "])
    words += dice.choice(["", f"{reshard} false ", f"{reshard} step "])
    words += dice.choice(["", "", "--optim.name sgd", "--lora.rank 8", "--memory.cpu_offload true"])
    flags = words.split()
    return Case(1, tuple(flags))


def planned(case: Case) -> Peaks:
    """The plan from the flags alone; a bench's batches are not read ahead."""
    config = load([*case.flags, "--plan.gpus", str(case.ranks), "--plan.gpu", "h100"])
    ask, _ = ask_for(config)
    memory = memory_of(trace_step(ask), ask)
    return Peaks(memory.peak, memory.reserved)


def recipe(preset: str, ranks: int) -> Case:
    """One sample a rank, eager, sharded over all ranks; from the root of the checkout. What 80 layers keep is
    recomputed.
    """
    words = (
        "--config recipes/llama-8b.toml --data.name synthetic --data.args.kind tokens --speed.compile false "
        f"--train.global_batch {ranks} --mesh.strategy fsdp --model.preset {preset}"
    )
    full = " --memory.activation_checkpointing full" * (preset == "70b")
    return Case(ranks, tuple((words + full).split()))


def measured(case: Case, rank: int) -> tuple[Peaks, float, int]:
    """Measures in a process that has used no device yet, because reserved memory is never returned."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        if case.ranks > 1:
            init_fake_group(rank, case.ranks)
        else:
            store = dist.FileStore(str(Path(folder, "store")), 1)
            dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
        built = build(case.flags, case.ranks, rank, device)
        batches = built.batches("cuda")
        for _ in range(STEPS):
            torch.cuda.synchronize()
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                began = time.perf_counter()
                plain_step(built.watched.parts, batches, built.micro_batches)
                host_s = time.perf_counter() - began
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        dist.destroy_process_group()
    peaks = Peaks(float(torch.cuda.max_memory_allocated()), float(torch.cuda.max_memory_reserved()))
    return peaks, host_s, sum("synchronizing CUDA operation" in str(one.message) for one in warned)


def measured_alone(case: Case, rank: int) -> tuple[Peaks, float, int]:
    """In a process that ends afterwards."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        return alone.submit(measured, case, rank).result()


def table(rows: list[Row], where: str) -> list[str]:
    lines = [f"# Planned beside a CUDA device's own counters ({where})", ""]
    lines += [
        "| run | allocated, MiB | planned | error | reserved, MiB | planned | error | host s | waits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            f"{m / 2**20:.0f} | {p / 2**20:.0f} | {(p - m) / 2**20:+.0f} MiB, {error:+.2%}"
            for m, p, error in zip(
                asdict(row.measured).values(), asdict(row.planned).values(), row.errors, strict=True
            )
        ]
        lines.append(f"| {row.case} | {' | '.join(cells)} | {row.host_s:.3f} | {row.waits} |")
    for at, name in enumerate(("allocated", "reserved")):
        errors = [abs(row.errors[at]) for row in rows]
        lines += [
            "",
            f"{name}: median error {statistics.median(errors):.2%}, worst {max(errors):.2%} of {len(rows)} "
            f"runs.",
        ]
    return lines


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--worlds", default="", help="models and numbers of ranks, of which one is real")
    parser.add_argument("--rank", type=int, default=0, help="that one")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        told = "bench.plan_cuda: no CUDA device is here. HINT: python -m bench.plan measures on CPU"
        print(told, file=sys.stderr)
        return 2
    os.environ["OMP_NUM_THREADS"] = "1"
    for name, size in SMALL_WORKSPACES.items():
        os.environ.setdefault(name, size)  # read by the processes of the runs, which have used no device yet
    rows, cases = [], draw(random.Random(given.seed), given.cases)
    if given.worlds:
        worlds = (world.split("@") for world in given.worlds.split(","))
        cases = [recipe(preset, int(ranks)) for preset, ranks in worlds]
    with ThreadPoolExecutor(1) as beside:  # one case is measured while others are planned
        for case, peaks in [(case, beside.submit(measured_alone, case, given.rank)) for case in cases]:
            rows.append(Row(case, planned(case), *peaks.result()))
            allocated, reserved = rows[-1].errors
            print(f"{case}: allocated {allocated:+.2%}, reserved {reserved:+.2%}", flush=True)
    lines = table(rows, f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    print("\n".join(lines))
    kept = {"device": torch.cuda.get_device_name(0), "runs": [asdict(row) for row in rows]}
    given.results.mkdir(parents=True, exist_ok=True)
    path = given.results / ("plan_worlds.json" if given.worlds else "plan_cuda.json")
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
