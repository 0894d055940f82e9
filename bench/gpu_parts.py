"""The parts of bench.gpu: each runs the product's own commands and returns its figures.

A part raises Failed if its claim does not hold and NotPossible if this machine cannot run it. Not here: time
limits, the table, the files of results (gpu.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.gpu_runs import (
    ALONE,
    MODEL,
    QUIET,
    VECTORS,
    Bench,
    Figures,
    NotPossible,
    Ran,
    apart,
    digests,
    ended,
    kill_after_save,
    need,
)
from bench.gpu_two_ranks import lost_ranks, other_counts, timed_out
from bench.peers.roster import ROSTER


@dataclass(frozen=True)
class Part:
    """`run` returns figures; it is killed after `limit_s`. `alone`: its figures are times, or it fills the
    memory, so that no other part runs beside it. On a CPU its form may show less.
    """

    name: str
    claim: str
    limit_s: float
    run: Callable[[Bench], Figures]
    alone: bool = False


def too_many_ranks(bench: Bench) -> Figures:
    bench.need_cuda("more ranks than GPUs cannot be started")
    import torch

    ranks = torch.cuda.device_count() + 1
    flags = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "train.py", *MODEL, *QUIET]
    ran = bench.tool(*flags, "--run.dir", str(bench.folder / "ranks"), limit_s=120)
    hint = f"HINT: --nproc_per_node={ranks - 1}"
    need(ran.code != 0, "the run did not fail")
    need(hint in ran.text, f"no line has {hint!r}: {ran.end()}")
    forks = bench.tool(
        "launch.local", "--ranks", str(ranks), *MODEL, *QUIET, "--run.dir", str(bench.folder / "forks")
    )
    need(forks.code == 3, f"launch.local: exit code {forks.code}, not 3: {forks.end()}")
    need(f"HINT: --ranks {ranks - 1}" in forks.text, f"launch.local has no line with a HINT: {forks.end()}")
    return {"ranks": ranks, "seconds": round(ran.seconds, 1)}


def forked(bench: Bench) -> Figures:
    """launch.local's rank is a fork of a process that has imported torch, and asked for the GPUs."""
    flags = (*MODEL, *QUIET, *ALONE, *repeatable(bench), "--train.steps", "5")
    plain = bench.trained("plain", *flags)
    run = bench.folder / "forked"
    words = ("--ranks", "1", *flags, "--run.dir", str(run), "--run.device", bench.device)
    ran = replace(bench.tool("launch.local", *words), run=run)
    need(ran.code == 0, f"exit code {ran.code}: {ran.end()}")
    need(ran.losses() == plain.losses(), f"losses differ by {apart(ran.losses(), plain.losses()):.1e}")
    return {"steps": len(ran.losses())}


def no_home(bench: Bench) -> Figures:
    """Compiled on a GPU, into an empty folder of the node's own."""
    kernels = bench.folder / "tmp"
    kernels.mkdir()
    flags = (*MODEL, *QUIET, "--watch.enabled", "false", "--train.steps", "3")
    compiled = ("--speed.compile", "true" if bench.cuda else "false")
    bench.trained("no-home", *flags, *compiled, HOME="/proc/no-home", TMPDIR=str(kernels))
    return {"files of kernels": sum(1 for path in kernels.rglob("*") if path.is_file())}


def later(module: str, name: str) -> Callable[[Bench], Figures]:
    """A part whose module imports torch, which most leave to the processes that they start."""

    def run(bench: Bench) -> Figures:
        figures: Figures = getattr(importlib.import_module(module), name)(bench)
        return figures

    return run


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
    run = bench.folder / "killed"
    kill_after_save(process, run)
    ended(process, run, 30)
    need(not (run / "DONE").exists(), "the run had ended before the kill: nothing was resumed")
    again = bench.trained("killed", *flags, TORCH_LOGS="recompiles")
    need(again.losses() == whole.losses(), f"losses differ by {apart(again.losses(), whole.losses()):.1e}")
    compiles = [ran.text.count("Recompiling function") for ran in (whole, again)]
    need(compiles == [0, 0], f"{compiles} recompilations before and after the kill")
    return {"steps": len(again.losses()), "compiled": compiled, "recompilations": sum(compiles)}


