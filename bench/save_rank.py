"""One rank of `python -m bench.save`: a model, a round of steps with one save, and the measurement of stalls,
memory and reads.

save.py starts the ranks; save_table.py computes the figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from bench import processes
from bench.save_dcp import AsyncSaver
from bench.tables import turned
from fsdp.base import proc
from fsdp.checkpoint import Checkpointer
from fsdp.config import CheckpointSection, ModelSection
from fsdp.distributed.env import DistEnv, from_environment
from fsdp.distributed.mesh import MeshSizes, build_mesh
from fsdp.models.registry import resolve
from fsdp.optim.optimizer import TrainState


@dataclass(frozen=True)
class Size:
    """`every`: steps of a round, which has one save. `rounds`, `saves`: the defaults."""

    args: dict[str, Any]
    preset: str = ""
    tokens: int = 64
    every: int = 10
    rounds: int = 10
    saves: int = 50


SIZES = {
    "124m": Size({}, preset="124m", rounds=6, saves=10),
    "1b": Size({}, preset="1b", tokens=2048, rounds=6, saves=1),
    "500m": Size(
        {"vocab_size": 32_000, "width": 1280, "layers": 21, "heads": 10, "max_seq_len": 256},
        tokens=32,
        every=3,
        rounds=6,
        saves=1,
    ),
    # a step of about a second on two cores
    "second": Size(
        {"vocab_size": 8192, "width": 384, "layers": 8, "heads": 6}, tokens=128, rounds=12, saves=5
    ),
    "short": Size(
        {"vocab_size": 4096, "width": 256, "layers": 4, "heads": 4, "tied": True},
        tokens=128,
        rounds=2,
        saves=5,
    ),
}
LOADS = 6
WAYS = ("none", "ours", "dcp.save", "dcp.async_save thread")


@dataclass
class Tally:
    """One way's steps and stalls, of this rank."""

    steps_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    rounds_s: list[float] = field(default_factory=list)
    """The mean step of each round, with the wait for what the round has left to be written: in a run, the
    steps after it would pay that.
    """
    cpu_s: list[float] = field(default_factory=list)
    """Processor time of each round, all threads of this process: what a save costs, whoever else uses the
    machine.
    """


