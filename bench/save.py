"""What a save costs the training step, and what a load costs: ours beside dcp.save and dcp.async_save, in one run.

    python -m bench.save            124M parameters, Adam, 2 ranks; about half an hour
    python -m bench.save --short    6M parameters, some minutes: the same table, for a look
    python -m bench.save --ways none,ours --rounds 20 --saves 1     only what a save adds to the mean step, with its interval

Each round runs every way of saving for ten steps with one save, in an order that turns from round to round, so that what else
the machine does falls on all alike. A stall is the time that the training thread spends in a save or waiting for one. Results
are printed, and written to bench/results/save.json and save.md (save-short.*).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

from fsdp.checkpoint import Checkpointer
from fsdp.config import CheckpointSection, ModelSection
from fsdp.env import DistEnv, from_environment
from fsdp.mesh import MeshSizes, build_mesh
from fsdp.models.registry import resolve
from fsdp.state import TrainState

ROOT = Path(__file__).parents[1]
RANKS = 2
SAVE_EVERY = 10
SIZES = {
    "full": {"args": {}, "preset": "124m", "tokens": 64},
    "short": {"args": {"vocab_size": 4096, "width": 256, "layers": 4, "heads": 4, "tied": True}, "preset": "", "tokens": 128},
}
WAYS = ("none", "ours", "ours-blocking", "dcp.save", "dcp.async_save thread", "dcp.async_save process")


@dataclass
class Tally:
    """One way's steps and stalls, of this rank."""

    steps_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    rounds_s: list[float] = field(default_factory=list)
    """The mean step of each round."""
    cpu_s: list[float] = field(default_factory=list)
    """Processor time of each round, all threads of this process: what a save costs, whoever else uses the machine."""