def saves(bench: Bench) -> Figures:
    """Saves in the background of quick steps have the bits of saves that block."""
    words = "--train.steps 12 --checkpoint.every_steps 2 --checkpoint.keep_last 0 --model.args.width"
    width = "1024" if bench.cuda else "256"
    flags = (*MODEL, *QUIET[2:], *ALONE, *repeatable(bench), *words.split(), width)
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
    cpu = Bench("cpu", bench.folder, bench.results).trained("cpu", *flags, "--precision.param", "fp32")
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
    """Eager: each of its twelve runs would compile its model anew."""
    words = ("fsdp.parity", "--parity.ranks", "1", "--parity.steps", "5" if bench.cuda else "2")
    model = ("--data.name", "digits", "--model.name", "mlp", "--train.global_batch", "8")
    ran = bench.tool(*words, *model, "--speed.compile", "false")
    need(ran.code == 0, f"exit code {ran.code}: {ran.end()}")
    return {"verdict": ran.text.strip().splitlines()[-1]}


def nonfinite(bench: Bench) -> Figures:
    flags = (*VECTORS, *ALONE, *QUIET, "--data.name", "bench.gpu_data:spoilt", "--train.steps", "10")
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


def equal_losses(bench: Bench, host: bool) -> Figures:
    """Memory options, each beside the run without it: those that use the host's memory or its files, or the
    others and LoRA beside LoRA with recomputation.
    """
    if host:
        bench.need_cuda("options runs the same lines")
    # TF32 would round each option's products by themselves.
    exact = ("--precision.param", "fp32", "--run.matmul_precision", "highest")
    flags = (*MODEL, *QUIET, *ALONE, "--train.steps", "6", *exact)
    plain = bench.trained("plain", *flags).losses()
    found = {}
    for name in [name for name in SAME if ("off" in name or "host" in name) == host] if bench.cuda else FEW:
        words = SAME[name].replace("FOLDER", str(bench.folder / "nvme"))
        found[name] = apart(
            bench.trained(name.replace(" ", "-").replace(",", ""), *flags, *words.split()).losses(), plain
        )
    if bench.cuda and not host:
        adapters = [
            bench.trained(f"lora-{nth}", *flags, "--lora.rank", "4", *more.split()).losses()
            for nth, more in enumerate(("", SAME["recompute"]))
        ]
        found["LoRA, recompute"] = apart(adapters[1], adapters[0])
    wrong = {name: one for name, one in found.items() if one > ROUNDED.get(name, 1e-4)}
    need(not wrong, f"losses differ: {wrong}")
    return found


def fake_ranks(bench: Bench) -> Figures:
    """Of a rank of the 8B recipe and of 70B bytes beside the plan, and what the host takes to issue a step,
    in which it never waits.
    """
    bench.need_cuda("collectives of a fake group do nothing: there is no counter on a CPU to compare")
    words = ("bench.plan_cuda", "--worlds", "8b@8,8b@64,8b@512,70b@64", "--results", str(bench.results))
    ran = bench.tool(*words, limit_s=280)
    need(ran.code == 0, ran.end())
    rows = re.findall(r"^\| (\d+) ranks: .*?preset=(\w+).*? \| (.+) \| (\d+) \|$", ran.text, re.M)
    need(len(rows) == 4, ran.end())
    waits = {f"{preset}, {ranks} ranks": int(count) for ranks, preset, _, count in rows}
    need(not any(waits.values()), f"the host waits in a step: {waits}")
    about = "allocated, reserved, host s"
    return {f"{preset}, {ranks} ranks, {about}": one.replace(" |", ",") for ranks, preset, one, _ in rows}


