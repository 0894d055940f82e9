"""The page of all kills so far, and the lines that a sitting ends with."""

from __future__ import annotations

from collections.abc import Sequence

from bench import tables
from tests.torture.record import Sitting, counted, day, left_out, listed, total, violations
from tests.torture.shapes import EVERY

COMMAND = "python -m tests.torture --kills N --jobs 2 --seed SEED --record bench/results/torture.json"
KINDS = {
    "moments": "moment",
    "launchers": "started by",
    "victims": "killed first",
    "stores": "checkpoints in",
    "shapes": "run",
}


def summary(sittings: Sequence[Sitting]) -> str:
    kills, seconds = total(sittings, "kills"), total(sittings, "seconds")
    repeated = total(sittings, "steps_repeated") / max(1, kills)
    most = max((one["most_repeated"] for one in sittings), default=0)
    found = [text for one in sittings for text in one["violations"]]
    return "\n".join(
        [
            f"{kills:,.0f} kills in {seconds:,.0f} s ({seconds / max(1, kills):.2f} s a kill)",
            *(f"{what}: {listed(counted(sittings, kind))}" for kind, what in KINDS.items()),
            f"steps repeated: at most {most}, on average {repeated:.1f}; "
            f"a save every {EVERY}, started at one step and sealed some steps later",
            f"{total(sittings, 'ends'):,.0f} runs ended with the losses and the model of the uninterrupted "
            "run",
            f"left out: {left_out(sittings)}",
            f"violations: {len(found)}",
            *found,
        ]
    )


def page(sittings: Sequence[Sitting]) -> str:
    kills, seconds = total(sittings, "kills"), total(sittings, "seconds")
    most = max((one["most_repeated"] for one in sittings), default=0)
    found = violations(sittings)
    parts = [
        "# Runs killed at random moments",
        f"`{COMMAND}`",
        f"{kills:,.0f} kills in {len(sittings)} sittings, {seconds / 3600:.1f} hours in all; "
        f"{total(sittings, 'ends'):,.0f} runs reached their end, each with the losses and the model of the "
        "uninterrupted run: bit for bit, and within 1e-12 in fp64 where starts had other numbers of ranks "
        "or other strategies. After each kill every sealed checkpoint was read whole and compared with the "
        f"uninterrupted run's at its step. Steps repeated after a kill: at most {most}, with a save every "
        f"{EVERY}. Violations: {len(found) or 'none'}.",
        *(
            tables.table([what, "kills"], counted(sittings, kind).most_common())
            for kind, what in KINDS.items()
        ),
        tables.table(
            ["day", "commit", "seed", "at once", "kills", "s a kill", "runs ended", "violations"],
            [
                [
                    day(one),
                    one["commit"],
                    one["seed"],
                    one["jobs"],
                    one["kills"],
                    f"{one['seconds'] / max(1, one['kills']):.2f}",
                    one["ends"],
                    len(one["violations"]),
                ]
                for one in sittings
            ],
        ),
        *found,
        f"Left out where it is not installed: {left_out(sittings)}.",
        f"Last machine: {sittings[-1]['machine']}." if sittings else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
