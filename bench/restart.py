"""Time from the kill of a rank to the next new step, and the number of repeated steps.

    python -m bench.restart [--rounds 6] [--ranks 2] [--every 10]

The vision transformer on some ranks, a checkpoint each 10 steps, SIGKILL to a random rank at a random step.
shardrun under its own launcher and under torchrun; a bare script and the frameworks under
`torchrun --max-restarts`. Contenders alternate.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import tables
from bench.launched import Ended, Launched, alone, ours, that_run, torchrun, with_restarts
from bench.peers.roster import ROSTER

STEPS = 100_000
LABELS = {
    "local": "shardrun, python -m launch.local", "ours": "shardrun, torchrun --max-restarts",
    "bare": "bare script with dcp.save, torchrun --max-restarts",
    "accelerate": "Accelerate, torchrun --max-restarts",
    "fabric": "Lightning Fabric, torchrun --max-restarts",
    "ddp": "DDP script with torch.save, torchrun --max-restarts",
    "local-ddp": "shardrun --mesh.strategy ddp, python -m launch.local",
}  # fmt: skip
DDP = ("--mesh.strategy", "ddp")
SHORT = ("local", "bare")


@dataclass(frozen=True)
class Back:
    """One kill."""

    first_s: float
    """To the first step of the new start, an old one or not."""
    new_s: float
    """To the first step that was never done before."""
    lost: int


def command(name: str, folder: Path, ranks: int, every: int, restarts: int) -> list[str]:
    if name.startswith("local"):
        flags = [*ours(folder, STEPS, every), *(DDP if name == "local-ddp" else ())]
        return [
            sys.executable,
            "-m",
            "launch.local",
            "--ranks",
            str(ranks),
            "--restarts",
            str(restarts),
            "--",
            *flags,
        ]
    words = ["train.py", *ours(folder, STEPS, every)] if name == "ours" else alone(name, folder, STEPS, every)
    python = str(ROSTER[name].python)
    return torchrun(ranks, words, restarts=restarts, python=python)


def one_kill(name: str, ranks: int, every: int, at: int, draw: random.Random) -> Back:
    with tempfile.TemporaryDirectory(prefix="bench-restart-") as place:
        run = Launched(
            command(name, Path(place, "run"), ranks, every, 3), Path(place, "log"), with_restarts()
        )
        try:
            run.wait_for(at, 120)
            killed, done, said = run.kill_one(draw), run.newest, len(run.steps)
            new = run.wait_for(run.newest + 1 if run.newest > done else done + 1, 120)
            again = [(when, step) for when, step in run.steps[said:] if when > killed]
            first = next(
                (
                    pair
                    for pair, before in zip(again, [(0.0, done), *again], strict=False)
                    if pair[1] <= before[1]
                ),
                again[0],
            )
            return Back(first[0] - killed, new - killed, max(0, done + 1 - first[1]))
        finally:
            run.end()


def one_round(
    names: Sequence[str], nth: int, ranks: int, every: int, left_out: dict[str, str]
) -> dict[str, Back]:
    """One kill for each contender, after the same step. One that does not recover is dropped."""
    at, backs = random.Random(nth).randint(every + 2, 3 * every), {}
    for name in tables.turned(list(names), nth):
        try:
            backs[name] = one_kill(name, ranks, every, at, random.Random(nth))
            said = str(backs[name])
        except Ended as ended:
            left_out[name] = said = f"round {nth + 1}: {ended}"
        print(f"round {nth + 1}, killed after step {at}, {name}: {said}", flush=True)
    return backs


def shown(seen: dict[str, list[Back]]) -> str:
    rows = []
    for name, backs in seen.items():
        over = tables.ratio([b.new_s for b in backs], [b.new_s for b in seen["bare"]])
        rows.append(
            [
                LABELS[name],
                tables.spread([b.new_s for b in backs]),
                f"{statistics.median(b.first_s for b in backs):.2f}",
                f"{statistics.median(b.lost for b in backs):.0f}, at most {max(b.lost for b in backs)}",
                "" if name == "bare" else over.judged(more_is_better=False),
            ]
        )
    return tables.table(
        ["", "kill to next new step, s", "to the first step again, s", "steps done again", "over bare"], rows
    )


def write(
    seen: dict[str, list[Back]], left_out: dict[str, str], about: str, options: argparse.Namespace
) -> str:
    kills = len(seen["bare"])
    missing = [f"- {LABELS[name]}: left out, {why}" for name, why in left_out.items()]
    return tables.write(
        "restart",
        title="A killed rank to its next new step",
        short=options.short,
        command=f"python -m bench.restart --ranks {options.ranks} --every {options.every} --rounds {kills}",
        about=f"{about}; {options.ranks} ranks, a checkpoint each {options.every} steps, {kills} kills each",
        text="\n\n".join([shown(seen), *missing]),
        numbers={"machine": about, "kills": seen, "left_out": left_out},
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=0, help="0 is 6, or 1 with --short")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--only", default="", help="these contenders: local,ours,bare")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args(argv)
    wanted = tables.chosen(parser, options.only, list(LABELS), SHORT if options.short else list(LABELS))
    names = that_run(wanted)
    about = tables.machine()
    seen: dict[str, list[Back]] = {name: [] for name in names}
    page, left_out = "", dict[str, str]()
    for nth in range(options.rounds or (1 if options.short else 6)):
        backs = one_round(list(seen), nth, options.ranks, options.every, left_out)
        seen = {name: [*known, backs[name]] for name, known in seen.items() if name in backs}
        if "bare" not in seen:
            raise SystemExit(f"{LABELS['bare']}, which all are compared with: {left_out['bare']}")
        page = write(seen, left_out, about, options)  # after each: minutes are in a round
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