OFF = {"allocated, median %": 2.0, "allocated, worst %": 5.0, "reserved, worst %": 10.0}


def planned_bytes(bench: Bench) -> Figures:
    bench.need_cuda("python -m bench.plan compares plans with runs on a CPU")
    ran = bench.tool("bench.plan_cuda", "--cases", "8", "--results", str(bench.results), limit_s=240)
    need(ran.code == 0, ran.end())
    lines = re.findall(r"(allocated|reserved): median error ([\d.]+)%, worst ([\d.]+)%", ran.text)
    figures = {
        f"{name}, {which} %": float(v)
        for name, *two in lines
        for which, v in zip(("median", "worst"), two, strict=True)
    }
    need(all(figures[name] <= most for name, most in OFF.items()), f"planned bytes are off: {figures}")
    return figures


def planned_run(bench: Bench) -> Figures:
    """A plan for this device, written as a recipe; the run compares both at its end. On a GPU also compiled,
    with the preset of 124M. Planned bytes hold to 10% there, and planned seconds of the compiled run too.
    """
    import torch

    gpu = torch.cuda.get_device_name(0) if bench.cuda else "cpu"
    size = "--model.args.width 1024 --data.seq_len 1024 --train.global_batch 16" if bench.cuda else ""
    figures, wrong = {}, []
    for name, words in {"eager": f"--speed.compile false {size}", "compiled": COMPILED}.items():
        if name == "compiled" and not bench.cuda:
            continue  # a plan for a CPU knows no compiled step
        model = MODEL if name == "eager" else ("--data.name", "synthetic", "--data.args.kind", "tokens")
        found = _beside_plan(bench, name, (*model, *words.split(), "--plan.gpu", gpu))
        off = {what: found[what] / found[f"planned_{what}"] - 1 for what in ("peak_gib", "step_s")}
        wrong += [name] * (abs(off["peak_gib"]) > 0.1 or (name == "compiled" and abs(off["step_s"]) > 0.1))
        figures[name] = ", ".join(
            [f"{found['step_s'] * 1e3:.1f} ms", f"{found['peak_gib']:.2f} GiB"]
            + [f"{what} {one:+.1%} of the plan" for what, one in off.items()]
        )
    need(not bench.cuda or not wrong, f"off by more than 10%: {', '.join(wrong)}: {figures}")
    return figures | ({} if bench.cuda else {"bound": "none on a CPU"})


COMPILED = "--model.name transformer --model.preset 124m --data.seq_len 1024 --train.global_batch 32"


def _beside_plan(bench: Bench, name: str, flags: tuple[str, ...]) -> dict[str, Any]:
    one = ("--mesh.strategy", "fsdp", "--mesh.replicate", "1", "--mesh.shard", "1", "--plan.fix", "true")
    recipe = bench.folder / f"{name}.toml"
    plan = bench.tool("fsdp.plan", *flags, *one, "--train.steps", "30", "--plan.write", str(recipe))
    if plan.code == 2 and "--plan.gpu" in plan.text:
        raise NotPossible(f"the planner has no rates of {flags[-1]}")
    need(plan.code == 0, plan.end())
    ran = bench.trained(name, "--config", str(recipe), *QUIET[:5], "5", "--watch.enabled", "false")
    events = map(json.loads, (ran.run / "history.jsonl").read_text(encoding="utf-8").splitlines())
    found = [event for event in events if event["event"] == "planned"]
    need(bool(found), "the run did not compare itself with its plan")
    return dict(found[0])


def save_cost(bench: Bench) -> Figures:
    """Beside dcp.save and dcp.async_save with pinned memory; on a CPU a short form on two ranks."""
    size = ("--size", "124m", "--rounds", "3") if bench.cuda else ("--size", "short", "--rounds", "1")
    words = ("bench.save", *size, "--saves", "1", "--run.device", bench.device)
    ran = bench.tool(*words, "--out", str(bench.results), "--place", str(bench.folder), limit_s=230)
    need(ran.code == 0, ran.end())
    told = re.search(r"^One save without steps, GiB a second of a rank: (.+)\.$", ran.text, re.M)
    rows = re.findall(r"^\| (ours|dcp\S+)[^|]*\| \S+ \| \S+ \| (.+?) \| .+? \| (\S+) \|", ran.text, re.M)
    need(told is not None and len(rows) == 3, ran.end())
    longer = {f"{way}, s longer a save; one step held up": f"{more}; {held}" for way, more, held in rows}
    return longer | {"GiB/s": told[1] if told else ""}


