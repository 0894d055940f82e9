"""The parts of bench.gpu, in order of value: each runs the product's own commands and returns its figures.

A part raises Failed if its claim does not hold and NotPossible if this machine cannot run it. Not here: time
limits, the table, the files of results (gpu.py).
"""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.gpu_runs import (
    ALONE,
    MODEL,
    QUIET,
    Bench,
    Failed,
    NotPossible,
    Ran,
    apart,
    digests,
    ended,
    kill,
    need,
)

Figures = Mapping[str, Any]
VECTORS = ("--model.name", "mlp", "--model.args.in_features", "64", "--train.global_batch", "16", *ALONE)


@dataclass(frozen=True)
class Part:
    """`run` returns figures; it is killed after `limit_s`."""

    name: str
    claim: str
    limit_s: float
    run: Callable[[Bench], Figures]


def too_many_ranks(bench: Bench) -> Figures:
    bench.need_cuda("more ranks than GPUs cannot be started")
    import torch

    ranks = torch.cuda.device_count() + 1
    flags = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "train.py", *MODEL, *QUIET]
    ran = bench.tool(*flags, "--run.dir", str(bench.folder / "ranks"), limit_s=120)
    hint = f"HINT: --nproc_per_node={ranks - 1}"
    need(ran.code != 0, "the run did not fail")
    need(hint in ran.text, f"no line has {hint!r}: {ran.end()}")
    return {"ranks": ranks, "seconds": round(ran.seconds, 1)}


def repeatable(bench: Bench) -> tuple[str, ...]:
    """Flags of runs that are compared to the bit: attention's backward on CUDA sums in any order."""
    return ("--watch.deterministic", "true") if bench.cuda else ()


def resumed(bench: Bench) -> Figures:
    """Killed after a save and started again: the losses of a run without a kill, to the bit."""
    compiled = "true" if bench.cuda else "false"
    often = ("--train.steps", "60", "--checkpoint.every_steps", "5")
    flags = (*MODEL, *QUIET[2:], *often, *ALONE[:2], "--speed.compile", compiled, *repeatable(bench))
    whole = bench.trained("whole", *flags, TORCH_LOGS="recompiles")
    process = bench.start("killed", *flags)
    sealed = bench.folder / "killed" / "checkpoints"
    began = time.monotonic()
    while not any(sealed.glob("step-*/manifest.json")):
        need(process.poll() is None, "the run ended before its first checkpoint")
        need(time.monotonic() - began < 150, "no checkpoint within 150 s")
        time.sleep(0.02)
    kill(process)
    ended(process, sealed.parent, 30)
    need(not (sealed.parent / "DONE").exists(), "the run had ended before the kill: nothing was resumed")
    again = bench.trained("killed", *flags, TORCH_LOGS="recompiles")
    need(again.losses() == whole.losses(), f"losses differ by {apart(again.losses(), whole.losses()):.1e}")
    compiles = [ran.text.count("Recompiling function") for ran in (whole, again)]
    need(compiles == [0, 0], f"{compiles} recompilations before and after the kill")
    return {"steps": len(again.losses()), "compiled": compiled, "recompilations": sum(compiles)}


def saves(bench: Bench) -> Figures:
    """Saves in the background of quick steps have the bits of saves that block."""
    flags = (
        *MODEL,
        *QUIET[2:],
        *ALONE,
        *repeatable(bench),
        "--train.steps",
        "12",
        "--checkpoint.every_steps",
        "2",
        "--checkpoint.keep_last",
        "0",
        "--model.args.width",
        "256" if not bench.cuda else "1024",
    )
    found = []
    for mode in ("async", "blocking"):
        found.append(digests(bench.trained(mode, *flags, "--checkpoint.mode", mode).run))
    need(len(found[0]) == 6, f"{len(found[0])} of 6 checkpoints")
    need(found[0] == found[1], "tensors of background and blocking saves differ")
    return {"checkpoints": len(found[0]), "tensors": sum(map(len, found[0].values()))}


