"""Lines of ranks that share a stream."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES, RANKS = 2000, 3
PRINTS = f"""
import sys
from fsdp.base.text import print_line
for number in range({LINES}):
    print_line(f"rank {{sys.argv[1]}} failed at step {{number}}")
"""


def test_lines_of_ranks_that_print_at_once_are_whole() -> None:
    """Unbuffered, as in containers: there `print` writes a text and the end of its line apart."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    reading, writing = os.pipe()
    command = [sys.executable, "-c", PRINTS]
    started = [subprocess.Popen([*command, str(rank)], stderr=writing, env=environ) for rank in range(RANKS)]
    os.close(writing)
    with os.fdopen(reading) as printed:
        lines = printed.read().splitlines()
    assert [process.wait() for process in started] == [0] * RANKS
    wanted = [f"rank {rank} failed at step {number}" for rank in range(RANKS) for number in range(LINES)]
    assert sorted(lines) == sorted(wanted)