class Bench:
    def __init__(self, env: DistEnv, size: dict[str, Any], place: Path) -> None:
        self.env, self.place, self.tokens = env, place, size["tokens"]
        self.sizes = MeshSizes("fsdp", 1, env.world_size)
        self.state = self._build(size, seed=0)
        self.gloo = dist.new_group(backend="gloo")
        self.ours = self._checkpointer("async")
        self.blocking = self._checkpointer("blocking")
        self.future: Any = None
        self.held_s = 0.0
        self.saved = 0

    def _checkpointer(self, mode: str) -> Checkpointer:
        section = CheckpointSection(dir=str(self.place / mode), keep_last=1, mode=mode)  # type: ignore[arg-type]
        return Checkpointer(section, self.place, self.env, self.sizes, config_hash="bench")

    def _build(self, size: dict[str, Any], seed: int) -> TrainState:
        torch.manual_seed(seed)
        model: Any = resolve(ModelSection(name="transformer", preset=size["preset"], args=size["args"]), {}).build()
        mesh = build_mesh(self.sizes, self.env.device)["dp_shard"]
        for unit in model.units():
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))

    # ---- one step, and the ways to save after it

    def step(self) -> None:
        tokens = torch.randint(0, 4096, (1, self.tokens + 1))
        logits = self.state.model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[0, 1:]).backward()
        self.hold(self.ours.before_update)
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        self.state.step += 1

    def hold(self, call: Callable[[], Any]) -> Any:
        """Whatever the training thread waits for on account of a save."""
        started = time.perf_counter()
        result = call()
        self.held_s += time.perf_counter() - started
        return result

    def save(self, way: str) -> None:
        if way == "ours":
            self.ours.save(self.state, metrics={}, reason="bench")
        elif way == "ours-blocking":
            self.blocking.save(self.state, metrics={}, reason="bench")
        elif way == "dcp.save":
            dcp.save(self.their_state(), checkpoint_id=self.their_folder(), process_group=self.gloo)
        elif way != "none":
            kind = AsyncCheckpointerType.THREAD if way.endswith("thread") else AsyncCheckpointerType.PROCESS
            self.future = dcp.async_save(
                self.their_state(), checkpoint_id=self.their_folder(), process_group=self.gloo, async_checkpointer_type=kind
            )

    def their_state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.state.model, self.state.optimizer)
        return {"model": model, "optim": optimizer}

    def their_folder(self) -> str:
        return str(self.place / "dcp" / str(self.state.step))

    def finish(self) -> None:
        """Nothing is in flight when the next way begins."""
        if self.future is not None:
            self.future.result()
            self.future = None
        job = self.ours._flight
        if job is not None:
            job.done.wait()
        self.ours.sealed()
        dist.barrier()
        if self.env.is_main:
            shutil.rmtree(self.place / "dcp", ignore_errors=True)
        dist.barrier()

    def round(self, way: str, tally: Tally) -> None:
        times, cpu = [], time.process_time()
        for nth in range(SAVE_EVERY):
            self.held_s, started = 0.0, time.perf_counter()
            self.step()
            if nth == 0:
                self.hold(lambda: self.save(way))
            elif way == "ours":
                self.ours.sealed()
            times.append(time.perf_counter() - started)
            if self.held_s and nth < 2:
                tally.stalls_s.append(self.held_s)
        tally.steps_s += times
        tally.rounds_s.append(statistics.fmean(times))
        self.finish()
        tally.cpu_s.append(time.process_time() - cpu)

    # ---- memory and loading

    def memory(self, saves: int) -> list[float]:
        """Host memory after each save, MiB above what there was before the first; the process's own, not the page cache."""
        gc.collect()
        fresh = Checkpointer(
            CheckpointSection(dir=str(self.place / "memory"), keep_last=1),
            self.place,
            self.env,
            self.sizes,
            config_hash="bench",
        )
        before, peaks = own_memory(), []
        for _ in range(saves):
            self.state.step += 1
            reset_peak()
            fresh.save(self.state, metrics={}, reason="bench", wait=True)
            peaks.append((own_memory(peak=True) - before) / 2**20)
            fresh.sealed()
        fresh.close()
        return peaks

    def load(self, size: dict[str, Any]) -> dict[str, float]:
        """Seconds and bytes read, of files that no cache holds."""
        self.ours.save(self.state, metrics={}, reason="bench", wait=True)
        folder, theirs = Path(self.ours.sealed()[-1].path), self.place / "dcp" / "load"
        dcp.save(self.their_state(), checkpoint_id=str(theirs), process_group=self.gloo)
        unique = sum(file.stat().st_size for file in folder.iterdir())
        fresh = self._build(size, seed=1)
        forget(folder, theirs)
        dist.barrier()
        (ours_s, ours_bytes) = measured(lambda: self._load_ours(fresh))
        dist.barrier()
        (theirs_s, theirs_bytes) = measured(lambda: self._load_theirs(fresh, theirs))
        return {
            "ours_s": ours_s, "dcp_s": theirs_s, "unique_bytes": unique, "ours_bytes": ours_bytes, "dcp_bytes": theirs_bytes,
            "state_mib": self.state_bytes() / 2**20,
        }  # fmt: skip

    def _load_ours(self, state: TrainState) -> None:
        again = self._checkpointer("async")
        assert again.restore(state) is not None
        again.close()

    def _load_theirs(self, state: TrainState, folder: Path) -> None:
        model, optimizer = get_state_dict(state.model, state.optimizer)
        dcp.load({"model": model, "optim": optimizer}, checkpoint_id=str(folder), process_group=self.gloo)
        set_state_dict(state.model, state.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def state_bytes(self) -> int:
        """This rank's own state: its shards of parameters and of both moments."""
        own = sum(p.to_local().nbytes for p in self.state.model.parameters())  # type: ignore[attr-defined]
        return 3 * own


def own_memory(peak: bool = False) -> int:
    """Bytes that are this process's alone, now or at the most since reset_peak."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now = sum(int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
    return now + (int(status["VmHWM"].split()[0]) - int(status["VmRSS"].split()[0])) * 1024 if peak else now


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measured(call: Callable[[], object]) -> tuple[float, int]:
    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    began, started = read(), time.perf_counter()
    call()
    return time.perf_counter() - started, read() - began


def forget(*folders: Path) -> None:
    """Put files out of the page cache."""
    for file in (file for folder in folders for file in folder.iterdir()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# ---------------------------------------------------------------- ranks


def rank_main(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    env = from_environment()
    store = dist.FileStore(str(Path(options.place, "store")), env.world_size)
    dist.init_process_group("cpu:gloo", store=store, rank=env.rank, world_size=env.world_size)
    size = SIZES["short" if options.short else "full"]
    bench = Bench(env, size, Path(options.place))
    tallies = {way: Tally() for way in options.ways}
    for way in options.ways:  # once through, uncounted: plans, buffers, processes, compiled kernels
        bench.round(way, Tally())
    for nth in range(options.rounds):
        for way in _turned(options.ways, nth):
            bench.round(way, tallies[way])
    result = {
        "rank": env.rank,
        "parameters": sum(p.numel() for p in bench.state.model.parameters()),
        "ways": {way: vars(tally) for way, tally in tallies.items()},
        "memory_mib": bench.memory(options.saves),
        "load": bench.load(size),
    }
    bench.ours.close()
    bench.blocking.close()
    Path(options.place, f"result-{env.rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # dcp's background process is a daemon that a plain exit waits for


def _turned(ways: Sequence[str], nth: int) -> Iterator[str]:
    yield from (*ways[nth % len(ways) :], *ways[: nth % len(ways)])


# ---------------------------------------------------------------- the parent


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a small model, few rounds")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of every way; 0 is 10, or 3 with --short")
    parser.add_argument("--saves", type=int, default=0, help="saves under the eye of the memory meter; 0 is 50, or 5")
    parser.add_argument("--ways", default=",".join(WAYS), help="which ways, none among them; others write save-part.*")
    parser.add_argument("--threads", type=int, default=0, help="threads a rank; 0 shares the cores out")
    parser.add_argument("--place", default="", help="folder for checkpoints; empty makes one and removes it")
    parser.add_argument("--out", default=str(ROOT / "bench" / "results"))
    options = parser.parse_args(argv)
    options.ways = options.ways.split(",")
    if unknown := {"none", *options.ways} - {*WAYS} or {"none"} - {*options.ways}:
        parser.error(f"--ways: {unknown.pop()} HINT: {','.join(WAYS)}; none is what the others are compared with")
    options.rounds = options.rounds or (3 if options.short else 10)
    options.saves = options.saves or (5 if options.short else 50)
    options.threads = options.threads or max(1, len(os.sched_getaffinity(0)) // RANKS)
    if "RANK" in os.environ:
        rank_main(options)
    with tempfile.TemporaryDirectory(prefix="bench-save-", dir=options.place or None) as place:
        options.place = place
        results = _run_ranks(options)
    report = summarise(results, options)
    table = markdown(report)
    print(table)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    stem = "save-short" if options.short else "save" if options.ways == [*WAYS] else "save-part"
    (out / f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / f"{stem}.md").write_text(table)
    return 0


def _run_ranks(options: argparse.Namespace) -> list[dict[str, Any]]:
    words = ["--place", options.place, "--rounds", options.rounds, "--saves", options.saves, "--threads", options.threads]
    words += ["--ways", ",".join(options.ways)]
    words += ["--short"] if options.short else []
    command = [sys.executable, "-m", "bench.save", *map(str, words)]
    common = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    # glibc keeps freed blocks: without this a process's size says nothing.
    common |= {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**common, "RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)},
        )
        for r in range(RANKS)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")
    return [json.loads(Path(options.place, f"result-{rank}.json").read_text()) for rank in range(RANKS)]


def summarise(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """A step is as slow as its slowest rank, and so is a stall."""
    rows = {
        way: _row([result["ways"][way] for result in results], [r["ways"]["none"] for r in results]) for way in options.ways
    }
    memory = [max(values) for values in zip(*(result["memory_mib"] for result in results), strict=True)]
    load = {key: max(result["load"][key] for result in results) for key in ("ours_s", "dcp_s", "unique_bytes", "state_mib")}
    load |= {key: sum(result["load"][key] for result in results) for key in ("ours_bytes", "dcp_bytes")}
    return {
        "machine": machine(), "torch": torch.__version__, "ranks": RANKS, "parameters": results[0]["parameters"],
        "rounds": options.rounds, "save_every": SAVE_EVERY, "ways": rows, "memory_mib": memory, "load": load,
    }  # fmt: skip


def _row(ranks: Sequence[dict[str, Any]], none: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Compared round by round with the steps of the same round that saved nothing."""
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
    """The mean step over that of the rounds that saved nothing, less one: 95% of resampled rounds lie between low and high."""

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
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": model or platform.processor(), "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory, 1),
        "load_average": os.getloadavg()[0], "when": time.strftime("%Y-%m-%d %H:%M"),
    }  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    about, rows, load = report["machine"], report["ways"], report["load"]
    reference = rows["dcp.save"]["stall_s"] if "dcp.save" in rows else 0.0
    lines = [
        f"# Saving and loading {report['parameters'] / 1e6:.0f}M parameters with Adam on {report['ranks']} ranks",
        "",
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, torch {report['torch']}, {about['when']}, "
        f"load average {about['load_average']:.1f} at the end; {report['rounds']} rounds, "
        f"a save every {report['save_every']} steps.",
        "",
        "| way | step held up, s a save | of dcp.save's | step p50, s | p99, s | mean, s | inflation, median of rounds | "
        "of the mean, 95% | processor, s a save and rank |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for way, row in rows.items():
        share = f"1/{reference / row['stall_s']:.0f}" if way != "none" and 0 < row["stall_s"] < reference else "—"
        lines.append(
            f"| {way} | {row['stall_s']:.4f} | {share} | {row['p50_s']:.3f} | {row['p99_s']:.3f} | {row['mean_s']:.3f} | "
            f"{row['inflation']:+.1%} | {row['low']:+.1%} to {row['high']:+.1%} | {row['cpu_s']:+.2f} |"
        )
    memory = report["memory_mib"]
    lines += [
        "",
        "The process of dcp.async_save's process mode is not in the last column.",
        "",
        f"Load: ours {load['ours_s']:.2f} s, every byte verified; dcp.load {load['dcp_s']:.2f} s. Bytes read over bytes there: "
        f"ours {load['ours_bytes'] / load['unique_bytes']:.3f}, dcp.load {load['dcp_bytes'] / load['unique_bytes']:.3f}.",
        "",
        f"Memory of a save, at most over {len(memory)} of them: {max(memory):.0f} MiB above none, where a rank's own state is "
        f"{load['state_mib']:.0f} MiB; after the first {memory[0]:.0f}, after the last {memory[-1]:.0f}.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