def syncs(bench: Bench) -> Figures:
    bench.need_cuda("tests/run/test_host_reads.py counts the host's reads on a CPU")
    flags = (*MODEL, *QUIET[:4], *ALONE, "--train.steps", "20", "--run.log_every_steps", "10")
    run = ("--run.dir", str(bench.folder / "syncs"), "--run.device", "cuda")
    ran = bench.tool("bench.gpu_syncs", *flags, *run)
    need(ran.code == 0, ran.end())
    places: dict[str, list[str]] = json.loads(ran.text.strip().splitlines()[-1])
    ordinary = {step: seen for step, seen in places.items() if int(step) > 3 and int(step) % 10}
    waits = sorted({place for seen in ordinary.values() for place in seen})
    need(not waits, f"ordinary steps wait at {waits}")
    return {"ordinary steps": len(ordinary), "waits": 0, "waits at a line": len(places["10"])}


def devices(bench: Bench) -> Figures:
    """The same weights and samples on both devices, in fp32 without TF32."""
    bench.need_cuda("there is one device to compare")
    flags = (*MODEL, *QUIET, *ALONE, "--train.steps", "10", "--run.matmul_precision", "highest")
    gpu = bench.trained("gpu", *flags, "--precision.param", "fp32")
    cpu = Bench("cpu", bench.folder).trained("cpu", *flags, "--precision.param", "fp32")
    worst = apart(gpu.losses(), cpu.losses())
    need(worst < 1e-4, f"losses differ by {worst:.1e}")
    return {"largest difference": worst}


def precisions(bench: Bench) -> Figures:
    """bf16 beside fp32, and on a GPU bf16 compiled beside eager."""
    flags = (*MODEL, *QUIET, "--watch.enabled", "false", "--train.steps", "10")
    kinds = {"fp32": ("fp32", "false"), "bf16": ("bf16", "false"), "compiled": ("bf16", "true")}
    if not bench.cuda:
        del kinds["compiled"]
    losses = {
        name: bench.trained(name, *flags, "--precision.param", dtype, "--speed.compile", how).losses()
        for name, (dtype, how) in kinds.items()
    }
    found = {f"{name} beside fp32": apart(losses[name], losses["fp32"]) for name in kinds if name != "fp32"}
    need(max(found.values()) < 2e-2, f"losses differ: {found}")
    return found


def parity(bench: Bench) -> Figures:
    words = ("fsdp.parity", "--parity.ranks", "1", "--parity.steps", "5" if bench.cuda else "2")
    ran = bench.tool(*words, "--data.name", "digits", "--model.name", "mlp", "--train.global_batch", "8")
    need(ran.code == 0, f"exit code {ran.code}: {ran.end()}")
    return {"verdict": ran.text.strip().splitlines()[-1]}


def nonfinite(bench: Bench) -> Figures:
    flags = (*VECTORS, *QUIET, "--data.name", "bench.gpu_data:spoilt", "--train.steps", "10")
    stopped = bench.train("stop", *flags)
    need(stopped.code == 5, f"exit code {stopped.code}, not 5: {stopped.end()}")
    need("not finite" in stopped.text, stopped.end())
    skipped = bench.trained("skip", *flags, "--train.nonfinite", "skip")
    need("the update is skipped" in skipped.text, "no line says that an update is skipped")
    losses = [one for one in skipped.losses() if one == one]
    need(len(losses) < 10, "no loss is NaN: the spoilt sample was not read")
    return {"exit code": stopped.code, "skipped": 10 - len(losses)}


