"""Rewrites the pages of bench/results from the rounds that their JSON files keep: medians, ratios, intervals
and words as bench/tables.py computes them now.

    python -m bench.recompute

Takes no measurement. Figures whose rounds are not kept stay as they are. A remark on older figures (`remark`
in the JSON) stays until the bench replaces them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench import knobs, ray_tutorial, restart, save_table, scale, start, tables, train

Piece = Mapping[str, Any]


def _train(key: str, piece: Piece) -> dict[str, Any]:
    seen = {
        row["name"]: train.Seen(
            wall_s=[ms / 1e3 for ms in row["step_ms"]],
            cpu_s=[ms / 1e3 for ms in row["cpu_ms"]],
            faults=row.get("faults", []),
            peaks_mib=row["peaks_mib"],
        )
        for row in piece["rows"]
    }
    first = piece["rows"][0]
    found = train.rows(seen, first["per_s"][0] * first["step_ms"][0] / 1e3)
    return {"text": train.shown(found, key.partition("@")[0]), "rows": found}


def _knobs(key: str, piece: Piece) -> dict[str, Any]:
    base = piece["rows"][0]["step_ms"]
    found = [
        {**row, "time": tables.ratio(row["step_ms"], base)} if "step_ms" in row else row
        for row in piece["rows"]
    ]
    return {"text": knobs.shown(found), "rows": found}


def _start(key: str, piece: Piece) -> dict[str, Any]:
    text, said = start.shown(
        {name: [start.Started(**one) for one in starts] for name, starts in piece["rounds"].items()}
    )
    return {"text": "\n\n".join([text, *said])}


def _scale(key: str, piece: Piece) -> dict[str, Any]:
    tables_of: dict[str, Callable[[Any], str]] = {
        "ranks": scale.ranks_table,
        "parameters": scale.parameters_table,
    }
    return {"text": tables_of[key](piece["numbers"])} if key in tables_of else {}


PIECES: dict[str, Callable[[str, Piece], dict[str, Any]]] = {
    "train": _train, "knobs": _knobs, "start": _start, "scale": _scale,
}  # fmt: skip


def _restart(kept: Piece) -> str:
    seen = {name: [restart.Back(**one) for one in kills] for name, kills in kept["kills"].items()}
    missing = [f"- {restart.LABELS[name]}: left out, {why}" for name, why in kept["left_out"].items()]
    return "\n\n".join([restart.shown(seen), restart.verdict(seen, 10), *missing])


def _ray(kept: Piece) -> str:
    return ray_tutorial.table(
        {name: [ray_tutorial.Seen(**one) for one in runs] for name, runs in kept["runs"].items()}
    )


WHOLE: dict[str, Callable[[Piece], str]] = {"restart": _restart, "ray_tutorial": _ray}


def pieces(stem: str) -> None:
    """A page of sections; what follows the last of them are its notes."""
    page = (tables.RESULTS / f"{stem}.md").read_text(encoding="utf-8")
    kept = tables.standing(stem)["pieces"]
    last = list(kept.values())[-1]
    notes = page.rpartition(last["text"])[2].strip().removeprefix(last.get("remark", "")).strip()
    new = {key: {**one, **PIECES[stem](key, one)} for key, one in kept.items()}
    tables.write_pieces(stem, new, title=page.splitlines()[0].removeprefix("# "), notes=notes)


def whole(stem: str) -> None:
    kept = tables.standing(stem)
    title = (tables.RESULTS / f"{stem}.md").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    numbers = {key: value for key, value in kept.items() if key not in ("command", "about")}
    text = "\n\n".join([WHOLE[stem](kept)] + ([kept["remark"]] if kept.get("remark") else []))
    tables.write(stem, title=title, command=kept["command"], about=kept["about"], text=text, numbers=numbers)


def main(argv: Sequence[str]) -> int:
    if argv:
        print(__doc__, file=sys.stderr)
        return 2
    done = []
    for stem in PIECES:
        pieces(stem)
        done.append(stem)
    for stem in WHOLE:
        whole(stem)
        done.append(stem)
    for file in sorted(tables.RESULTS.glob("save*.json")):
        text = save_table.markdown(json.loads(file.read_text(encoding="utf-8")))
        file.with_suffix(".md").write_text(text, encoding="utf-8")
        done.append(file.stem)
    print("\n".join(f"bench/results/{stem}.md" for stem in done))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
