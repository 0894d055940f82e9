"""What a rank that has failed becomes as its last act: a small process under the same number, without torch.

It waits until the monitor has told the story, tells its own where no monitor does, and leaves with the rank's exit code. So the
others, whose connections went with the rank, can fail and be told of too, and what ends last is not cut off with its screen.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from fsdp.watch.cells import MONITOR, SAID, Cells, inherited

TELLS_S = 5.0
"""Longer than the monitor waits for a first failure that is not another's echo."""


def wait_until_told(own: Cells) -> bool:
    deadline = time.monotonic() + TELLS_S
    while not own.numbers[SAID] and time.monotonic() < deadline and _may_come(int(own.numbers[MONITOR])):
        time.sleep(0.02)
    return bool(own.numbers[SAID])


def _may_come(monitor: int) -> bool:
    """None yet: it may be on its way. A monitor that this very process has started is its child, and a zombie when it ends."""
    if not monitor:
        return True
    try:
        return Path(f"/proc/{monitor}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main(descriptor: int, path: Path, code: int) -> int:
    own = inherited(descriptor)
    if not wait_until_told(own):
        words = own.told()
        os.write(2, f"{words['print']}\n".encode() if words else b"")
        path.unlink(missing_ok=True)  # where no monitor came to take the name away
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
