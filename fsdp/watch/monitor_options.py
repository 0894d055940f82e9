"""Options of a monitor process: a line of JSON on its standard input. Ranks import this, not the monitor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MonitorOptions:
    node: str
    run: str
    ranks: dict[int, str]
    """Rank → its status page, of this node."""
    nodes: dict[str, list[int]]
    """Node → its ranks, of the whole run."""
    hang_s: float
    late_percent: float
    token: str
    """Identifies this run's monitors to each other."""
    launcher: str = "torchrun"
    """DistEnv's, for hints."""
    listener: int = -1
    """The head's: an open descriptor on which other nodes' monitors connect; -1 without other nodes."""
    head: tuple[str, int] | None = None
    """Where the head listens; None on the head itself."""
    prints_failures: bool = True
    """False under Ray, whose driver prints its ranks' failures."""

    @property
    def world_size(self) -> int:
        return sum(map(len, self.nodes.values()))
