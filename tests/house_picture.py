"""Draws docs/architecture.svg from the imports: levels as bands, rooms as boxes, arrows to what is imported.

    python -m tests.house_picture        writes docs/architecture.svg (make architecture)

An import that other arrows imply (a → b where a → c → b) is left out. The layout is a layered drawing: a long
arrow is split at every row that it crosses, rows are ordered by the mean position of their neighbours, and
positions are the least-squares ones in that order. The same imports give the same bytes.
"""

from __future__ import annotations

import html
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.test_house import LEVEL, LEVELS, PRODUCT, imports, room, room_of_module

PICTURE = Path(__file__).parents[1] / "docs" / "architecture.svg"
WIDTH, ROW, TOP, LEFT = 980, 66, 46, 150
BOX_W, BOX_H, GAP, LANE, PORT = 104, 32, 44, 22, 13
SWEEPS = 24
NAMES = {
    0: "0  basics",
    1: "1  model, ranks, files",
    2: "2  what a step needs",
    3: "3  sharding, saving",
    4: "4  the run",
    5: "5  commands, launchers",
    6: "6  entry",
}
STYLE = """text{font:14px system-ui,sans-serif;fill:#1b2430}.level{font-size:13px;fill:#4a5666}
.band{fill:#f3f6fa}.room{fill:#fff;stroke:#2f5d8c;stroke-width:1.5}.name{text-anchor:middle;font-weight:600}
.edge{fill:none;stroke:#7d93ab;stroke-width:1.4}"""

Graph = Mapping[str, set[str]]


def room_imports() -> dict[str, set[str]]:
    """Room → the rooms that it imports. A room's __main__.py is a command and is left out."""
    graph: dict[str, set[str]] = {name: set() for name in LEVEL}
    for path in PRODUCT:
        if path.name == "__main__.py" or room(path) not in LEVEL:
            continue
        for _, module in imports(path):
            target = room_of_module(module)
            if target in LEVEL and target != room(path):
                graph[room(path)].add(target)
    return graph


def reachable(graph: Graph, starts: Iterable[str]) -> set[str]:
    found: set[str] = set()
    queue = list(starts)
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            queue += graph[name]
    return found


def reduced(graph: Graph) -> dict[str, set[str]]:
    """Without the edges that longer ways imply."""
    return {
        name: {one for one in targets if one not in reachable(graph, targets - {one})}
        for name, targets in graph.items()
    }


def rows_of(graph: Graph) -> dict[str, int]:
    """Row by room, 0 at the bottom: levels in order, within a level importers above imported."""
    rows: dict[str, int] = {}
    first = 0
    for level in sorted(LEVELS):
        names = [name for name in LEVEL if LEVEL[name] == level]
        depth: dict[str, int] = {}
        while len(depth) < len(names):
            for name in names:
                inside = [one for one in graph[name] if LEVEL[one] == level]
                if name not in depth and all(one in depth for one in inside):
                    depth[name] = 1 + max((depth[one] for one in inside), default=-1)
        rows |= {name: first + depth[name] for name in names}
        first += 1 + max(depth.values())
    return rows


@dataclass
class Layout:
    """Rooms and the bends of long arrows, in rows; x of each."""

    rows: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    paths: list[list[str]] = field(default_factory=list)
    near: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    x: dict[str, float] = field(default_factory=dict)


def lay_out(graph: Graph, row: Mapping[str, int]) -> Layout:
    layout = Layout()
    for name in row:
        layout.rows[row[name]].append(name)
    for name in row:
        for target in sorted(graph[name]):
            bends = [f"{name} {target} {at}" for at in range(row[name] - 1, row[target], -1)]
            for at, bend in zip(range(row[name] - 1, row[target], -1), bends, strict=True):
                layout.rows[at].append(bend)
            path = [name, *bends, target]
            layout.paths.append(path)
            for one, other in itertools.pairwise(path):
                layout.near[one].append(other)
                layout.near[other].append(one)
    for names in layout.rows.values():
        layout.x |= {name: 100.0 * at for at, name in enumerate(names)}
    for sweep in range(SWEEPS):
        for at in sorted(layout.rows, reverse=bool(sweep % 2)):
            _place(layout, layout.rows[at])
    return layout