SAME = {
    "offload": "--memory.cpu_offload true", "recompute": "--memory.activation_checkpointing full",
    "products": "--memory.activation_checkpointing ops", "activations": "--memory.activation_offload true",
    "zero-2": "--mesh.reshard_after_forward false", "step": "--mesh.reshard_after_forward step",
    "chunks": "--memory.loss_chunk 64", "bf16 states": "--optim.state bf16",
    "8-bit states": "--optim.state 8bit", "states on the host": "--memory.optimizer_offload true",
    "offload, 8-bit states": "--memory.cpu_offload true --optim.state 8bit",
    "offload, states in files": "--memory.cpu_offload true --memory.nvme optimizer --memory.nvme_dir FOLDER",
    "offload, all in files": "--memory.cpu_offload true --memory.nvme all --memory.nvme_dir FOLDER",
}  # fmt: skip
FEW = ("recompute", "chunks")
ROUNDED = {"bf16 states": 2e-2, "8-bit states": 2e-2, "offload, 8-bit states": 2e-2}
"""Bounds of what rounds by itself; the others are 1e-4."""


def equal_losses(bench: Bench) -> Figures:
    """Memory options, each beside the run without it; LoRA beside LoRA with recomputation."""
    # TF32 would round each option's products by themselves.
    exact = ("--precision.param", "fp32", "--run.matmul_precision", "highest")
    flags = (*MODEL, *QUIET, *ALONE, "--train.steps", "6", *exact)
    plain = bench.trained("plain", *flags).losses()
    found = {}
    for name in SAME if bench.cuda else FEW:
        words = SAME[name].replace("FOLDER", str(bench.folder / "nvme"))
        found[name] = apart(
            bench.trained(name.replace(" ", "-").replace(",", ""), *flags, *words.split()).losses(), plain
        )
    if bench.cuda:
        adapters = [
            bench.trained(f"lora-{nth}", *flags, "--lora.rank", "4", *more.split()).losses()
            for nth, more in enumerate(("", SAME["recompute"]))
        ]
        found["LoRA, recompute"] = apart(adapters[1], adapters[0])
    wrong = {name: one for name, one in found.items() if one > ROUNDED.get(name, 1e-4)}
    need(not wrong, f"losses differ: {wrong}")
    return found


def planned_bytes(bench: Bench) -> Figures:
    bench.need_cuda("python -m bench.plan compares plans with runs on a CPU")
    ran = bench.tool("bench.plan_cuda", "--cases", "8", limit_s=240)
    need(ran.code == 0, ran.end())
    lines = re.findall(r"(allocated|reserved): median error ([\d.]+)%, worst ([\d.]+)%", ran.text)
    figures = {
        f"{name}, {which} %": float(v)
        for name, *two in lines
        for which, v in zip(("median", "worst"), two, strict=True)
    }
    need(figures["allocated, worst %"] < 10, f"planned bytes are off: {figures}")
    return figures


def planned_run(bench: Bench) -> Figures:
    """A plan for this device, written as a recipe; the run compares both at its end. On a GPU the planned
    bytes hold to 10%; seconds are printed and have no bound.
    """
    import torch

    gpu = torch.cuda.get_device_name(0) if bench.cuda else "cpu"
    recipe = bench.folder / "planned.toml"
    size = ("--model.args.width", "1024", "--data.seq_len", "1024", "--train.global_batch", "16")
    one = ("--mesh.strategy", "fsdp", "--mesh.replicate", "1", "--mesh.shard", "1", "--plan.fix", "true")
    eager = ("--speed.compile", "false")  # a plan's bytes are eager's: compiled blocks keep less
    flags = (*MODEL, *(size if bench.cuda else ()), *one, *eager, "--plan.gpu", gpu, "--train.steps", "12")
    plan = bench.tool("fsdp.plan", *flags, "--plan.write", str(recipe))
    if plan.code == 2 and "--plan.gpu" in plan.text:
        raise NotPossible(f"the planner has no rates of {gpu}")
    need(plan.code == 0, plan.end())
    ran = bench.trained("planned", "--config", str(recipe), *QUIET, "--watch.enabled", "false")
    events = map(json.loads, (ran.run / "history.jsonl").read_text(encoding="utf-8").splitlines())
    found = next((event for event in events if event["event"] == "planned"), None)
    if found is None:
        raise Failed("the run did not compare itself with its plan")
    off = {
        f"{what} off by": f"{found[what] / found[f'planned_{what}'] - 1:+.0%}"
        for what in ("peak_gib", "step_s")
    }
    need(not bench.cuda or abs(found["peak_gib"] / found["planned_peak_gib"] - 1) < 0.1, f"{off}")
    bound = {} if bench.cuda else {"bound": "none on a CPU"}
    return {"step ms": round(1e3 * found["step_s"], 1), **off, **bound}


