"""One model trained with the defaults, with each memory and speed option alone, and with useful combinations.

    python -m bench.knobs                       every group: a quarter of an hour on four cores
    python -m bench.knobs --group recompute     one group; the other rows of bench/results/knobs.* stay
    python -m bench.knobs --short               one group, few rounds

Within a group all runs are alive at once and take turns of some steps, the defaults among them; a ratio is
taken round by round. The loss difference is the largest over the first steps, relative to the defaults' on
the same samples. Peak memory is the account of --profile.memory on a step before timing starts: bytes of
tensors, those in files too, and on CUDA of the allocator's blocks. It is blank where compiled code allocates
by itself, which the CPU's account cannot see.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import tables
from bench.peers.team import Team, TeamError
from bench.peers.work import WORKS, Work

CPU_RANKS = 2
PROFILED = ("--profile.memory", "true", "--profile.steps", "2:2")
WARM, TURN = 3, 2
ROUNDS, SHORT_ROUNDS = 8, 2

WORKS["knobs"] = Work(
    "knobs", "decoder, 6 layers of 256, 128 tokens × 8",
    ("--model.name", "transformer", "--data.args.kind", "tokens", "--model.args.width", "256",
     "--model.args.layers", "6",
     "--model.args.heads", "4", "--model.args.vocab_size", "1024", "--data.seq_len", "128",
     "--train.global_batch", "8"),
    "tokens",
)  # fmt: skip
FULL = "--memory.activation_checkpointing full"
OPS = "--memory.activation_checkpointing ops"
HALF = "--train.micro_batch 2"
GROUPS: dict[str, tuple[str, ...]] = {
    "recompute": (
        FULL, f"{FULL} --memory.activation_checkpointing_every 2", OPS,
        "--memory.loss_chunk 256", "--memory.activation_offload true",
        f"--memory.activation_offload true {FULL}",
    ),
    "gather": (
        "--mesh.reshard_after_forward false", "--speed.prefetch_forward 2 --speed.prefetch_backward 2",
        "--mesh.wrap root",
        "--mesh.strategy ddp",
    ),
    "accumulate": (
        HALF, f"{HALF} --mesh.accumulate every", f"{HALF} --mesh.reshard_after_forward step",
        f"{HALF} {FULL}",
    ),
    "precision": (
        "--precision.param bf16", "--precision.param bf16 --precision.reduce bf16",
        f"--precision.param bf16 {OPS}",
        "--speed.float8 tensorwise --speed.float8_emulate true",
    ),
    "optimizer": (
        "--optim.fused false", "--optim.state bf16", "--optim.state 8bit",
        "--memory.nvme optimizer --memory.nvme_dir DIR",
        "--memory.nvme all --memory.nvme_dir DIR", f"--memory.nvme all --memory.nvme_dir DIR {FULL}",
    ),
    "compile": ("--speed.compile true", f"--speed.compile true {OPS}",
                "--speed.compile true --memory.activation_budget 0.5"),
    "parts": ("--model.frozen embedding.*", "--lora.rank 8", f"--lora.rank 8 {FULL}", "--data.workers 0"),
}  # fmt: skip
SHORT_GROUP = "recompute"


class Ranks(Team):
    """The ranks of one shardrun run with some flags."""

    def __init__(self, flags: str, work: str, ranks: int, threads: int) -> None:
        program = ("bench.knobs", "--as-a-rank")
        super().__init__(
            "ours", work, ranks, threads=threads, flags=[*PROFILED, *flags.split()], program=program
        )

    def peak_bytes(self) -> int:
        """The account's peak, of the rank with most memory."""
        files = Path(self._folder.name, "run", "profile").glob("rank*_memory.json")
        return max((json.loads(file.read_text())["peak"]["bytes"] for file in files), default=0)


@dataclass
class Seen:
    """One run's rounds."""

    wall_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    refused: str = ""


def as_a_rank(work: str, flags: Sequence[str]) -> None:
    """One rank, between its turns (bench/peers/worker.py)."""
    import torch

    import fsdp.run.loop  # noqa: F401
    from bench.peers.worker import Orders, run_ours

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    orders = Orders()
    orders.say(ready=os.getpid())
    run_ours(work, tuple(flags), orders)
    orders.say(ended=True)
    os._exit(0)