def out_of_memory(bench: Bench) -> Figures:
    bench.need_cuda("tests/memory/test_oom.py forces the error on a CPU")
    # Logits of 128 GiB in bf16, not more tokens: the advice takes a loss on fake tensors chunk by chunk.
    large = ("--data.args.vocab_size", "131072", "--data.seq_len", "4096", "--model.args.max_seq_len", "4096")
    batch = ("--train.global_batch", "128", "--train.micro_batch", "128", "--train.steps", "2")
    ran = bench.train("oom", *MODEL, *QUIET, *ALONE, *large, *batch)
    need(ran.code != 0, "the run fitted")
    page = ran.run / "oom-rank0.txt"
    need(page.exists(), f"{page.name} was not written: {ran.end()}")
    need("HINT" in ran.text, f"no HINT: {ran.end()}")
    return {"exit code": ran.code, "text bytes": page.stat().st_size}


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
    eights = (*flags, "--speed.float8", "tensorwise", *more)
    whole = bench.trained("fp8", *eights).losses()
    found = apart(whole, plain)
    need(found < 8e-2, f"losses differ by {found:.1e}")
    again = apart(
        bench.trained("fp8-ops", *eights, "--memory.activation_checkpointing", "ops").losses(), whole
    )
    need(again < 1e-4, f"losses with products kept differ by {again:.1e}")
    return {"largest difference": found, "products kept": again}


PACKAGES = {"accelerate": "accelerate", "fabric": "lightning", "ours-fp8": "torchao"}
"""Contenders that run where their package is installed."""
GOALS = {"124m-cuda": 0.45, "1b-cuda": 0.51, "1b8-cuda": 0.55, "hf-cuda": 0.53}
"""MFU."""
ON_CPU = {"124m-cuda": "tiny", "hf-cuda": "hf-tiny"}
"""What stands for a work, to run the same lines."""
MEMORY_GIB = {"124m-cuda": (2.0, 36.0), "1b-cuda": (15.5, 24.0), "1b8-cuda": (15.5, 36.0),
              "hf-cuda": (16.5, 36.0)}  # fmt: skip
"""What each contender holds between its turns, and what the one whose turn it is needs more."""
BARS = {"124m-cuda": {"bare": 0.95, "whole": 1.0}, "1b-cuda": {"bare": 0.95, "whole": 0.99},
        "1b8-cuda": {"whole": 0.99}, "hf-cuda": {"whole": 0.99}}  # fmt: skip
"""Least of another's throughput: has failed, on a GPU, where the whole interval is below."""


