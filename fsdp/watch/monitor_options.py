"""What the rank that starts a monitor tells it. Apart from the monitor, which ranks need not import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Orders:
    """What the rank that starts a monitor tells it."""

    node: str
    run: str
    ranks: dict[int, str]
    nodes: dict[str, list[int]]
    hang_s: float
    late_percent: float
    token: str
    head: bool
    ear: int = -1
    addresses: tuple[tuple[str, int], ...] = ()
    tells_failures: bool = True

    @property
    def world_size(self) -> int:
        return sum(map(len, self.nodes.values()))
