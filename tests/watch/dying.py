"""A rank that ends by SIGKILL as it enters a phase of a step."""

from __future__ import annotations

import os
import signal

from fsdp.base.phases import Phases
from tests.golden import rank as rank_module


def run(rank: int, ranks: int, flags: list[str], store: str, log: str, phase: str, step: int) -> None:
    if rank == 0:
        _kill_at(phase, step)
    rank_module.run(rank, ranks, flags, store, log)


def _kill_at(phase: str, first: int) -> None:
    """`start` has no beginning that is announced: the rank dies with the first listener of phases."""
    enter, listen = Phases.enter, Phases.listen

    def entered(self: Phases, name: str, step: int | None = None) -> None:
        enter(self, name, step)
        if name == phase and self.step >= first:
            os.kill(os.getpid(), signal.SIGKILL)

    def listened(self: Phases, listener: object) -> None:
        listen(self, listener)  # type: ignore[arg-type]
        if phase == "start":
            os.kill(os.getpid(), signal.SIGKILL)

    Phases.enter = entered  # type: ignore[method-assign]
    Phases.listen = listened  # type: ignore[method-assign]