class Bench:
    def __init__(self, env: DistEnv, size: Size, place: Path) -> None:
        self.env, self.place, self.tokens, self.every = env, place, size.tokens, size.every
        self.sizes = MeshSizes("fsdp", 1, env.world_size)
        self.state = self._build(size, seed=0)
        self.gloo = dist.new_group(backend="gloo")
        self.ours = self._checkpointer()
        self.theirs: dict[str, AsyncSaver] = {}
        """By their way, from its first save on: a stager's buffers are as large as the state."""
        self.held_s = 0.0
        self.saved = 0

    def _checkpointer(self, folder: str = "ours") -> Checkpointer:
        section = CheckpointSection(dir=str(self.place / folder), keep_last=1)
        return Checkpointer(section, self.place, self.env, self.sizes, config_hash="bench")

    def _build(self, size: Size, seed: int) -> TrainState:
        torch.manual_seed(seed)
        model: Any = resolve(ModelSection(name="transformer", preset=size.preset, args=size.args), {}).build()
        mesh = build_mesh(self.sizes, self.env.device)["dp_shard"]
        for unit in model.units():
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))

    # ---- one step, and the ways to save after it

    def step(self) -> None:
        tokens = torch.randint(0, 4096, (1, self.tokens + 1)).to(self.env.device)
        logits = self.state.model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[0, 1:]).backward()
        self.hold(self.before_update)
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        self.state.step += 1
        if self.env.device.type == "cuda":
            torch.cuda.synchronize()

    def before_update(self) -> None:
        """Waits until no background copy reads the parameters."""
        self.ours.before_update()
        for saver in self.theirs.values():
            saver.before_update()

    def hold(self, call: Callable[[], Any]) -> Any:
        """Measures what the training thread waits for because of a save."""
        started = time.perf_counter()
        result = call()
        self.held_s += time.perf_counter() - started
        return result

    def save(self, way: str) -> None:
        if way == "ours":
            self.ours.save(self.state, metrics={}, reason="bench")
        elif way == "dcp.save":
            dcp.save(self.their_state(), checkpoint_id=self.their_folder(), process_group=self.gloo)
        elif way != "none":
            if way not in self.theirs:
                self.theirs[way] = AsyncSaver(self.gloo, self.env.device.type)
            self.theirs[way].save(self.their_state(), self.their_folder())

    def their_state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.state.model, self.state.optimizer)
        return {"model": model, "optim": optimizer}

    def their_folder(self) -> str:
        return str(self.place / "dcp" / str(self.state.step))

    def wait_for_writes(self) -> None:
        """Until nothing is in flight, on no rank."""
        for saver in self.theirs.values():
            saver.finish()
        job = self.ours.flight
        if job is not None:
            job.done.wait()
        self.ours.sealed()
        dist.barrier()

    def remove_theirs(self) -> None:
        """Not counted; ours removes its own during the steps."""
        if self.env.is_main:
            shutil.rmtree(self.place / "dcp", ignore_errors=True)
        dist.barrier()

    def round(self, way: str, tally: Tally) -> None:
        times, cpu = [], time.process_time()
        for nth in range(self.every):
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
        ended = time.perf_counter()
        self.wait_for_writes()
        tally.rounds_s.append((sum(times) + time.perf_counter() - ended) / self.every)
        tally.cpu_s.append(time.process_time() - cpu)
        self.remove_theirs()

    def alone(self, ways: list[str]) -> dict[str, float]:
        """GiB a second of this rank's state, until all is written, of one save without steps; of a plain file
        with fsync.
        """
        found, size = dict[str, float](), self.state_bytes()
        for way in ways:
            if way != "none":
                began = time.perf_counter()
                self.state.step += 1
                self.save(way)
                self.wait_for_writes()
                found[way] = size / 2**30 / (time.perf_counter() - began)
                self.remove_theirs()
        piece, plain = os.urandom(1 << 26), self.place / f"plain-{self.env.rank}"
        pieces = size // len(piece) + 1

        def write() -> None:
            with plain.open("wb", buffering=0) as file:
                for _ in range(pieces):
                    file.write(piece)
                os.fsync(file.fileno())

        found["a plain file, one thread"] = pieces * len(piece) / 2**30 / measured(write)[0]
        plain.unlink()
        return found

    # ---- memory and loading

    def memory(self, saves: int) -> list[float]:
        """Host memory after each save, MiB above that before the first; the process's own, without the page
        cache.
        """
        gc.collect()
        fresh, before, peaks = self._checkpointer("memory"), own_memory(), []
        for _ in range(saves):
            self.state.step += 1
            processes.reset_peak_memory()
            fresh.save(self.state, metrics={}, reason="bench", wait=True)
            peaks.append((own_memory(peak=True) - before) / 2**20)
            fresh.sealed()
        fresh.close()
        return peaks

    def load(self, size: Size) -> dict[str, Any]:
        """Seconds of each load and bytes that one reads, from files in no cache; the two take turns."""
        self.ours.save(self.state, metrics={}, reason="bench", wait=True)
        folder, theirs = Path(self.ours.sealed()[-1].path), self.place / "dcp" / "load"
        dcp.save(self.their_state(), checkpoint_id=str(theirs), process_group=self.gloo)
        unique = sum(file.stat().st_size for file in folder.iterdir())
        own_mib = self.state_bytes() / 2**20
        # what was saved makes room: at 500M parameters two states, buffers for saves and dcp's copies are
        # more than 24 GiB
        self.close()
        del self.state, self.ours
        gc.collect()
        fresh = self.state = self._build(size, seed=1)
        loads = {"ours": partial(self._load_ours, fresh), "dcp": partial(self._load_theirs, fresh, theirs)}
        found: dict[str, Any] = {"ours_s": [], "dcp_s": [], "unique_bytes": unique, "state_mib": own_mib}
        for nth in range(LOADS):
            for name in turned(list(loads), nth):
                forget(folder, theirs)
                dist.barrier()
                seconds, found[f"{name}_bytes"] = measured(loads[name])
                found[f"{name}_s"].append(seconds)
        return found

    def close(self) -> None:
        self.ours.close()
        for saver in self.theirs.values():
            saver.close()
        self.theirs.clear()

    def _load_ours(self, state: TrainState) -> None:
        again = self._checkpointer()
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
    memory = proc.memory_bytes()
    now = memory["RssAnon"] + memory["RssShmem"]
    return now + memory["VmHWM"] - memory["VmRSS"] if peak else now


def measured(call: Callable[[], object]) -> tuple[float, int]:
    began, started = processes.bytes_read(), time.perf_counter()
    call()
    return time.perf_counter() - started, processes.bytes_read() - began


def forget(*folders: Path) -> None:
    """Removes files from the page cache."""
    for file in (file for folder in folders for file in folder.iterdir()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# ---------------------------------------------------------------- the whole


def rank_main(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    env = from_environment(device=options.device)
    store = dist.FileStore(str(Path(options.place, "store")), env.world_size)
    backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "cpu:gloo"
    dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world_size)
    size = SIZES[options.size]
    bench = Bench(env, size, Path(options.place))
    tallies = {way: Tally() for way in options.ways}
    for way in options.ways:  # once through, uncounted: plans, buffers, processes, compiled kernels
        bench.round(way, Tally())
    for nth in range(options.rounds):
        for way in turned(options.ways, nth):
            bench.round(way, tallies[way])
            if env.is_main:
                mean = tallies[way].rounds_s[-1]
                print(f"round {nth + 1} of {options.rounds}, {way}: mean step {mean:.3f} s", flush=True)
    result = {
        "rank": env.rank,
        "parameters": sum(p.numel() for p in bench.state.model.parameters()),
        "ways": {way: vars(tally) for way, tally in tallies.items()},
        "alone": bench.alone(options.ways),
        "memory_mib": bench.memory(options.saves),
        "load": bench.load(size),
    }
    Path(options.place, f"result-{env.rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # dcp's background process is a daemon that a plain exit waits for
