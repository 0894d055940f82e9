"""The page of all soaks so far, and the lines that a sitting ends with."""

from __future__ import annotations

from collections.abc import Sequence

from bench import tables
from tests.torture.record import Sitting, counted, day, left_out, listed, total, violations

COMMAND = "python -m tests.torture.soak --hours H --every 60 --place FOLDER --record bench/results/soak.json"
KINDS = {"faults": "fault", "launchers": "started under", "ends": "the launcher ended", "orphans": "outlived"}


def summary(sittings: Sequence[Sitting]) -> str:
    count = sum(counted(sittings, "faults").values())
    newest = sittings[-1]
    return "\n".join(
        [
            f"{count} faults in {total(sittings, 'seconds'):,.0f} s, to step {newest['step']} of "
            f"{newest['steps']}",
            *(f"{what}: {listed(counted(sittings, kind))}" for kind, what in KINDS.items()),
            *(_finished(newest) if newest["finished"] else ["it has not ended"]),
            f"left out: {left_out(sittings)}",
            f"violations: {sum(len(one['violations']) for one in sittings)}",
            *(text for one in sittings for text in one["violations"]),
        ]
    )


def _finished(one: Sitting) -> list[str]:
    return [
        f"{one['steps']:,} steps and {one['restarts']} restarts: the losses and the model of the unbroken "
        "run, bit for bit; the report opens",
        *one["grown"],
        *one["torn"],
    ]


def page(sittings: Sequence[Sitting]) -> str:
    faults, found = counted(sittings, "faults"), violations(sittings)
    ended = [one for one in sittings if one["finished"]]
    parts = [
        "# Long runs through faults of all kinds",
        f"`{COMMAND}`",
        f"{sum(faults.values()):,} faults in {total(sittings, 'seconds') / 3600:.1f} hours of "
        f"{len(sittings)} sittings; {len(ended)} runs have ended, each with the losses of every step and the "
        "model of a run that nothing happened to, bit for bit. "
        f"Violations: {len(found) or 'none'}.",
        *(
            tables.table([what, "times"], counts.most_common())
            for kind, what in KINDS.items()
            if (counts := counted(sittings, kind))
        ),
        tables.table(
            ["day", "commit", "seed", "a fault in", "hours", "faults", "to step", "violations"],
            [
                [
                    day(one),
                    one["commit"],
                    one["seed"],
                    f"{one['every']:g} s",
                    f"{one['seconds'] / 3600:.2f}",
                    sum(one.get("faults", {}).values()),
                    f"{one['step']:,} of {one['steps']:,}",
                    len(one["violations"]),
                ]
                for one in sittings
            ],
        ),
        *("\n".join(f"- {line}" for line in _finished(one)) for one in ended),
        *found,
        f"Left out where it is not installed: {left_out(sittings)}.",
        f"Last machine: {sittings[-1]['machine']}." if sittings else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