def measure(work: str, knobs: Sequence[str], ranks: int, rounds: int) -> dict[str, Seen]:
    """The defaults, named "", and each option; refused ones have the reason."""
    threads = max(1, len(os.sched_getaffinity(0)) // 2 // ranks)
    seen = {knob: Seen() for knob in ("", *knobs)}
    teams: dict[str, Ranks] = {}
    try:
        for knob, one in seen.items():
            begin(knob, one, work, ranks, threads, teams)
        for nth in range(rounds):
            for knob in tables.turned(list(teams), nth):
                turn = teams[knob].steps(TURN)
                seen[knob].wall_s.append(turn["wall_s"])
                seen[knob].losses += turn["losses"]
    finally:
        for team in teams.values():
            team.close()
    return seen


def begin(knob: str, one: Seen, work: str, ranks: int, threads: int, teams: dict[str, Ranks]) -> None:
    """Starts a run and takes its first steps, in which memory is measured and units are compiled."""
    from fsdp import config
    from fsdp.base.errors import ConfigError

    try:
        config.load([*WORKS[work].all_flags, *knob.replace("DIR", "/tmp").split()])
        team = Ranks(knob, work, ranks, threads)
        one.losses = team.steps(WARM)["losses"]
    except (ConfigError, TeamError) as error:
        lines = [line for line in str(error).splitlines() if "HINT" in line or "Error" in line] or str(
            error
        ).splitlines()
        one.refused = lines[-1][:160]
        return
    teams[knob] = team
    one.peak_bytes = team.peak_bytes()
    if "--speed.compile true" in knob and work == "knobs":
        one.peak_bytes = 0


def rows(seen: Mapping[str, Seen], work: str) -> list[dict[str, Any]]:
    """A row for each option: medians, and ratios to the defaults of the same rounds."""
    from bench.peers.work import Place

    place = Place(WORKS[work], 0, 1)
    base, found = seen[""], []
    for knob, one in seen.items():
        row: dict[str, Any] = {"knob": knob, "refused": one.refused, "peak_bytes": one.peak_bytes}
        if one.wall_s:
            step_s = statistics.median(one.wall_s)
            row |= {
                "step_ms": [1e3 * s for s in one.wall_s], "per_s": place.samples_a_step / step_s,
                "time": tables.ratio(one.wall_s, base.wall_s),
                "loss_difference": max(abs(a - b) / abs(b) for a,
                b in zip(one.losses, base.losses, strict=True)),
            }  # fmt: skip
        found.append(row)
    return found


def shown(found: Sequence[Mapping[str, Any]]) -> str:
    base = found[0]
    lines = []
    for row in found:
        name = f"`{row['knob']}`" if row["knob"] else "the defaults"
        if row["refused"]:
            lines.append([name, f"not run: {row['refused']}", "", "", "", "", ""])
            continue
        peak, share, time = row["peak_bytes"], "", ""
        if row["knob"]:
            share = f"{peak / base['peak_bytes']:.2f}" if peak and base["peak_bytes"] else ""
            time = row["time"].judged(more_is_better=False)
        lines.append(
            [
                name,
                tables.spread(row["step_ms"]),
                time,
                f"{row['per_s']:,.0f}",
                f"{peak / 2**20:.0f}" if peak else "",
                share,
                f"{row['loss_difference']:.1e}" if row["knob"] else "",
            ]
        )
    heads = ["", "step ms", "time/defaults", "tokens/s", "peak MiB", "peak/defaults", "loss differs"]
    return tables.table(heads, lines)


NOTES = (
    "Medians of rounds with the smallest and largest; ratios round by round with their 95% interval, equal "
    "where it contains 1."
)


def title_of(group: str, work: str, ranks: int, rounds: int) -> str:
    return f"{group}: {WORKS[work].what}; {ranks} rank{'s' * (ranks > 1)}, {rounds} rounds of {TURN} steps"


def piece(group: str, work: str, ranks: int, rounds: int, short: bool) -> None:
    print(f"\n{title_of(group, work, ranks, rounds)}", flush=True)
    about = tables.machine()
    found = rows(measure(work, GROUPS[group], ranks, rounds), work)
    text = shown(found)
    print(text, flush=True)
    tables.write_piece(
        "knobs",
        f"{work}/{list(GROUPS).index(group)} {group}",
        short=short,
        title="Each knob beside the defaults",
        piece_title=title_of(group, work, ranks, rounds),
        command=f"python -m bench.knobs --group {group} --rounds {rounds}",
        about=about,
        text=text,
        numbers={"rows": found},
        notes=NOTES,
    )


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--as-a-rank"]:
        as_a_rank(argv[2], argv[3:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--group", choices=list(GROUPS))
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args(argv)
    groups = [options.group] if options.group else [SHORT_GROUP] if options.short else list(GROUPS)
    for group in groups:
        rounds = options.rounds or (SHORT_ROUNDS if options.short else ROUNDS)
        piece(group, "knobs", CPU_RANKS, rounds, options.short)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