def _place(layout: Layout, names: list[str]) -> None:
    """A row's nodes in the order of their neighbours' means, as near to those as their widths allow."""
    mean = {
        name: sum(layout.x[one] for one in layout.near[name]) / len(layout.near[name])
        for name in names
        if layout.near[name]
    }
    wish = {name: mean.get(name, layout.x[name]) for name in names}
    names.sort(key=lambda name: (wish[name], name))
    offsets = [0.0]
    for left, right in itertools.pairwise(names):
        offsets.append(offsets[-1] + (_width(left) + _width(right)) / 2)
    wanted = [wish[name] - offset for name, offset in zip(names, offsets, strict=True)]
    for name, offset, at in zip(names, offsets, increasing(wanted), strict=True):
        layout.x[name] = at + offset


def _width(name: str) -> float:
    return LANE if " " in name else BOX_W + GAP


def increasing(values: list[float]) -> list[float]:
    """The nearest sequence, in least squares, that never falls (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before, of = pools.pop()
            total, count = total + before, count + of
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def draw() -> str:
    graph = reduced(room_imports())
    row = rows_of(graph)
    layout = lay_out(graph, row)
    height = TOP + ROW * (max(row.values()) + 1) + 34
    least = min(x for name, x in layout.x.items()) - BOX_W / 2
    most = max(x for name, x in layout.x.items()) + BOX_W / 2
    scale = min(1.0, (WIDTH - LEFT - 24) / (most - least))

    def place(name: str, at: int) -> tuple[float, float]:
        return (
            LEFT + (layout.x[name] - least) * scale + (WIDTH - LEFT - 24 - (most - least) * scale) / 2,
            height - 34 - ROW * (at + 0.5),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}">',
        f"<title>The rooms of shardrun and their imports</title><style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        'orient="auto"><path d="M0 0L8 4L0 8z" fill="#7d93ab"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        '<text x="16" y="28">Rooms by level; arrows lead to what is imported: '
        "the same level or those below</text>",
        *_bands(row, height),
        *(_edge(path, row, layout, place) for path in layout.paths),
        *(_box(name, *place(name, row[name])) for name in row),
        f'<text class="level" x="16" y="{height - 10}">Imports that other arrows imply are left out</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _bands(row: Mapping[str, int], height: int) -> Iterable[str]:
    for level in LEVELS:
        inside = [row[name] for name in row if LEVEL[name] == level]
        top = height - 34 - ROW * (max(inside) + 1) + 3
        tall = ROW * (max(inside) - min(inside) + 1) - 6
        yield f'<rect class="band" x="8" y="{top}" width="{WIDTH - 16}" height="{tall}" rx="6"/>'
        yield f'<text class="level" x="18" y="{top + 22}">{html.escape(NAMES[level])}</text>'


def _edge(
    path: list[str], row: Mapping[str, int], layout: Layout, place: Callable[[str, int], tuple[float, float]]
) -> str:
    first = row[path[0]]
    points = [place(name, first - at) for at, name in enumerate(path)]
    out = [one[1] for one in layout.paths if one[0] == path[0]]
    into = [one[-2] for one in layout.paths if one[-1] == path[-1]]
    (x, y), (end_x, end_y) = points[0], points[-1]
    points = [
        (x + _port(layout, out, path[1]), y + BOX_H / 2),
        *points[1:-1],
        (end_x + _port(layout, into, path[-2]), end_y - BOX_H / 2 - 1),
    ]
    drawn = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x, y), (to_x, to_y) in itertools.pairwise(points):
        bend = (to_y - y) / 2
        drawn += f"C{x:.1f} {y + bend:.1f} {to_x:.1f} {to_y - bend:.1f} {to_x:.1f} {to_y:.1f}"
    return f'<path class="edge" d="{drawn}" marker-end="url(#tip)"/>'


def _port(layout: Layout, others: list[str], other: str) -> float:
    """Where on a room's edge the arrow to or from `other` is, by the order of its arrows."""
    others = sorted(others, key=lambda name: (layout.x[name], name))
    return PORT * (others.index(other) - (len(others) - 1) / 2)


def _box(name: str, x: float, y: float) -> str:
    label = {"train": "train.py", "launch": "launch/"}.get(name, name)
    return (
        f'<rect class="room" x="{x - BOX_W / 2:.1f}" y="{y - BOX_H / 2:.1f}" '
        f'width="{BOX_W}" height="{BOX_H}" rx="5"/>'
        f'<text class="name" x="{x:.1f}" y="{y + 5:.1f}">{html.escape(label)}</text>'
    )


def main() -> int:
    PICTURE.write_text(draw(), encoding="utf-8")
    print(PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