def out_of_memory(bench: Bench) -> Figures:
    bench.need_cuda("tests/memory/test_oom.py forces the error on a CPU")
    long = ("--data.seq_len", "4096", "--model.args.max_seq_len", "4096", "--train.global_batch", "4096")
    ran = bench.train(
        "oom", *MODEL, *QUIET, *ALONE, *long, "--train.micro_batch", "4096", "--train.steps", "2"
    )
    need(ran.code != 0, "the run fitted")
    page = ran.run / "oom-rank0.html"
    need(page.exists(), f"{page.name} was not written: {ran.end()}")
    need("HINT" in ran.text, f"no HINT: {ran.end()}")
    return {"exit code": ran.code, "page bytes": page.stat().st_size}


def float8(bench: Bench) -> Figures:
    if importlib.util.find_spec("torchao") is None:
        raise NotPossible("torchao is not installed")
    if bench.cuda:
        import torch

        if torch.cuda.get_device_capability() < (8, 9):
            raise NotPossible(f"compute capability {torch.cuda.get_device_capability()} is below 8.9")
    flags = (*MODEL, *QUIET, *ALONE, "--train.steps", "6", "--precision.param", "bf16")
    more = () if bench.cuda else ("--speed.float8_emulate", "true")
    plain = bench.trained("bf16", *flags).losses()
    found = apart(bench.trained("fp8", *flags, "--speed.float8", "tensorwise", *more).losses(), plain)
    need(found < 8e-2, f"losses differ by {found:.1e}")
    return {"largest difference": found}


def lost_ranks(bench: Bench) -> Figures:
    """Two ranks, on a GPU both on it: a run, a rank that raises, a rank that stalls."""
    flags = (*VECTORS[:-4], *QUIET, "--speed.compile", "false", "--train.steps", "8")
    data = ("--data.name", "bench.gpu_data:raising", "--data.args.at", "-1")
    whole = bench.ranks("both", 2, *flags, *data)
    if any(ran.code for ran in whole) and re.search(
        r"Duplicate GPU|invalid usage", whole[0].text + whole[1].text
    ):
        raise NotPossible("NCCL refuses two ranks on one GPU")
    need(not any(ran.code for ran in whole), f"two ranks do not train: {whole[0].end()} | {whole[1].end()}")
    raised = bench.ranks("raise", 2, *flags, "--data.name", "bench.gpu_data:raising", limit_s=90)
    need(all(ran.code for ran in raised), f"exit codes {[ran.code for ran in raised]}")
    need("broken on purpose" in raised[1].text, raised[1].end())
    stall = ("--data.name", "bench.gpu_data:stalling", "--watch.hang_s", "10")
    stalled = bench.ranks("stall", 2, *flags, *stall, limit_s=150)
    need(all(ran.code for ran in stalled), f"exit codes {[ran.code for ran in stalled]}")
    need("rank 1" in stalled[0].text + stalled[1].text, f"no line names rank 1: {stalled[0].end()}")
    return {
        "seconds to the end of both, raise": round(max(ran.seconds for ran in raised), 1),
        "stall": round(max(ran.seconds for ran in stalled), 1),
    }