def throughput(bench: Bench, work: str, names: tuple[str, ...]) -> Figures:
    """Beside the contenders that are installed and have room."""
    if work not in ON_CPU or "ours-fp8" in names:
        bench.need_cuda("mfu-124m runs the same lines")
    if work == "hf-cuda" and not _has("transformers"):
        raise NotPossible("transformers is not installed")
    figures: dict[str, Any] = {}
    there = [
        name for name in ("ours", *names) if name not in PACKAGES or (bench.cuda and _has(PACKAGES[name]))
    ]
    if bench.cuda:
        figures["goal"] = f"MFU {GOALS[work]:.0%}"
        there, without = _with_room(there, work)
        figures |= dict.fromkeys(without, "left out, the device's memory holds no more")
    bars = {ROSTER[name].label: bar for name, bar in BARS[work].items()}
    on = f"bench.train --ranks 1 --work {work if bench.cuda else ON_CPU[work]} --only".split()
    rounds = ("--no-memory", "--rounds", "6" if bench.cuda else "2", "--short")
    # Those that are installed are taken as they are: pip would wait for a network.
    ran = bench.tool(*on, ",".join(there), *rounds, limit_s=240, PIP_NO_INDEX="1")
    need(ran.code == 0, ran.end())
    behind = []
    for line in ran.text.splitlines():
        if told := re.fullmatch(r"(.+?): ((?:left out|not run), .+)", line):
            figures[told[1]] = told[2]
        elif line.startswith("| ") and "step ms" not in line:
            label, rate, _, _, over, *_ = [cell.strip() for cell in line.strip().strip("|").split("|")]
            figures[label] = f"{rate}{f', ours over it {over}' if over else ''}"
            if bench.cuda and over and float(re.findall(r"[\d.]+", over)[-1]) < bars.get(label, 0.0):
                behind.append(f"{label}: {over}, bar {bars[label]}")
    need(any("over it" in one for one in figures.values()), "bench.train printed no ratio")
    need(not behind, f"below the bar: {behind} of {figures}")
    bench.need_cuda(f"of a small model {figures}")
    return figures


def _with_room(names: list[str], work: str) -> tuple[list[str], list[str]]:
    """Those that the device's memory holds at once, and the others."""
    import torch

    there = torch.cuda.get_device_properties(0).total_memory / 2**30
    each, active = MEMORY_GIB[work]
    count = int((there - active) / each)
    if count < 2:
        raise NotPossible(f"two contenders need {2 * each + active:.0f} GiB, and the device has {there:.0f}")
    return names[:count], names[count:]


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


OVER_FUSED = 1.5
"""Most that a compiled update of small states takes, over fused AdamW's."""


def small_states(bench: Bench) -> Figures:
    bench.need_cuda("python -m bench.small_states compares the updates on a CPU")
    large = ("--rows", "16384", "--columns", "8192")
    ran = bench.tool("bench.small_states", "--run.device", "cuda", *large, limit_s=170)
    need(ran.code == 0, ran.end())
    ratios = {
        name: float(ratio) for name, ratio in re.findall(r"^(.+?) +[\d.]+ ms +([\d.]+) ×", ran.text, re.M)
    }
    compiled = {name: ratio for name, ratio in ratios.items() if name.endswith("compiled")}
    need(len(compiled) == 2, f"no compiled update: {ran.end()}")
    need(max(compiled.values()) <= OVER_FUSED, f"over fused AdamW: {ratios}")
    return {f"{name}, over fused AdamW": ratio for name, ratio in ratios.items() if ratio != 1.0}


def doctor(bench: Bench) -> Figures:
    words = ("fsdp.doctor", "--ranks", "1" if bench.cuda else "2", "--dir", str(bench.folder))
    ran = bench.tool(*words, limit_s=150)
    need(ran.code == 0, f"exit code {ran.code}: {ran.end()}")
    need((bench.folder / "doctor" / "doctor.txt").exists(), "doctor.txt was not written")
    return {"verdict": ran.text.strip().splitlines()[-1]}


def profile(bench: Bench) -> Figures:
    on = ("--profile.memory", "true", "--profile.trace", "true", "--profile.steps", "3:4")
    ran = bench.trained("profile", *MODEL, *QUIET, *ALONE, "--train.steps", "6", *on)
    files = sorted(path.name for path in (ran.run / "profile").iterdir())
    account = "memory_snapshot.pickle" if bench.cuda else "memory.json"
    need(any(name.endswith(account) for name in files), f"no {account} among {files}")
    report: Ran = bench.tool("fsdp.report", str(ran.run))
    need(report.code == 0, report.end())
    return {"files": len(files)}


