"""The progress line of tokenizing, and the number of processes for it."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field

from fsdp.tokenize.shards import Tokenized


def cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass
class ProgressLine:
    """On a terminal one line that is rewritten; elsewhere a line every half minute."""

    began: float = field(default_factory=time.monotonic)
    first: int = -1
    printed: float = 0.0

    def show(self, done: int, shards: int, total: Tokenized) -> None:
        self.first = total.tokens if self.first < 0 else self.first
        now = time.monotonic()
        rate = (total.tokens - self.first) / max(now - self.began, 1e-3)
        line = f"{done}/{shards} shards  {total.tokens:,} tokens  {rate / 1e6:.2f} M/s"
        if sys.stderr.isatty():
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
        elif (done and now - self.printed > 30) or done == shards:
            self.printed = now
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if sys.stderr.isatty():
            print(file=sys.stderr)