def throughput(bench: Bench) -> Figures:
    """MFU of 124M and 1B parameters beside a bare loop, and beside Accelerate and Lightning if installed."""
    works = {"124m-cuda": 0.5, "1b-cuda": 0.6} if bench.cuda else {"tiny": 0.0}
    figures: dict[str, Any] = {}
    failed = []
    for work, goal in works.items():
        installed = [n for n, p in (("accelerate", "accelerate"), ("fabric", "lightning")) if _has(p)]
        only = ",".join(["bare", "ours", *(installed if bench.cuda else [])])
        words = ("bench.train", "--work", work, "--ranks", "1", "--only", only, "--no-memory")
        ran = bench.tool(*words, "--rounds", "4" if bench.cuda else "2", "--short", limit_s=200)
        if ran.code:
            failed.append(f"{work}: {ran.end()}")
            continue
        for line in ran.text.splitlines():
            if line.startswith("| ") and "step ms" not in line:
                label, rate, _, _, over, *_ = [cell.strip() for cell in line.strip().strip("|").split("|")]
                figures[f"{work}, {label}"] = f"{rate}{f', ours over it {over}' if over else ''}"
        if goal:
            figures[f"{work}, goal"] = f"MFU {goal:.0%}"
    measured = "; ".join(f"{name}: {one}" for name, one in figures.items())
    need(not failed, "; ".join([*failed, *([f"measured: {measured}"] if figures else [])]))
    need(bool(figures), "bench.train printed no row")
    return figures


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def doctor(bench: Bench) -> Figures:
    words = ("fsdp.doctor", "--ranks", "1" if bench.cuda else "2", "--dir", str(bench.folder))
    ran = bench.tool(*words, limit_s=150)
    need(ran.code == 0, f"exit code {ran.code}: {ran.end()}")
    need((bench.folder / "doctor" / "doctor.html").exists(), "doctor.html was not written")
    return {"verdict": ran.text.strip().splitlines()[-1]}


def profile(bench: Bench) -> Figures:
    on = ("--profile.memory", "true", "--profile.trace", "true", "--profile.steps", "3:4")
    ran = bench.trained("profile", *MODEL, *QUIET, *ALONE, "--train.steps", "6", *on)
    pages = sorted(path.name for path in (ran.run / "profile").iterdir())
    need(any(name.endswith("memory_profile.html") for name in pages), f"no page among {pages}")
    report: Ran = bench.tool("fsdp.report", str(ran.run))
    need(report.code == 0, report.end())
    return {"files": len(pages)}


PARTS = (
    Part("ranks", "more ranks than GPUs: one line with a HINT", 130, too_many_ranks),
    Part("resume", "SIGKILL and resume: the losses of a run without it, no recompilation", 400, resumed),
    Part("saves", "saves beside training steps have the bits of blocking saves", 300, saves),
    Part("syncs", "an ordinary step never waits for the device", 200, syncs),
    Part("devices", "losses of the GPU are the CPU's in fp32, to 1e-4", 300, devices),
    Part("precisions", "bf16 eager and compiled losses are fp32's, to 2%", 400, precisions),
    Part("parity", "python -m fsdp.parity on one device", 300, parity),
    Part("nonfinite", "a NaN stops the run with exit code 5, or its update is skipped", 200, nonfinite),
    Part(
        "options", "offload, recomputation, resharding, LoRA, small states: equal losses", 500, equal_losses
    ),
    Part("bytes", "planned bytes are within 10% of the allocator's in 8 configurations", 260, planned_bytes),
    Part("plan", "a run beside its plan: planned bytes within 10%, planned seconds", 200, planned_run),
    Part("oom", "out of memory: a page and a HINT", 200, out_of_memory),
    Part("float8", "float8 losses are bf16's, to 8%", 300, float8),
    Part("two-ranks", "two ranks on one device: both end when one raises or stalls", 400, lost_ranks),
    Part("mfu", "throughput of 124M and 1B parameters beside a bare loop", 420, throughput),
    Part("doctor", "python -m fsdp.doctor finds the machine fit", 160, doctor),
    Part("profile", "a profile's pages and the report are written", 200, profile),
)