PARTS = tuple(Part(*part) for part in (
    ("options", "recomputation, resharding, LoRA, small states: equal losses", 300,
     partial(equal_losses, host=False)),
    ("options-host", "offload to the host and to files: equal losses", 300, partial(equal_losses, host=True)),
    ("bytes", "planned bytes in 8 configurations: allocated to 2% (median) and 5%, reserved to 10%", 260,
     planned_bytes),
    ("ranks", "more ranks than GPUs: one line with a HINT", 130, too_many_ranks),
    ("resume", "SIGKILL and resume under compile: the losses of a run without it, no recompilation", 400,
     resumed),
    ("saves", "saves beside training steps have the bits of blocking saves", 300, saves),
    ("syncs", "an ordinary step never waits for the device", 200, syncs),
    ("devices", "losses of the GPU are the CPU's in fp32, to 1e-4", 300, devices),
    ("precisions", "bf16 eager and compiled losses are fp32's, to 2%", 400, precisions),
    ("forked", "launch.local: a forked rank has the losses of train.py, to the bit", 200, forked),
    ("no-home", "a compiled run with a HOME that cannot be written", 300, no_home),
    ("parity", "python -m fsdp.parity on one device", 300, parity),
    ("nonfinite", "a NaN stops the run with exit code 5, or its update is skipped", 200, nonfinite),
    ("float8", "float8 losses are bf16's, to 8%", 300, float8),
    ("two-ranks", "two ranks on one device: both end when one raises or stalls", 400, lost_ranks),
    ("time-outs", "two ranks: --run.process_group_timeout_s ends a wait in a mesh's group", 200, timed_out),
    ("meshes", "two ranks as 2 × 1 and 1 × 2, one killed, go on as one: the losses of one rank, to 1e-4", 400,
     other_counts),
    ("axes", "two ranks at context, tensor and expert 2: losses of one process, to 1%", 400,
     later("bench.gpu_axes", "axes")),
    ("profile", "a profile's pages and the report are written", 200, profile),
    ("mfu-124m", "124M: 95% of a bare loop's throughput, all of a whole compile's without FSDP", 260,
     partial(throughput, work="124m-cuda", names=("bare", "whole", "bare-loss", "accelerate", "fabric")),
     True),
    ("mfu-1b", "1B, 4 × 2048: 95% of a bare loop's throughput, 99% of a whole compile's without FSDP", 260,
     partial(throughput, work="1b-cuda", names=("bare", "whole", "bare-loss")), True),
    ("mfu-1b8", "1B, 8 × 2048: 99% of a whole compile's throughput without FSDP", 260,
     partial(throughput, work="1b8-cuda", names=("whole", "bare-loss")), True),
    ("mfu-hf", "Hugging Face Llama, 1.1B, 8 × 2048: 99% of a whole compile's throughput without FSDP", 300,
     partial(throughput, work="hf-cuda", names=("whole",)), True),
    ("fp8-1b", "1B, 4 × 2048: what --speed.float8 tensorwise gains", 300,
     partial(throughput, work="1b-cuda", names=("bare", "ours-fp8")), True),
    ("oom", "out of memory: a page and a HINT", 200, out_of_memory, True),
    ("plan", "a run beside its plan, eager and compiled: bytes within 10%, seconds of the compiled", 200,
     planned_run, True),
    ("states", "compiled updates of bf16 and 8-bit states take at most 1.5 of fused AdamW's time", 180,
     small_states, True),
    ("fake-ranks", "a rank of 8 to 512 of 8B, of 64 of 70B: bytes beside the plan, host time of a step", 300,
     fake_ranks, True),
    ("attention", "each kernel's gradients, to 2%; auto's time is at most 1.2 of the fastest's", 120,
     later("bench.gpu_attention", "attention"), True),
    ("packed", "packed rows of 8k and 32k tokens by varlen and by a mask: equal losses", 120,
     later("bench.gpu_axes", "packed"), True),
    ("save-cost", "a save beside dcp.save and dcp.async_save, and beside a plain file's rate", 240,
     save_cost, True),
    ("doctor", "python -m fsdp.doctor finds the machine fit", 160, doctor, True),
))  # fmt: skip
